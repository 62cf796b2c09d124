"""The command line: one file per command, options in `cli/options`, errors as one line and an exit code.

Commands read options and print results; the work is done in the packages below.
"""

"""The command line: one file per command, shared options in `cli/options`.

Commands read options and print results; other packages do the work.
"""

"""The benchmarks behind `adcascade bench`: ratios within one run, never absolute promises.

Slow reference implementations that exist for comparison only live here as well.
"""

"""The benchmarks of `adcascade bench`: ratios within one run, since absolute times depend on the machine.

The slow reference implementations for comparison are here too. Nothing else imports this package.
"""

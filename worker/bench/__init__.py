"""The benchmarks of `adcascade bench`: `core`, `stream`, `http` and `kafka`, each in the file of its name.

The others are shared: figures, child processes, and programs to compare with (`baselines`).
Most targets are ratios within one run, since absolute times depend on the machine. Nothing else imports this package.
"""

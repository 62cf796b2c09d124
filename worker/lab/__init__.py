"""Experiments, evaluation, plots and benchmarks, for people."""

"""Simulated worlds and users, and what runs on them: the demo, the paper's experiment, traffic, plots, reports.

The true click model is known here, and nowhere else in production code.
"""

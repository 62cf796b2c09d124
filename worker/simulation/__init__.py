"""Simulated worlds and users, and the commands on them: `demo`, `traffic` and the paper's experiment, with their plots.

The true click model of a world is known in no other package. Nothing here has its own rules of serving or learning.
"""

"""Off-policy evaluation: the revenue of another policy on a recorded log, with confidence intervals.

One file per concern: logged sessions, targets, planning, support, estimators, fitted models, intervals.
"""

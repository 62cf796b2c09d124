"""Off-policy evaluation: the revenue of another policy on a recorded log, with confidence intervals.

One file per concern: sessions, planning, support, estimators, fitted models, intervals.
"""

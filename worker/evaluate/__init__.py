"""Off-policy evaluation: what another policy would have earned on a recorded log.

One file per concern: sessions, targets, support, estimators, the fitted click model, intervals.
"""

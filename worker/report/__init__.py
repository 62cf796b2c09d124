"""What a log says to people who do not read metrics: revenue, ads and groups of users over a period, and what changed.

Sessions are counted as the log is read, so memory holds sums only. Nothing here changes a log or learns from it.
"""

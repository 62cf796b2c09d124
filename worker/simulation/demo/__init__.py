"""`adcascade demo`: the whole topology in one process with simulated users, its accounts, live view and report.

Drives the embedded runner by event time; a run is decided by its settings alone. The run to compare with has a
separate process.
"""

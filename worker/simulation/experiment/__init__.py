"""`adcascade simulate`: experiments as in the paper; policies learn from simulated users, who arrive in episodes.

A run is one policy, one number of users and one seed.
"""

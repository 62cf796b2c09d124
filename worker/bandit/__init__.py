"""The decision core: click models, planning, bonuses, policies, estimators, regret.

Only numpy. No I/O, no clock, no codec, no global random state: seeds and numbers come in as arguments.
"""

"""Options: one declaration gives the flag, the environment variable, the TOML name and the documentation.

Groups of options that several commands share are here, with the functions that turn them into values.
"""

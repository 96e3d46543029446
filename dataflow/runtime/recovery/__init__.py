"""Going on when processes die: how often, from what, and the proof that no row was lost or doubled.

Who dies, and how that is noticed, belongs to executors.
"""

"""Where a run's nodes run: as written down, as planned, or on one rank.

Planning itself is in `penstock.planner`.
"""

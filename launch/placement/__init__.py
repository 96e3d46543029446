"""Placement of a run's nodes: as written down, as planned, or on one rank.

Planning itself is in `penstock.planner`.
"""

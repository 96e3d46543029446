"""Measuring a machine, so that the planner knows it.

What is made of the measurements is in `planner/cost`.
"""

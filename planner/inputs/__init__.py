"""Inputs of a plan: clusters, models, layouts, workloads and calls, as data.

Nothing here estimates or searches.
"""

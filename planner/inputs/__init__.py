"""What a plan is made from: clusters, models, layouts, workloads and calls, as data.

Nothing here estimates or searches.
"""

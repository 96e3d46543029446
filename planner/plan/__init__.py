"""From a step, its models and a cluster to the plan that runs it, and that plan played through.

How a plan is shown is in `report`.
"""

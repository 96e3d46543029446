"""From a graph, models and a cluster to the plan that runs it, with its time and memory.

Nothing here starts a process; it imports `dataflow` only.
"""

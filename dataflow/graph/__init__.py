"""Axes, roles, the recording of a step function, and the graph that it becomes.

Nothing here runs a node or knows where one runs.
"""

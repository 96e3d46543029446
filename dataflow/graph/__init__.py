"""What a step is: axes, roles, the recording of a step function, and the graph it becomes.

Nothing here runs a node or knows where one runs.
"""

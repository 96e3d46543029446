"""The mathematics of steps: pure functions of columns, most of which are ops of a graph.

Nothing here trains, holds state or belongs to one algorithm only.
"""

"""Transfer of weights from the processes that train them to those that hold copies.

Which slices must go where is decided in `planner/resharding`.
"""

"""Penstock: RL and RLHF algorithms as dataflow graphs, placed by a planner, driven by one
controller."""

__version__ = "0.1.0"

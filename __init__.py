"""Penstock: RL and RLHF algorithms as dataflow graphs, driven by one controller."""

__version__ = "0.1.0"

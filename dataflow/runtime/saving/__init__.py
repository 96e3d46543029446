"""Checkpoints that are written while a run goes on, on the ranks' side and on the run's.

What a checkpoint holds is said beside this folder, in `checkpoint.py`; where it is kept is the
business of whoever gives a `CheckpointFolder`.
"""

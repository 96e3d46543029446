"""How checkpoints are written while a run goes on: what ranks do for it, and what the run does.

What a checkpoint holds is said beside this folder, in `checkpoint.py`; where it is kept is the
business of whoever gives a `CheckpointFolder`.
"""

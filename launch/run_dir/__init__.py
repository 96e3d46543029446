"""The folder of a run (checkpoints, metrics, trace, curve), and its progress as it goes on.

Nothing here knows how a stage is carried out.
"""

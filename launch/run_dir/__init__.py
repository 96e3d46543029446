"""What a run leaves behind: its folder, checkpoints, metrics, trace and curve.

Nothing here knows how a stage is carried out.
"""

"""What a run leaves behind (folder, checkpoints, metrics, trace, curve), and tells as it goes on.

Nothing here knows how a stage is carried out.
"""

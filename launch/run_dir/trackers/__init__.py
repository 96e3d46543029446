"""Where a run's metrics go: the protocol of a tracker, and one file for each that there is.

Which metrics there are is the algorithm's; when they are logged is decided in `stages`.
"""

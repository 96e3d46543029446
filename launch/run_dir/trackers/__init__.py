"""Trackers of a run's metrics: the protocol, and one file for each that is shipped.

Which metrics there are is the algorithm's; when they are logged is decided in `stages`.
"""

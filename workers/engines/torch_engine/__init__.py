"""The engine of this project itself: whole models in one process, for training and generation.

Models that are divided over processes are computed by the other engines.
"""

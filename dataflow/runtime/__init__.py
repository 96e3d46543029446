"""The engine that runs a graph, the contracts of executors and workers, and their messages.

No engine for models and no executor with processes of its own stands here: those are `workers`.
"""

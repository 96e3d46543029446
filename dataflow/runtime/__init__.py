"""What carries a graph out: the engine, the contract of executors and workers, and their messages.

No engine for models and no executor with processes of its own stands here: those are `workers`.
"""

"""Child processes that run what is not ours: pools with limits, and the sandbox.

Their callers decide what their answers are worth.
"""

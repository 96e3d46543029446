"""Child processes that run what is not ours: pools with limits, and the sandbox.

What their answers are worth is decided by whoever runs them.
"""

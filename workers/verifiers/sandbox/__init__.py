"""Running programs that a model wrote, confined by the kernel and by limits.

What their answers are worth is decided by whoever runs them.
"""

"""Groups of options that several algorithms share, each with what it makes of them in a step.

What a single algorithm decides stands in its own file.
"""

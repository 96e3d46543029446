"""The command line: from a composed configuration to a run, a plan, a graph or a profile.

Everything that a program in Python could use as well stands in the other packages.
"""

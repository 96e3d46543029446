"""Runs and plans from Python and from notebooks: what `penstock.run` and its neighbors are.

They compose as the command line does and carry out what the commands carry out; here is only how
Python says it and what Python is given. No command is in here.
"""

"""The executor whose processes are Ray actors: all that touches Ray's API.

What is true of any executor does not belong here.
"""

"""The commands a person types, and how Hydra composes their configuration.

What a command does stands in the folders beside this one.
"""

"""One file per paper: its step and options, with the ops and losses that only it uses.

A paper may import the recipes above it and never another paper.
"""

"""Environments: groups of them that step together, and the worker that rolls policies out.

The networks that act are in `actors`; games of two players are in `games`.
"""

"""Environments: groups of them that step together, and the worker that rolls policies out."""

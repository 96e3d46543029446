"""Verifiable instructions: which of them a response keeps.

Nothing here asks a model.
"""

"""Roles that hold a number and adapt it while training goes on.

Models are roles too, but they are in `roles`.
"""

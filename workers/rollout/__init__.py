"""Policies that generate, over any engine that draws tokens: random streams and `Rollout` tables.

How tokens are drawn is an engine's business.
"""

"""Policies that generate, over any engine that samples tokens: random streams and `Rollout` tables.

How tokens are sampled is an engine's business.
"""

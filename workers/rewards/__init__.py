"""Rewards as nodes: what may play a `Reward` role besides a task's verifier and a reward model."""

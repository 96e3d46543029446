"""What may play a `Reward` role besides a reward model: verifiers, judges, mixtures, tests.

Problems and their answers are in `data`.
"""

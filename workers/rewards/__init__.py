"""Workers that play a `Reward` role besides reward models: rules, judges, mixtures.

What checks a single response is in `verifiers`; problems and their answers are in `data`.
"""

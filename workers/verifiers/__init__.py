"""Functions that check a response: exact and mathematical matches, tests, instructions.

No role and no task stands here: tasks in `data` name a verifier, workers in `rewards` call it.
"""

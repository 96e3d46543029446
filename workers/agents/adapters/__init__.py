"""Environments of other packages as tasks that are answered in conversation.

Environments that step in groups of arrays are in `workers.envs`; our own tasks are in `tasks`.
"""

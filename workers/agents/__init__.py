"""Conversations: environments that answer in words, tools, and the worker that holds them together.

What scores one response by itself is in `rewards`; environments of numbers are in `envs`.
"""

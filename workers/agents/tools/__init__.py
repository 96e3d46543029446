"""Tools that a model may call in a conversation, and readers of the calls that it writes.

Environments that answer by themselves, without tools, are in `tasks` and `adapters`.
"""

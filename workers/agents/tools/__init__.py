"""What a model may call in a conversation, and how a call is read out of what it says.

Environments that answer by themselves, without tools, are in `tasks` and `adapters`.
"""

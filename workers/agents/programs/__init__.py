"""Programs that talk to a policy as to an OpenAI-compatible server, and the server.

Nothing of this is loaded unless a task has programs.
"""

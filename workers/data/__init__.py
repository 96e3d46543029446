"""Tasks and the rows they give: prompts, demonstrations and preferences, from packages or files.

How a response is scored is in `rewards`.
"""

"""Plans as people and programs read them: text, pages, charts, JSON and traces.

Nothing here decides anything.
"""

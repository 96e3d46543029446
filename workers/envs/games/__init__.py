"""Games of two players: whose rules they are, and the worker that plays them.

How players learn is in `actors`.
"""

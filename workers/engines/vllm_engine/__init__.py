"""Generation by vLLM, which takes its weights from whichever engine trains.

It never trains and never evaluates.
"""

"""Models as data: architecture, first weights, tokenizer.

How a model is computed is an engine's business.
"""

"""Weights, states and train calls of every trainable worker, over any `Network`.

How a model computes its outputs is an engine's business.
"""

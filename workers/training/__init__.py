"""What every trainable worker does with a train call, whichever engine computes it.

How a model computes its outputs is an engine's business.
"""

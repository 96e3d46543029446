"""What every trainable worker does with weights, states and train calls, over any `Network`.

How a model computes its outputs is an engine's business.
"""

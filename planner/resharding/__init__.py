"""Movement of slices of weights when a model changes its layout, as data.

What carries such a plan out is in `workers/weight_sync`.
"""

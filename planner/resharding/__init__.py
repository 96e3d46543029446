"""Which slices of which weights go where when a model changes its layout, as data.

What carries such a plan out is in `workers/weight_sync`.
"""

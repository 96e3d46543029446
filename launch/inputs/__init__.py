"""From a composed configuration to typed inputs: data, sizes and environments.

Where something runs is decided in `placement`.
"""

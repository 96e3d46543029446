"""Algorithms: the vocabulary they share, the mathematics, and one file per algorithm.

`roles` holds contracts and tables, `losses` and `ops` the mathematics to write new algorithms with;
an algorithm's options and its step function are imported from its own file, as in
`from penstock.algorithms.grpo import GRPO, grpo_step`.
"""

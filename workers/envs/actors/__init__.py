"""Small networks that act in environments, what they learn with, and what they remember.

Language models are in `engines`.
"""

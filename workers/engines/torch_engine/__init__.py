"""The engine of this project itself: whole models in one process, for training and generation.

What does not train may be divided over processes; models that train so have the other engines.
"""

"""The exact search for groups, devices and options with the least time per step.

It knows options as numbers; what they cost comes from `cost`, and what is made of them is `plan`.
"""

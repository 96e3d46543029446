"""`penstock runs`: one module for each kind of what it does with runs that exist.

How figures are computed and files are read stands in `launch/runs`.
"""

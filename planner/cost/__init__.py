"""Cost of a call in a layout: seconds and bytes, predicted from shapes and from calibrations.

Nothing here compares or chooses layouts.
"""

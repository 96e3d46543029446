"""What a call costs in a layout: seconds and bytes, predicted from shapes and from calibrations.

Nothing here compares or chooses layouts.
"""

"""What every worker that generates does before and after, whichever engine samples.

Decoding itself is an engine's business.
"""

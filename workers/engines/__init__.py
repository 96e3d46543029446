"""Engines that compute models: one folder each, and the language-model workers over any of them.

Nothing about one engine stands outside its folder and its line in the registry.
"""

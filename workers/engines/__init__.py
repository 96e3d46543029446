"""What computes models: one folder per engine, and the language-model workers over any of them.

Nothing about one engine stands outside its folder and its line in the registry.
"""

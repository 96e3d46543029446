"""What computes models: one folder per engine, each with its own workers.

Nothing about one engine stands outside its folder and its line in the registry.
"""

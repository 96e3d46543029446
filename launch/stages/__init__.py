"""The stages of a run: their graphs, their workers, and carrying them out.

The files they write are those of `run_dir`.
"""

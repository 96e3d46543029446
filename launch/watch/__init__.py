"""The page of `penstock watch`: what it reads of runs, and its files; `run_dir` has the server.

Everything is read from the folders of runs, as they are at that moment; nothing is ever written.
"""

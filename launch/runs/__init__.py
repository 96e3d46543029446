"""Runs that exist: found, compared, drawn, archived.

Everything is read from the files of `run_dir`; nothing here starts a run or needs a service.
"""

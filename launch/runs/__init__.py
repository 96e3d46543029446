"""What is done with runs that exist: found, compared, drawn, held to a reference, archived, swept.

Everything is read from the files of `run_dir`; nothing here starts a run or needs a service.
"""

"""The page of `penstock watch`: a local server, what it reads of runs, and the files of the page.

Everything is read from the folders of runs, as they are at that moment; nothing is ever written.
"""

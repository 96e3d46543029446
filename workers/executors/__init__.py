"""Executors with processes of their own; the one without is in `dataflow/runtime`.

What a process does once it runs is the same under every executor and is not here.
"""

"""Asking a model that another process serves: client, server and their protocol.

What is asked, and with which weights, is decided in `dataflow/runtime`.
"""

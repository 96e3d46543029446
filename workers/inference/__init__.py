"""Asking a model that another process serves: client, server and their protocol.

What is called, and with which weights, is decided in `dataflow/runtime`.
"""

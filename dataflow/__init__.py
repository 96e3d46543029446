"""Penstock dataflow."""

"""Penstock workers."""

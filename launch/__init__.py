"""Penstock launch."""

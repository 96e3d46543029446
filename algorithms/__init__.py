"""Penstock algorithms."""

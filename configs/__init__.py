"""Penstock configs."""

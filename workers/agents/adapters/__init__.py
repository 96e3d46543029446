"""Environments of other packages as tasks that are answered in conversation."""

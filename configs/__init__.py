"""The configuration: YAML groups for Hydra, and the schema that validates the result.

What is made of a configuration is in `launch`.
"""

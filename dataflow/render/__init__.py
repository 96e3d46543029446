"""Drawings of a graph as Mermaid and SVG.

Nothing here changes a graph, and no other folder of `dataflow` needs this one.
"""

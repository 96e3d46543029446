"""Pictures that notebooks show of a graph or a plan, made by folders that stand above theirs.

Jupyter and IPython ask an object that they show for `_repr_svg_` or `_repr_html_`. What draws a
graph reads the graph, and a graph knows nothing of it; so the package that holds both says here
who draws, and the drawing code is imported when the first picture is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

Draw = Callable[[Any], str]

_DRAW: dict[str, Draw] = {}


def draws(kind: str, draw: Draw) -> None:
    """Say who draws objects of a kind.

    Example:
        >>> draws("Graph", lambda graph: f"<svg><text>{escape(graph.name)}</text></svg>")
    """
    _DRAW[kind] = draw


def picture(kind: str, thing: object) -> str:
    """The picture of an object."""
    return _DRAW[kind](thing)


def framed(page: str, height: int) -> str:
    """A whole page as a part of another: its style and its script do not reach beyond it."""
    return (
        f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" width="100%" '
        f'height="{height}" style="border: 0" loading="lazy"></iframe>'
    )

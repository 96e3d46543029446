"""Parameters that training leaves alone, by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from ...dataflow.errors import ConfigError, nearest
from .network import Network
from .stored_pieces import pieces_on, stored_view


def frozen_names(network: Network, patterns: Sequence[str], role: str) -> frozenset[str]:
    """The parameters of a model that patterns name, by the names that checkpoints have."""
    names = [param.name for param in network.layout.params]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"'{role}' is to keep '{pattern}' frozen, which names none of its parameters"
                f"{nearest(pattern, names)}\n    it has: {_some(names)}"
            )
    found = frozenset(name for name in names if any(fnmatchcase(name, p) for p in patterns))
    if len(found) == len(names):
        raise ConfigError(
            f"'{role}' is to keep all of its {len(names)} parameters frozen, so there is nothing "
            "to train\n    leave some out, or do not train the role"
        )
    return found


def _some(names: Sequence[str], most: int = 6) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def frozen_spans(network: Network, names: frozenset[str]) -> list[tuple[int, int]]:
    """Where those parameters lie in a process's gradient, f32[size]: begin and end, in order.

    Uses the network's gradient buffer: what was in it is gone.
    """
    mark = network.start_gradient()
    tensors = network.tensors(mark)
    for piece in pieces_on(network.rank_layout, network.context.process):
        if piece.name in names:
            stored_view(tensors, piece).fill_(1.0)
    return _runs(mark != 0)


def _runs(marked: Tensor) -> list[tuple[int, int]]:
    """Begin and end of each run of True in bool[size]."""
    ends = marked.new_zeros(1)
    edges = torch.diff(torch.cat([ends, marked, ends]).to(torch.int8)).nonzero()[:, 0].tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))

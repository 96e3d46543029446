"""How many rows a device has memory for: a cache is as long as the longest row may get."""

from __future__ import annotations

import torch

from ....dataflow.errors import WorkerError
from .backbone import LeanBackbone
from .decode import padded

_RESERVED = 0.1
"""The share of a device's memory that is left for reading texts and to other processes."""
_BYTES_PER_WORD = 32
"""Of a row, for each token of the vocabulary: logits, float32 and float64 numbers of the sample."""
_BYTES_PER_SCORE = 12
"""Of a row, for each position and head: the scores of one layer's attention."""
_LEAST_ROWS = 16


def rows_that_fit(free_bytes: int, *, total_bytes: int, bytes_per_row: int, most: int) -> int:
    """Rows whose cache fits in free memory: all, or a multiple of 16.

    A tenth of the device stays free. Of 1.5 billion weights in bfloat16 (28 layers of 2 key heads
    of 128) a row of 1,024 + 8,192 tokens takes 252 MiB of cache; 512 of them would be 126 GiB.

    Args:
        free_bytes: That nobody uses.
        total_bytes: Of the device.
        bytes_per_row: What a row needs.
        most: Rows that are wanted.

    Raises:
        WorkerError: If 16 rows, the fewest that are computed at once, do not fit even without the
            reserve.
    """
    if free_bytes < _LEAST_ROWS * bytes_per_row:
        raise WorkerError(
            f"generation needs {_gib(_LEAST_ROWS * bytes_per_row)} GiB for a key-value cache of "
            f"{_LEAST_ROWS} responses, the fewest that are sampled at once, and the device has "
            f"{_gib(free_bytes)} GiB free\n    lower sampling.max_new_tokens or drop long prompts, "
            "or have what else is on the device sleep or move"
        )
    fitting = int(free_bytes - _RESERVED * total_bytes) // bytes_per_row
    return min(most, max(fitting // _LEAST_ROWS, 1) * _LEAST_ROWS)


def rows_in_memory(backbone: LeanBackbone, device: torch.device, longest: int, most: int) -> int:
    """The same for what a CUDA device has free now.

    Args:
        backbone: The model.
        device: A CUDA device.
        longest: Tokens, prompt and response, of the longest row.
        most: Rows that are wanted.

    Raises:
        WorkerError: See `rows_that_fit`.
    """
    free, total = torch.cuda.mem_get_info(device)
    # What torch has taken from the device and uses for nothing is free as well.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return rows_that_fit(
        free, total_bytes=total, bytes_per_row=bytes_per_row(backbone, longest), most=most
    )


def bytes_per_row(backbone: LeanBackbone, longest: int) -> int:
    """What a row of a batch needs: its cache, and what computing and sampling a token takes.

    Args:
        backbone: The model.
        longest: Tokens, prompt and response, of the longest row.
    """
    positions = padded(longest)
    vocab_size, number = len(backbone.embedding), backbone.embedding.element_size()
    cache = 2 * len(backbone.layers) * backbone.num_key_heads * backbone.head_dim * number
    words = _BYTES_PER_WORD * vocab_size
    return positions * (cache + _BYTES_PER_SCORE * backbone.num_heads) + words


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"

"""Imported last by the process whose forks are ranks, and nowhere else.

The first full collection in a fork would copy all that was imported.
"""

from __future__ import annotations

import gc
import os
from importlib.util import find_spec

import torch
from penstock.workers.engines.megatron_engine.groups import prepare_megatron

from ...algorithms import runs
from . import spawned

__all__ = ["runs", "spawned"]

os.environ.pop("PYTHONPATH", None)
if find_spec("megatron") and torch.version.cuda is None:
    prepare_megatron("cpu")
gc.collect()
gc.freeze()

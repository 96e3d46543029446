"""Forked workers of Ray, and helper modules that the tests of this folder share."""

from __future__ import annotations

import sys
from pathlib import Path

from ..ray_forks import forked_workers

__all__ = ["forked_workers"]

sys.path.insert(0, str(Path(__file__).parent))

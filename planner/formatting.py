"""Numbers, device ids and tables as people read them, in every message and report."""

from __future__ import annotations

import re
from collections.abc import Sequence

_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def seconds_text(seconds: float) -> str:
    """Three digits with a unit: "12.3 s", "450 ms", "1,234 s"."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        # Whatever rounds to 1000 of a unit is written in the next one.
        if seconds >= 0.9995 * factor:
            return f"{_digits(seconds / factor)} {unit}"
    return "0 s"


def bytes_of(text: str) -> int:
    """Bytes of a size as people write it: "6GiB", "512 MiB"."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?(MiB|GiB|TiB)", text)
    if found is None:
        raise ValueError(f"expected a size such as 6GiB or 512MiB, got {text!r}")
    return int(float(found[1]) * dict(_UNITS)[found[2]])


def bytes_text(size: float, *, like: float | None = None, unit: bool = True) -> str:
    """Bytes in powers of 1024: "61.5 GiB", "410 MiB"."""
    whole = size if like is None else like
    name, factor = next(((n, f) for n, f in _UNITS if whole >= f), ("B", 1))
    number = f"{size:.0f}" if factor == 1 else _digits(size / factor)
    if 0 < size < 0.005 * factor:
        number = "<0.01"
    return f"{number} {name}" if unit else number


def percent_text(share: float) -> str:
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 9.95 or percent < 0.05 else f"{percent:.1f} %"


def change_text(share: float) -> str:
    """A difference as a share of 1: "+3.2 %", "-57 %", "same"."""
    if abs(share) < 0.0005:
        return "same"
    return f"{'+' if share > 0 else '-'}{percent_text(abs(share))}"


def hours_text(hours: float) -> str:
    """Three digits: "4.80", "1,234", "0.0123"."""
    if 0 < hours < 0.0005:
        return "<0.001"
    return _digits(hours) if hours >= 0.995 or not hours else f"{hours:.3g}"


def _digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def ranges_text(devices: Sequence[int]) -> str:
    """Device ids, neighbors together: "0-7, 16, 24-31"."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][1] + 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def part_text(part: str) -> str:
    """A part of a time or a size: "kv cache"."""
    return part.replace("_", " ")


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as lines with columns under each other; those in `right` end at the same place."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines: list[str] = []
    for row in rows:
        cells = [
            cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
            for i, cell in enumerate(row)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines

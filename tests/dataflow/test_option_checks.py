"""Ranges of options: what is let through, and the message for what is not."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from penstock.dataflow.option_checks import check_range


@dataclass(frozen=True)
class Options:
    """Some options."""

    epochs: int = 1
    ratio: float | None = None
    betas: tuple[float, float] = (0.0, 0.5)


def test_what_lies_within_its_bounds_and_what_is_not_set_passes() -> None:
    options = Options()
    check_range(options)
    check_range(options, "epochs", "ratio", at_least=1)
    check_range(options, "betas", at_least=0, below=1)
    check_range(options, "epochs", above=0, at_most=1)


@pytest.mark.parametrize(
    ("options", "bounds", "message"),
    [
        (Options(0), {"at_least": 1}, "epochs is 0; expected at least 1"),
        (Options(0), {"above": 0}, "epochs is 0; expected above 0"),
        (
            Options(2),
            {"at_least": 0, "at_most": 1},
            "epochs is 2; expected at least 0 and at most 1",
        ),
        (Options(ratio=1.0), {"below": 1}, "ratio is 1.0; expected below 1"),
        (Options(10**30), {}, "epochs is of 100 bits; expected at most 63"),
        (Options(-(10**5000)), {}, "epochs is of 16610 bits; expected at most 63"),
        (Options(ratio=float("nan")), {}, "ratio is nan; expected a finite number"),
        (Options(ratio=float("inf")), {"at_least": 0}, "ratio is inf; expected a finite number"),
        (
            Options(betas=(0.9, 1.0)),
            {"at_least": 0, "below": 1},
            "betas is (0.9, 1.0); expected at least 0 and below 1",
        ),
    ],
)
def test_messages(options: Options, bounds: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_range(options, message.partition(" ")[0], **bounds)

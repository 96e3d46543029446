"""All weights in one buffer, and weights that are those of another owner."""

from __future__ import annotations

import torch
from penstock.workers.training.flat_parameters import FlatParameters
from torch import Tensor, nn


def test_whole_runs_are_borrowed_and_the_rest_is_kept_apart() -> None:
    names = ("gate", "up", "down", "norm")
    owner = FlatParameters(
        {name: nn.Parameter(torch.randn(4, 3)) for name in names}, [("gate", "up")]
    )
    lent: dict[str, Tensor] = {name: owner.view(owner.data, name) for name in names[:3]}
    made = {name: nn.Parameter(torch.empty(4, 3)) for name in names}
    own = FlatParameters(made, [("gate", "up"), ("down", "norm")], empty=True)
    fused = own.fused_weight(("gate", "up"))
    own.borrow(lent)
    # The lender has no norm behind down, and the two are computed with as one.
    assert own.borrowed == ["gate", "up"]
    assert own.data.numel() == 32
    buffer, place = own.data, own.place
    own.borrow(lent)
    assert own.data is buffer
    assert own.place == place
    owner.data.normal_()
    assert torch.equal(fused, owner.fused_weight(("gate", "up")))
    assert torch.equal(made["up"], owner.view(owner.data, "up"))
    before = owner.data.clone()
    with torch.no_grad():
        own.fused_weight(("down", "norm")).zero_()
    assert torch.equal(owner.data, before)
    assert not made["norm"].any()
    own.borrow({})
    assert own.data.numel() == 64
    assert own.place != place

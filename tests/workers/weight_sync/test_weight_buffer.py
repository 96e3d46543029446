"""Account of parameters on their way into an engine, without an engine."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from penstock.workers.weight_sync.version_tracker import WeightsError
from penstock.workers.weight_sync.weight_buffer import ReceivedWeights, parameter_checksum
from torch import Tensor

SHAPES = {"gate": torch.Size((3, 2)), "up": torch.Size((3, 2)), "norm": torch.Size((2,))}


class Loader:
    """Remembers what it was given; fails when told to."""

    def __init__(self) -> None:
        self.given: list[tuple[dict[str, Tensor], int]] = []
        self.fails = False

    def __call__(self, tensors: Mapping[str, Tensor], version: int) -> None:
        if self.fails:
            raise OSError("no room")
        self.given.append((dict(tensors), version))


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def checksums(tensors: Mapping[str, Tensor], version: int) -> dict[str, int]:
    return {name: parameter_checksum(name, t, version) for name, t in tensors.items()}


def make() -> tuple[ReceivedWeights, Loader]:
    loader = Loader()
    return ReceivedWeights("actor", SHAPES, 0, loader), loader


def refusal(received: ReceivedWeights) -> str:
    with pytest.raises(WeightsError) as error:
        received.check()
    return str(error.value)


def test_what_the_engine_was_built_with_is_version_0():
    received, loader = make()
    received.check()
    assert loader.given == []


def test_a_version_is_loaded_once_when_its_last_parameter_comes():
    received, loader = make()
    new = weights(1)
    for name in ("norm", "up"):
        received.receive({name: new[name]}, 1, checksums(new, 1))
        assert loader.given == []
        assert "version 1 is expected" in refusal(received)
    received.receive({"gate": new["gate"]}, 1, checksums(new, 1))
    received.check()
    ((given, version),) = loader.given
    assert version == 1
    assert given.keys() == new.keys()
    assert all(given[name] is new[name] for name in new)


def test_versions_may_be_skipped_and_a_half_received_one_is_forgotten():
    received, loader = make()
    received.receive({"gate": weights(1)["gate"]}, 1)
    received.receive(weights(5), 5)
    received.check()
    assert [version for _, version in loader.given] == [5]
    assert torch.equal(loader.given[0][0]["gate"], weights(5)["gate"])


def test_parameters_of_two_versions_are_never_mixed():
    received, loader = make()
    received.receive({"gate": weights(5)["gate"], "up": weights(5)["up"]}, 5)
    received.expect(1)  # as in the next run, which counts anew
    received.receive({"norm": weights(1)["norm"]}, 1)
    assert loader.given == []
    assert "parameter 'gate' is of version 5; version 1 is expected" in refusal(received)
    received.receive(weights(1), 1)
    received.check()
    assert [version for _, version in loader.given] == [1]


def test_a_dropped_parameter_is_named():
    received, _ = make()
    new = weights(1)
    del new["up"]
    received.receive(new, 1)
    assert refusal(received) == (
        "cannot use the weights on device 0: parameter 'up' is of version 0; version 1 is "
        "expected. Transfer version 1 to it, whole"
    )


def test_a_damaged_parameter_is_named_when_it_comes_and_when_it_is_needed():
    received, loader = make()
    new = weights(1)
    sums = checksums(new, 1)
    new["up"][1, 1] += 1e-7
    with pytest.raises(WeightsError) as error:
        received.receive(new, 1, sums)
    assert str(error.value) == (
        "'actor' was given parameter 'up' as version 1, and it does not have the checksum that its "
        "sender made of that: it was damaged, swapped with another, or is of another version. Send "
        "it again"
    )
    assert refusal(received) == (
        "cannot use the weights on device 0: parameter 'up' has only 0 of its 6 elements of "
        "version 1; version 1 is expected. Transfer version 1 to it, whole"
    )
    assert loader.given == []
    received.receive({"up": weights(1)["up"]}, 1, sums)
    received.check()


def test_two_swapped_parameters_are_named():
    received, _ = make()
    new = weights(1)
    sums = checksums(new, 1)
    new["gate"], new["up"] = new["up"], new["gate"]
    with pytest.raises(WeightsError, match=r"parameter 'up' as version 1, and it does not have"):
        received.receive(new, 1, sums)
    assert "parameter 'gate' has only 0 of its 6" in refusal(received)


def test_swapped_with_their_checksums_they_are_named_too():
    received, _ = make()
    new = weights(1)
    sums = checksums(new, 1)
    new["gate"], new["up"] = new["up"], new["gate"]
    sums["gate"], sums["up"] = sums["up"], sums["gate"]
    with pytest.raises(WeightsError, match=r"does not have the checksum"):
        received.receive(new, 1, sums)


def test_an_old_version_is_refused():
    received, loader = make()
    received.receive(weights(4), 4)
    with pytest.raises(WeightsError) as error:
        received.receive(weights(3), 3, checksums(weights(3), 3))
    assert str(error.value) == (
        "'actor' was given parameter 'gate' of version 3, and expects version 4 or newer; send the "
        "current weights"
    )
    received.check()
    assert len(loader.given) == 1


def test_old_tensors_under_a_new_number_are_refused():
    received, _ = make()
    old = weights(3)
    received.receive(old, 3)
    with pytest.raises(WeightsError, match=r"parameter 'norm' as version 4"):
        received.receive(old, 4, checksums(old, 3))
    assert "version 4 is expected" in refusal(received)


def test_nothing_at_all_is_noticed_when_a_version_is_expected():
    received, _ = make()
    received.expect(1)
    assert "parameter 'gate' is of version 0; version 1 is expected" in refusal(received)


def test_what_is_not_the_models_is_refused():
    received, loader = make()
    new = weights(1)
    with pytest.raises(WeightsError) as error:
        received.receive({**new, "bias": new["norm"]}, 1)
    assert str(error.value) == "'actor' was given parameter 'bias', which its model does not have"
    with pytest.raises(WeightsError) as error:
        received.receive({"up": new["norm"]}, 1)
    assert str(error.value) == "'actor' was given parameter 'up' with shape [2]; expected [3, 2]"
    with pytest.raises(WeightsError) as error:
        received.receive({"up": new["up"]}, 2, {})
    assert str(error.value) == "'actor' was given parameter 'up' without a checksum; send one"
    assert [version for _, version in loader.given] == [1]


def test_a_failed_load_leaves_nothing_held():
    received, loader = make()
    loader.fails = True
    with pytest.raises(OSError, match="no room"):
        received.receive(weights(1), 1)
    assert "parameter 'gate' was never received; version 1 is expected" in refusal(received)
    loader.fails = False
    received.receive(weights(1), 1)
    received.check()


def test_all_or_nothing_is_checked_beforehand():
    received, _ = make()
    new = weights(1)
    received.check_fits(new)
    with pytest.raises(ValueError, match=r"missing \['up'\], unknown \['down'\]"):
        received.check_fits({"gate": new["gate"], "norm": new["norm"], "down": new["up"]})
    with pytest.raises(ValueError, match=r"weight 'norm': expected shape \[2\], got \[3, 2\]"):
        received.check_fits({**new, "norm": new["up"]})
    received.check()

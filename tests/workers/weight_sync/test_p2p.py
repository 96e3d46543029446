"""Real processes carry out random plans; what goes wrong between them is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.planner.inputs.layout import Layout
from penstock.planner.resharding.plan import TransferPlan
from penstock.planner.resharding.plan_transfer import plan_transfer
from penstock.planner.resharding.sharding import Sharding, shard
from penstock.workers.weight_sync.p2p import LARGE_BYTES, Ends, execute
from penstock.workers.weight_sync.version_tracker import HeldWeights, WeightsError

from ...planner.transfers import TINY, cluster_of, transfers
from .transfer_engines import empty, engine, expected, is_same

NUM_CASES = 25
RANK = "tests.workers.weight_sync.transfer_rank"
ROOT = Path(__file__).parents[3]


def random_cases() -> list[tuple[TransferPlan, Sharding, Sharding]]:
    """Plans between random shardings on up to 12 devices, most with relays."""
    cases: list[tuple[TransferPlan, Sharding, Sharding]] = []

    @given(
        transfers(), st.sampled_from(["float32", "bfloat16"]), st.sampled_from([(12,), (4, 4, 4)]),
        st.sampled_from([100, 1000, 10**6]),
    )  # fmt: skip
    @settings(max_examples=NUM_CASES, database=None)
    def collect(
        pair: tuple[Sharding, Sharding], dtype: str, nodes: tuple[int, ...], bucket_bytes: int
    ) -> None:
        source, destination = replace(pair[0], dtype=dtype), pair[1]
        plan = plan_transfer(
            source, destination, cluster_of(*nodes), bucket_bytes=bucket_bytes, min_part_bytes=1
        )
        cases.append((plan, source, destination))

    collect()
    # One device feeds two far nodes: what the first of them gets goes on to the second, and on
    # inside it, in a third round.
    source, destination = shard(TINY, Layout(), [0]), shard(TINY, Layout(dp=4), [1, 2, 3, 4])
    for bucket_bytes in (1, 10**6):
        plan = plan_transfer(
            source, destination, cluster_of(1, 2, 2), min_part_bytes=1, bucket_bytes=bucket_bytes
        )
        cases.append((plan, source, destination))
    return cases


@pytest.fixture(scope="module")
def cases() -> list[tuple[TransferPlan, Sharding, Sharding]]:
    return random_cases()


@pytest.fixture(scope="module")
def found(
    cases: list[tuple[TransferPlan, Sharding, Sharding]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each of four processes says; one start for all tests of this file."""
    folder = tmp_path_factory.mktemp("transfer")
    listed = [
        {"plan": p.to_json(), "source": s.to_json(), "destination": d.to_json(),
         "large_bytes": (1, 40, LARGE_BYTES)[number % 3]}
        for number, (p, s, d) in enumerate(cases)
    ]  # fmt: skip
    (folder / "cases.json").write_text(json.dumps(listed))
    said = [folder / f"{rank}.txt" for rank in range(4)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, file in enumerate(said):
            command = [
                sys.executable,
                "-m",
                "tests.workers.weight_sync.transfer_rank",
                str(rank),
                str(folder),
            ]
            with file.open("wb") as out:
                processes.append(subprocess.Popen(command, cwd=ROOT, stderr=out))
        codes = [process.wait(timeout=200) for process in processes]
        assert codes == [0] * 4, "\n".join(file.read_text() for file in said)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def test_processes_rebuild_every_shard_from_the_fewest_bytes(
    cases: list[tuple[TransferPlan, Sharding, Sharding]], found: list[dict[str, Any]]
) -> None:
    """The processes themselves compared all bits, for two versions of the weights each."""
    assert {move.round for plan, _, _ in cases for move in plan.moves} == {0, 1, 2}
    between = 0
    for index, (plan, _, _) in enumerate(cases):
        results = [one["cases"][index] for one in found]
        for rank, result in enumerate(results):
            mine = [share for share in plan.devices if share.device % 4 == rank]
            arrived = result["received_bytes"] + result["moved_bytes"]
            assert arrived == sum(share.lower_bound_bytes for share in mine)
            assert result["copied_bytes"] == sum(share.kept_bytes for share in mine)
        received = sum(result["received_bytes"] for result in results)
        assert received == sum(result["sent_bytes"] for result in results)
        between += received
    assert between > 50_000


@pytest.mark.parametrize("way", ["packed", "direct"])
def test_a_damaged_slice_is_refused_and_so_is_what_a_relay_makes_of_it(
    found: list[dict[str, Any]], way: str
) -> None:
    sender, receiver, further = (one["damaged"][way] for one in found[:3])
    part = sender["said"]
    name = part.split("'")[1]
    assert receiver["said"] == (
        f"{part} from device 0 to device 1 has the wrong checksum. Of this transfer 1 slice(s) "
        "were refused; send it again"
    )
    assert (
        "from device 1 to device 2 had not arrived whole on device 1, which was to pass it"
        in (further["said"])
    )
    assert f"parameter '{name}' has only" in receiver["check"]
    assert further["check"].startswith("cannot use the weights on device 2: parameter")
    # What is received in place has the flipped bit in it; what is packed stays out as a whole.
    assert receiver["num_wrong"] == 1 if way == "direct" else receiver["num_wrong"] > 1
    assert [sender["again"], receiver["again"], further["again"]] == [""] * 3


def test_an_old_version_is_refused_by_the_receiver(found: list[dict[str, Any]]) -> None:
    assert found[0]["stale"] == ""
    first = "slice ((0, 8), (0, 6)) of parameter 'model.layers.0.self_attn.q_proj.weight'"
    assert found[1]["stale"].startswith(
        f"{first} from device 0 to device 1 is of version 4; expected version 5. Of this transfer "
    )


def test_a_process_that_does_not_come_is_not_waited_for(found: list[dict[str, Any]]) -> None:
    said = found[1]["absent"]
    assert said.startswith(
        "bucket 0 of device 0, with slice ((0, 8), (0, 6)) of parameter "
        "'model.layers.0.self_attn.q_proj.weight', did not come from process 0; 0.5"
    )
    assert "s had passed of the 0.5 s that the transfer may take. It said: " in said


@given(transfers(), st.booleans())
@settings(max_examples=50)
def test_one_process_can_have_all_devices(pair: tuple[Sharding, Sharding], relay: bool) -> None:
    """Nothing is sent then, and torch.distributed is not needed."""
    source, destination = pair
    plan = plan_transfer(source, destination, relay=relay, min_part_bytes=1, bucket_bytes=300)
    before, after = engine(source), empty(destination)
    here = {
        share.device: Ends(
            before.get(share.device, {}),
            after.get(share.device, {}),
            HeldWeights.of(destination, share.device),
        )
        for share in plan.devices
    }
    done = execute(plan, here, dict.fromkeys(here, 0), version=2, deadline_s=5)
    assert is_same(after, expected(destination, source.dtype))
    assert done.received_bytes == done.sent_bytes == 0
    assert done.moved_bytes == plan.lower_bound_bytes
    for ends in here.values():
        assert ends.held is not None
        ends.held.check(2)


def refusal(plan: TransferPlan, here: Mapping[int, Ends], process_of: Mapping[int, int]) -> str:
    with pytest.raises(WeightsError) as caught:
        execute(plan, here, process_of, version=1, deadline_s=5)
    return str(caught.value)


def test_devices_without_a_place_are_refused() -> None:
    source, destination = shard(TINY, Layout(), [0]), shard(TINY, Layout(), [1])
    plan = plan_transfer(source, destination)
    ends = {0: Ends(engine(source)[0]), 1: Ends({}, empty(destination)[1])}
    assert refusal(plan, ends, {0: 3}) == (
        "the plan has device 1, and process_of does not say which process has it"
    )
    assert refusal(plan, ends, {0: 3, 1: 2}) == (
        "process 3 was given the tensors of devices [0, 1]; by process_of it has devices [0]"
    )
    assert "and there is no such tensor; the engine has 0" in refusal(
        plan, {0: ends[0], 1: Ends()}, {0: 3, 1: 3}
    )

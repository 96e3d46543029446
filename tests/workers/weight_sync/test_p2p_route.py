from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.planner.inputs.layout import Layout
from penstock.planner.resharding.plan_transfer import plan_transfer
from penstock.planner.resharding.sharding import Sharding, shard
from penstock.workers.weight_sync.p2p_route import waves_of

from ...planner.transfers import LLAMA_7B, cluster_of, transfers


@given(transfers(), st.sampled_from([1, 2, 3, 5]), st.sampled_from([100, 1000]))
@settings(max_examples=100)
def test_the_nth_message_sent_is_the_nth_received_and_in_the_same_wave(
    pair: tuple[Sharding, Sharding], num_processes: int, bucket_bytes: int
) -> None:
    plan = plan_transfer(*pair, cluster_of(4, 4, 4), bucket_bytes=bucket_bytes, min_part_bytes=1)
    process_of = {share.device: share.device % num_processes for share in plan.devices}
    sent, received = (
        defaultdict[object, list[object]](list),
        defaultdict[object, list[object]](list),
    )
    moved = 0
    for process in range(num_processes):
        here = [device for device, at in process_of.items() if at == process]
        for number, wave in enumerate(waves_of(plan, here, process_of, process)):
            for message, processes in wave.sends:
                boxes = [(part.param.name, part.move.box) for part in message.parts]
                what = (number, message.source, message.num_bytes, boxes)
                for to in processes:
                    sent[process, to].append(what)
            for message, device, came_from in (*wave.receives, *wave.moves):
                assert all(part.move.destination == device for part in message.parts)
                boxes = [(part.param.name, part.move.box) for part in message.parts]
                what = (number, message.source, message.num_bytes, boxes)
                moved += message.num_bytes
                if came_from != process:
                    received[came_from, process].append(what)
    assert sent == received
    assert moved == plan.lower_bound_bytes


def test_buffers_of_a_wave_stay_within_a_bucket() -> None:
    """Headers aside, which are 8 bytes per slice."""
    source = shard(LLAMA_7B, Layout(tp=2), [0, 1])
    destination = shard(LLAMA_7B, Layout(dp=2), [2, 3])
    bucket_bytes = 2 * LLAMA_7B.embedding_params * 2
    plan = plan_transfer(source, destination, bucket_bytes=bucket_bytes, relay=False)
    process_of = {device: device for device in range(4)}
    assert plan.num_buckets > 10
    for device in range(4):
        waves = waves_of(plan, [device], process_of, device)
        headers = 8 * len(plan.params) + 16 * len(plan.moves)
        assert max(wave.message_bytes for wave in waves) <= bucket_bytes + headers

"""Which messages a process sends, receives and handles in itself, and in which order.

Everything happens in waves. Wave w has round r of bucket w - 2r, so that two waves can be under way
at once: what round r passes on arrived two waves earlier and is in place. All processes walk
through the same waves and in each through the same order of messages, so between any two of
them the n-th message sent is the n-th received.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ...planner.resharding.plan import TransferPlan
from .device_slices import Message, Part, copies_of, messages_of
from .version_tracker import WeightsError

__all__ = ["Receive", "Send", "Wave", "header_words", "message_bytes", "waves_of"]

WAVES_PER_ROUND = 2


class Send(NamedTuple):
    """A message, and the processes that get it: one entry per device there."""

    message: Message
    processes: tuple[int, ...]


class Receive(NamedTuple):
    """A message as a device of this process gets it, and the process that it comes from."""

    message: Message
    device: int
    process: int


@dataclass
class Wave:
    """One process's share of a wave.

    Attributes:
        sends: To other processes.
        receives: From other processes.
        moves: Between devices of this process.
        copies: On one device.
    """

    sends: list[Send] = field(default_factory=list[Send])
    receives: list[Receive] = field(default_factory=list[Receive])
    moves: list[Receive] = field(default_factory=list[Receive])
    copies: list[Part] = field(default_factory=list[Part])

    @property
    def message_bytes(self) -> int:
        """All its messages with their headers, each of them once."""
        messages = [send.message for send in self.sends] + [r.message for r in self.receives]
        return sum(message_bytes(message) for message in messages)


def header_words(message: Message) -> int:
    """64-bit words before the slices: version, plan's stamp, a checksum of each slice."""
    return 2 + len(message.parts)


def message_bytes(message: Message) -> int:
    """Header and slices."""
    return 8 * header_words(message) + message.num_bytes


def waves_of(
    plan: TransferPlan, here: Collection[int], process_of: Mapping[int, int], process: int
) -> tuple[Wave, ...]:
    """What a process does, wave by wave.

    Args:
        plan: The plan.
        here: The devices that this process has.
        process_of: Device -> process; of all devices in the plan.
        process: This one.

    Raises:
        WeightsError: If `here` are not the devices that `process_of` gives this process.
    """
    _check_places(plan, here, process_of, process)
    last = max((move.round for move in plan.moves), default=0)
    waves = [Wave() for _ in range(plan.num_buckets + WAVES_PER_ROUND * last)]
    found = messages_of(plan, sorted(here))
    for device, message in _in_order(found):
        wave = waves[message.bucket + WAVES_PER_ROUND * message.round]
        if message.source == device:
            to = tuple(p for d in message.destinations if (p := process_of[d]) != process)
            if to:
                wave.sends.append(Send(message, to))
        else:
            receive = Receive(message, device, process_of[message.source])
            (wave.moves if receive.process == process else wave.receives).append(receive)
    for device in sorted(here):
        for part in copies_of(plan, device):
            waves[part.param.bucket].copies.append(part)
    return tuple(waves)


def _in_order(found: Mapping[int, Iterable[Message]]) -> list[tuple[int, Message]]:
    """By message first and then by receiving device: the order in which `Send` names them."""
    listed = [(device, message) for device, messages in found.items() for message in messages]
    return sorted(
        listed, key=lambda e: (e[1].bucket, e[1].round, e[1].source, e[1].destinations, e[0])
    )


def _check_places(
    plan: TransferPlan, here: Collection[int], process_of: Mapping[int, int], process: int
) -> None:
    missing = [share.device for share in plan.devices if share.device not in process_of]
    if missing:
        raise WeightsError(
            f"the plan has device {missing[0]}, and process_of does not say which process has it"
        )
    listed = {share.device for share in plan.devices if process_of[share.device] == process}
    if listed != set(here):
        raise WeightsError(
            f"process {process} was given the tensors of devices {sorted(here)}; by process_of it "
            f"has devices {sorted(listed)}"
        )

"""Starting and awaiting sends and receives of torch.distributed, on gloo and on NCCL alike."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from .version_tracker import WeightsError

__all__ = ["Clock", "Link", "Op"]


@dataclass(frozen=True, eq=False)
class Op:
    """One buffer in one direction; equal only to itself.

    Attributes:
        is_send: Or it is received.
        buffer: u8[n].
        process: The rank at the other end.
        story: What it is, for messages.
    """

    is_send: bool
    buffer: Tensor
    process: int
    story: str


class Clock:
    """When a transfer began and must have ended."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._begin = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._begin

    @property
    def left(self) -> timedelta:
        """Until the deadline; never zero, which torch takes for no deadline at all."""
        return timedelta(seconds=max(self.deadline_s - self.elapsed_s, 0.001))


class Link:
    """A process group, for messages between two of its processes.

    Args:
        group: torch.distributed's; the default group if None.

    Attributes:
        process: Rank of this process.
        is_batched: Sends and receives that may wait for each other must start together (NCCL);
            otherwise each may start as early as it can.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        found = dist.group.WORLD if group is None else group
        if found is None:
            raise WeightsError(
                "torch.distributed has no default group; call init_process_group, or pass a group"
            )
        self._group = found
        self.process = dist.get_rank(group)
        self.is_batched = "nccl" in dist.get_backend(group)

    def post(self, ops: Sequence[Op]) -> list[dist.Work]:
        """Start them; one handle for each, in order."""
        if not self.is_batched:
            return [self._post_one(op) for op in ops]
        if not ops:
            return []
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(
                    dist.isend if op.is_send else dist.irecv,
                    op.buffer,
                    group=self._group,
                    group_peer=op.process,
                )
                for op in ops
            ]
        )
        # A batch has one handle, not one per message.
        return works if len(works) == len(ops) else [works[-1]] * len(ops)

    def _post_one(self, op: Op) -> dist.Work:
        # What dist.isend and dist.irecv come to, without the checks that every call of them makes:
        # those took longer than this for a message that is not very large.
        start = self._group.send if op.is_send else self._group.recv
        return start([op.buffer], op.process, 0)

    @staticmethod
    def wait(op: Op, work: dist.Work, clock: Clock) -> None:
        """Until it is done.

        Raises:
            WeightsError: If it is not done by the deadline, or the other process is gone.
        """
        try:
            work.wait(clock.left)
        except RuntimeError as error:
            what = "was not taken by" if op.is_send else "did not come from"
            raise WeightsError(
                f"{op.story} {what} process {op.process}; {clock.elapsed_s:.3g} s had passed of "
                f"the {clock.deadline_s:g} s that the transfer may take. It said: {error}"
            ) from error

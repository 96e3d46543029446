"""Failure and hang reports, which a person reads when a run stops. Data with a text form."""

from __future__ import annotations

from dataclasses import dataclass

from .schedule import Deadline


@dataclass(frozen=True)
class FailureReport:
    """A task failed."""

    what: str  # The task in words: "actor.train step 3"
    where: str  # The rank: "train[0]"
    error: str  # The error's text as the worker gave it, traceback included
    story: tuple[str, ...]  # The scheduler's events of the node in that step

    def __str__(self) -> str:
        lines = [f"{self.what} failed on {self.where}", *_indent(self.error.splitlines())]
        return "\n".join([*lines, "what happened before:", *_indent(self.story)])


@dataclass(frozen=True)
class HungTask:
    """A task that has run for too long."""

    node: str  # The node's name, or "publish actor@3" and the like
    step: int | None  # Its step; None for publications and loads
    roles: tuple[str, ...]  # Roles whose weights it reads, with versions: "actor@2"
    ranks: tuple[str, ...]  # Where it runs: "rollout[1]"
    running_s: float  # For how long
    num_rows: int | None  # Rows of the chunk it works on, if known
    missing: str  # Inputs of the node's step that are not there yet: "chunks 1, 3 of 4 (64 rows)"

    def lines(self) -> list[str]:
        """The task in words, a head line and indented details."""
        step = "" if self.step is None else f" of step {self.step}"
        lines = [f"{self.node}{step} has run for {self.running_s:.1f} s"]
        lines.append(f"    on {', '.join(self.ranks)}")
        if self.roles:
            lines.append(f"    with weights {', '.join(self.roles)}")
        if self.num_rows is not None:
            lines.append(f"    working on {self.num_rows} rows")
        if self.missing:
            lines.append(f"    not done: {self.missing}")
        return lines


@dataclass(frozen=True)
class HangReport:
    """Nothing came back within the deadline."""

    at_s: float  # When it was noticed
    deadline: Deadline  # The deadline that was exceeded first
    hung: tuple[HungTask, ...]  # Tasks over their deadlines
    awaited: tuple[str, ...]  # Other things waited for: a batch, a checkpoint
    blocked: tuple[str, ...]  # Tasks that cannot start, and why (the first few)
    ranks: tuple[str, ...]  # Last event of every rank
    instances: tuple[str, ...]  # Version and last event of every copy of trainable weights

    def __str__(self) -> str:
        lines = [f"no progress within {self.deadline}, at {self.at_s:.1f} s"]
        for task in self.hung:
            lines += _indent(task.lines())
        lines += _indent(self.awaited)
        sections = {
            "waiting to start:": self.blocked,
            "last event of each rank:": self.ranks,
            "weights:": self.instances,
        }
        for title, texts in sections.items():
            if texts:
                lines += [title, *_indent(texts)]
        return "\n".join(lines)


def _indent(lines: tuple[str, ...] | list[str]) -> list[str]:
    return [f"    {line}" for line in lines]

"""Workers, role contracts, losses and metrics: what an algorithm and an engine agree on.

A contract is a plain typed class deriving from `Role`; the methods a step may call carry `@call`.
The same class is what the recorder imitates when a step is built and what a worker implements, so
an algorithm never sees an engine and an engine never sees an algorithm. What the engine asks of a
worker besides (states, weights, the device) has defaults in `Worker`, which every role inherits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NoReturn, TypeVar

import torch
from torch import Tensor

from ..errors import WorkerError
from ..files import WrittenFile
from ..kinds import NodeKind

Scope = Literal["row", "group", "batch"]
"""The rows that a node must see at once: single ones, all of a group, or the whole batch."""

F = TypeVar("F", bound=Callable[..., Any])
B = TypeVar("B", contravariant=True)
O = TypeVar("O", contravariant=True)  # noqa: E741 - O for output, as in Loss[B, O]


@dataclass(frozen=True)
class CallSpec:
    """Kind and scope of a role method, as declared with `@call`."""

    kind: NodeKind
    scope: Scope


_CALL_ATTRIBUTE = "__penstock_call__"


def call(kind: Literal["rollout", "forward", "train"], scope: Scope = "row") -> Callable[[F], F]:
    """Declare a method of a role contract as callable from a step. The method itself is unchanged.

    Args:
        kind: All that the engine knows of it: a rollout makes new rows and may read weights up to
            `Schedule.max_lag` versions old, a forward call reads the version current at its line, a
            train call makes the next version.
        scope: What one call must see at once; a train call always sees the batch.
    """

    def mark(method: F) -> F:
        spec = CallSpec(NodeKind(kind), "batch" if kind == "train" else scope)
        setattr(method, _CALL_ATTRIBUTE, spec)
        return method

    return mark


def call_spec(method: object) -> CallSpec | None:
    """The `CallSpec` of a contract's method, or None if a step may not call it."""
    return getattr(method, _CALL_ATTRIBUTE, None)


WriteState = Callable[[Path, Callable[[], bool]], Mapping[str, WrittenFile]]
"""Writes a state into a folder; returns what it has written, by the names in the folder.

Its second argument tells it that the state is not wanted any more.
"""


@dataclass(frozen=True)
class Streamed:
    """The answer to one of several calls that are served together."""

    call: int  # The call's index
    returned: Any  # The method's return value
    size: int  # Length of its longest row
    unfinished: Any = None  # A `Worker.unfinished` table of the rows that go on in a later step


class Worker:
    """The object that plays a role. Override what yours can do; the rest has defaults.

    Where a group has several ranks, every method is called on every rank. Only `close` and `sleep`
    are called whatever the run asks for; a worker that is trained needs `export_weights`,
    `load_weights`, `save_state` and `load_state`, one whose contract `keeps_state` the latter two.

    Attributes:
        metrics: Numbers about the last call (response length, malformed answers), which the worker
            adds to; the engine takes and clears them after each call. A worker without any need
            not have it.
        takes_pieces: A train call may be given a batch in pieces (`call_piece`): each adds to the
            gradient, and the optimizer steps with the last.
        takes_weights: Weights may change while it streams. In a call in flight (`call_in_flight`)
            its stream gives None after every entry that it adds to its rows; when it is resumed,
            `call_version` may be newer, and what it adds from there on is of these weights.
        unfinished: Table of rows that go on in a later step, a frozen dataclass of annotated
            columns, if it has `stream_segment`.
        offload: It sleeps between its calls.
        stays_warm: It leaves an engine to the next worker of its kind in the process: `keep_warm`.
    """

    metrics: dict[str, Metric]
    takes_pieces: bool = False
    takes_weights: bool = False
    unfinished: type[Any] | None = None
    offload: bool = False
    stays_warm: bool = False

    # --- the device, and the end

    def sleep(self) -> None:
        """Give up device memory; what cannot be made again is kept in host memory."""

    def sleep_but_weights(self) -> None:
        """`sleep`, but keep the weights where they are: a view is made of them meanwhile."""

    def wake_weights(self) -> None:
        """Have the weights alone again after `sleep`, as after `sleep_but_weights`."""

    def sleep_empty(self) -> bool:
        """Sleep without keeping weights: they are received again after `wake`, before any call.

        Returns:
            False if it cannot, and is as awake as it was.
        """
        return False

    def wake(self) -> None:
        """Be as before `sleep`."""

    def keep_warm(self) -> None:
        """Leave the engine to the next worker, in place of `close`; see `stays_warm`."""

    def close(self) -> None:
        """Give back processes, files and connections within 5 seconds; nothing follows."""

    # --- several calls together

    def stream(self, method: str, calls: Sequence[Mapping[str, Any]]) -> Iterator[Streamed | None]:
        """Serve calls of one node in one step together, each answered when it is ready.

        What is answered, and in which order, is a function of the calls and the weights: in order
        of (size, call), whatever the timing. None is a pause; see `takes_weights`. A class that
        defines the method anew without this has its method called, one call after another.

        Args:
            method: Name of the method.
            calls: The arguments of each, by name.
        """
        self._lacks("stream")

    def stream_segment(
        self,
        method: str,
        calls: Sequence[Mapping[str, Any]],
        begun: Sequence[Any | None],
        length: int,
    ) -> Iterator[Streamed | None]:
        """Serve calls as `stream` does, each for a segment only.

        A call goes on with the groups that are unfinished, and begins its own. It returns the rows
        of the groups all of whose rows have ended, and gives the others as `Streamed.unfinished`.
        Answers come by (size, call), the size being how far the segment has taken a row.

        Args:
            method: Name of the method.
            calls: The arguments of each, by name.
            begun: What the same call of the step before has left unfinished; None before there is
                one.
            length: By how much a row may grow.
        """
        self._lacks("stream_segment")

    def answer_all(self, method: str, calls: Sequence[tuple[Any, ...]]) -> Sequence[Any] | None:
        """Answer inference requests together: what `method` returns for each tuple of arguments.

        The answer to one must not depend on the others, not by a single bit. None, the default,
        has `method` called for each; so has an exception.
        """
        return None

    # --- the state of training

    def save_state(self, folder: Path) -> None:
        """Write weights and optimizer state, or a state of its own, as safetensors and JSON.

        All ranks are given the same folder. Of what all ranks hold rank 0 may write all, or each
        rank a share; of different things each rank writes files of its own.
        """
        self._lacks("save_state")

    def load_state(self, folder: Path) -> None:
        """Restore what any number of ranks wrote by `save_state`, bit for bit."""
        self._lacks("load_state")

    def take_state(self) -> WriteState:
        """Take the state as it is now, to be written by another thread while calls go on.

        `save_state` writes the same. The next `take_state` comes when the writing has ended.
        Without it, or where a class defines `save_state` anew, calls wait for `save_state`.
        """
        self._lacks("take_state")

    # --- weights

    def export_weights(self) -> Mapping[str, Tensor]:
        """Detached tensors by logical parameter name (Hugging Face's); a snapshot, not views."""
        self._lacks("export_weights")

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all weights in place; names and shapes must match exactly."""
        self._lacks("load_weights")

    def weights_layout(self) -> Any:
        """The layout of the weights in the group: a `planner.resharding.sharding.Sharding`.

        Its devices are numbered as the group's processes. With a layout, processes exchange slices
        of weights; without one (None) `export_weights` and `load_weights` move all of them.
        """
        return None

    def local_tensors(self) -> Mapping[str, Tensor] | None:
        """This process's weights by the layout's names: views, which are read and written in place.

        None if the worker exports nothing and receives whole tensors by `receive`.
        """
        return None

    def frozen_weights(self) -> tuple[Any, Mapping[str, Tensor]] | None:
        """The weights below adapters, like `weights_layout` and `local_tensors`; None without any.

        A view has them only while it is awake.
        """
        return None

    def borrow(self, tensors: Mapping[str, Tensor]) -> None:
        """Have some of `local_tensors` be these tensors of another worker, and only read them."""

    def weights_changed(self) -> None:
        """Note that `local_tensors` were written from outside."""

    def receive(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Use these whole weights from now on.

        They may be views of memory that others read: do not write to them, nor keep them once they
        are in use.
        """
        self._lacks("receive")

    def save_pretrained(self, folder: Path) -> bool | None:
        """Write the model as a folder in Hugging Face's layout: config and safetensors.

        Returns:
            False if there is no such format of it, and nothing was written.
        """
        return False

    def _lacks(self, method: str) -> NoReturn:
        raise WorkerError(
            f"the engine needs `{method}` of a {type(self).__name__}, which does not define it\n"
            f"    {_NEEDED_FOR.get(method, 'define it as penstock.dataflow.Worker describes it')}"
        )


_NEEDED_FOR = {
    **dict.fromkeys(
        ("export_weights", "load_weights"),
        "its role is trained: define export_weights, load_weights, save_state and load_state",
    ),
    **dict.fromkeys(
        ("save_state", "load_state"),
        "its role is trained or keeps a state: define save_state and load_state",
    ),
}


class Role(Worker):
    """Base of every role contract. A contract's methods are declared with `@call`.

    Attributes:
        model_head: What the model behind the role ends in, which a planner sizes it by; None if
            the contract does not say that there is a model.
        default_worker: The worker if none is named, as `module:factory`; None if the contract does
            not say.
        keeps_state: True if a call depends on the calls before it in other ways than by weights.
            Its worker has `save_state`, lives in one group, and is saved in checkpoints.
    """

    model_head: ClassVar[Literal["vocabulary", "scalar"] | None] = None
    default_worker: ClassVar[str | None] = None
    keeps_state: ClassVar[bool] = False


@dataclass(frozen=True)
class Metric:
    """One logged number that adds up over micro-batches, chunks and ranks.

    `mean` metrics keep a weighted sum, `sum` metrics add up, `max` and `min` keep the extreme.
    `value` is what is printed.

    Example:
        >>> (Metric.mean(6.0, 2.0) + Metric.mean(1.0, 1.0)).value
        2.333...
        >>> (Metric.sum(6.0) + Metric.sum(1.0)).value
        7.0
    """

    total: float
    weight: float
    kind: Literal["mean", "sum", "max", "min"] = "mean"

    @staticmethod
    def mean(total: float, weight: float) -> Metric:
        """A mean given as `total / weight`; both add up."""
        return Metric(total, weight)

    @staticmethod
    def sum(total: float) -> Metric:
        """A count: what all parts of a call add up to."""
        return Metric(total, 1.0, "sum")

    def __add__(self, other: Metric) -> Metric:
        if self.kind != other.kind:
            raise ValueError(f"cannot merge a {self.kind} metric with a {other.kind} metric")
        if self.kind == "mean":
            return Metric(self.total + other.total, self.weight + other.weight)
        merge = {"sum": operator.add, "max": max, "min": min}[self.kind]
        return Metric(merge(self.total, other.total), 1.0, self.kind)

    @property
    def value(self) -> float:
        """The number to show; nan for a mean over nothing."""
        if self.kind != "mean":
            return self.total
        return self.total / self.weight if self.weight else float("nan")


def add_metrics(gathered: dict[str, Metric], new: Mapping[str, Metric]) -> None:
    """Add `new` to what was gathered before, name by name."""
    for name, metric in new.items():
        gathered[name] = gathered[name] + metric if name in gathered else metric


Amount = Tensor | float
"""A scalar tensor or a number."""


@dataclass(frozen=True, init=False)
class LossSum:
    """The contribution of some rows to a minibatch's loss.

    A metric is given as `(sum, weight)`, each a scalar tensor or a number; or as one of these,
    which is averaged over micro-batches and suits what is the same in all of them.

    Attributes:
        total: Scalar, differentiable. Added over all micro-batches and ranks it *is* the
            minibatch's loss: it has been divided by the global `totals` already.
        metrics: Name -> `(sum, weight)`, detached here; merged as weighted means.

    Raises:
        ValueError: If the total is no scalar tensor, or a metric is something else.
    """

    total: Tensor
    metrics: Mapping[str, tuple[Tensor, Tensor]]

    def __init__(
        self, total: Tensor, metrics: Mapping[str, Amount | tuple[Amount, Amount]] | None = None
    ) -> None:
        wrong = _unlike_scalar(total, numbers=False)
        if wrong:
            raise ValueError(
                f"the total of a loss is a {wrong}; expected a scalar tensor, computed from the "
                "model's output"
            )
        object.__setattr__(self, "total", total)
        pairs = {name: _metric_pair(name, given) for name, given in (metrics or {}).items()}
        object.__setattr__(self, "metrics", pairs)


def _metric_pair(name: str, given: Amount | tuple[Amount, Amount]) -> tuple[Tensor, Tensor]:
    parts: tuple[object, ...] = given if isinstance(given, tuple) else (given, 1.0)
    wrong = [what for what in map(_unlike_scalar, parts) if what]
    if len(parts) != 2:
        wrong = [f"tuple of {len(parts)}"]
    elif wrong and isinstance(given, tuple):
        wrong = [f"tuple with {wrong[0]}"]
    if wrong:
        raise ValueError(
            f"metric '{name}' of a loss is a {wrong[0]}; expected (sum, weight), each a number or "
            "a scalar tensor, or one such number, which is averaged over micro-batches"
        )
    total, weight = (
        part.detach() if isinstance(part, Tensor) else torch.tensor(part, dtype=torch.float64)
        for part in parts
    )
    return total, weight


def _unlike_scalar(part: object, *, numbers: bool = True) -> str:
    if isinstance(part, Tensor):
        return f"tensor of shape {list(part.shape)}" if part.ndim else ""
    return "" if numbers and isinstance(part, (int, float)) else type(part).__name__


class Loss(Generic[B, O]):
    """A loss over a batch dataclass `B` and a model output `O`, independent of how rows are split.

    A training engine first adds `totals(batch)` over every micro-batch and rank of the minibatch,
    then calls the loss on each micro-batch with that sum, adds the results and sums the gradients.
    So neither micro-batch size, padding nor data-parallel size can change the loss. Where a batch
    comes in pieces, a loss with a `divisor` is divided once all of its rows are there.

    Attributes:
        unit: "group" if rows of one group must meet in one micro-batch (pairs), else "row".
        needs_entropy: True if `O` must carry the entropy of every choice.
        tolerates_lag: True if the loss is sound on rollouts of older weights without behavior
            log-probabilities (regression on fixed targets, for instance).
    """

    unit: ClassVar[Literal["row", "group"]] = "row"
    tolerates_lag: ClassVar[bool] = False

    @property
    def needs_entropy(self) -> bool:
        return False

    def totals(self, batch: B) -> Tensor:
        """Additive totals of some rows, such as the number of trained entries.

        Returns:
            f64[K]; element-wise sums over rows, so that `totals(a ++ b) == totals(a) + totals(b)`.
        """
        raise NotImplementedError

    def __call__(self, output: O, batch: B, totals: Tensor) -> LossSum:
        """The contribution of these rows to the minibatch's loss, given the global `totals`."""
        raise NotImplementedError

    def checked(self, output: O, batch: B, totals: Tensor) -> LossSum:
        """Call the loss, and refuse anything that it returns but a `LossSum`."""
        found = self(output, batch, totals)
        if not isinstance(found, LossSum):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"{type(self).__name__} returned a {type(found).__name__}; expected a LossSum\n"
                "    return LossSum(total), or LossSum(total, metrics={name: (sum, weight)})"
            )
        return found

    def divisor(self, totals: Tensor) -> Tensor | None:
        """The divisor of the rows' sum, if that is all that `totals` are for.

        A batch may then be trained on in pieces, before its totals are known: the loss is called
        with totals of one, and what has been added up is divided at the end. So for all rows

            loss(output, batch, totals).total * divisor(totals)
                == loss(output, batch, ones).total * divisor(ones)

        up to rounding, and metrics do not depend on `totals`.

        Args:
            totals: f64[K], or more numbers after those of `totals`.

        Returns:
            Positive scalar, f64; or None if totals enter in another way, as where advantages are
            normalized, so that a batch must be whole. Which of the two depends on the loss's
            options alone, so that it can be asked before there is a batch.
        """
        return None

"""The planner's model of an engine: the layouts it runs, the memory it holds, how it computes.

The planner knows no engine by name. The caller passes an `EngineModel`, which each engine
makes of itself (`workers/engines`); `ANY` is one that runs every layout, for plans of systems that
are not here.

`why_not` alone decides what runs. The other fields say which of what runs is worth trying, and
with which costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..inputs.calls import Call, CallKind
from ..inputs.layout import Layout
from ..inputs.model_shape import ModelShape
from .memory import Parts, resident_parts, transient_parts

# of a layout, what is done in it, and the model's shape if it is known: a clause that says what the
# engine lacks ("megatron has no cp"), or None if it runs it
WhyNot = Callable[[Layout, CallKind, ModelShape | None], str | None]


def least_shared(*, on_cpu: bool) -> float:
    """Share of a micro-batch's tokens from which on an engine computes equal prompts once."""
    # On a CPU 2 to 12 % were gained where it saves a tenth to a fifth of the tokens of rows of 80
    # to 1,200, and 3 to 9 % lost in a model of two layers with rows of 25 to 70.
    return 0.1 if on_cpu else 0.02


class EngineMemory:
    """Bytes that an engine holds on each device; `Layout.offload` is the caller's business.

    By default it divides states and activations as its layout says; see `memory`.
    """

    def resident(self, call: Call, layout: Layout) -> Parts:
        """Bytes held between calls for the role; `call` is its train call if it has one."""
        return resident_parts(call, layout)

    def transient(
        self,
        call: Call,
        layout: Layout,
        *,
        on_cpu: bool = True,
        borrows: bool = False,
        rows: int | None = None,
    ) -> Parts:
        """Bytes held beyond that while a call runs.

        Args:
            call: What runs.
            layout: How the call is computed.
            on_cpu: Whether the devices are CPUs.
            borrows: For a generation whose role is trained on the same devices: whether it holds
                a copy of the weights while it runs, instead of having some of its own.
            rows: For a generation: rows of each rank that run at once; all of them by default.
        """
        return transient_parts(call, layout, borrows=borrows, rows=rows)

    def packed(self, call: Call, layout: Layout, micro_batch_tokens: int) -> Parts:
        """Bytes that a forward or train call adds on a GPU, at so many tokens a micro-batch.

        Only engines are asked that choose their micro-batch (`EngineModel.packs_on_device`).
        """
        return self.transient(call, layout, on_cpu=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineModel:
    name: str  # what messages call it
    why_not: WhyNot = lambda layout, kind, shape: None  # why it cannot run a layout, if it cannot
    memory: EngineMemory = EngineMemory()  # what it holds
    # which states of a trained model its data-parallel ranks share: the stages worth trying. Of
    # ZeRO, 2 costs more time than 1 and more memory than 3 wherever gradients are added up over
    # micro-batches.
    zero_stages: tuple[Literal[0, 1, 2, 3], ...] = (1, 3)
    # whether frozen models are shared so too, instead of being whole on every rank
    shards_frozen: bool = False
    # whether activations between tensor-parallel regions are cut along the sequence
    sequence_parallel: bool = True
    # tokens of a micro-batch, if the engine packs rows of any length into one; else micro-batches
    # are a number of rows, which the plan chooses
    packs_tokens: int | None = None
    # the larger micro-batches that it makes on a GPU where they fit, the largest first
    packs_on_device: Callable[[ModelShape], tuple[int, ...]] = lambda shape: ()
    # whether it computes a prompt once for all of its rows in a minibatch
    shares_prompts: bool = False
    # whether the head is computed only where a token of a response is predicted
    reads_responses: bool = False
    # products of a head's weights in training on a CPU and on a GPU, as large as that of a forward
    # pass: 3, or 4 if logits are not kept but made again
    head_products: tuple[int, int] = (3, 3)
    # whether a rank computes those of its own rows that are drawn for an update, whose number is
    # not the same on all data-parallel ranks; else each has equally many. Ranks that share experts
    # deal their rows out among themselves.
    draws_minibatches: bool = False
    # whether it generates with the very weights that it trains, where both are on the same devices;
    # else a generation has a copy while it runs
    generates_in_place: bool = False
    # whether what it generates apart or evaluates in another layout may live in the processes that
    # train (`DeviceGroup.within`): they are sent what each device lacks. Else all of it is sent
    views: bool = False
    # whether processes that share a model hold conversations together; else a rank that does so is
    # one process
    divides_conversations: bool = False

    def refuses(self, call: Call, layout: Layout) -> str | None:
        """Why it cannot run a call in a layout, as a clause; None if it can."""
        if call.converses and layout.tp * layout.pp > 1 and not self.divides_conversations:
            return f"engine '{self.name}' holds conversations in one process of each rank"
        return self.why_not(layout, call.kind, call.model)


DEVICE_SHARE = 0.9
"""Share of a GPU's memory that tensors may have, where nothing is known of what else it holds."""


def tokens_on_device(
    engine: EngineModel, calls: Sequence[tuple[Call, Layout]], room_bytes: int
) -> int | None:
    """Tokens of a worker's micro-batches on a GPU: the most that fit, at least `packs_tokens`.

    Args:
        engine: What computes them.
        calls: Forward and train calls of the worker.
        room_bytes: What the device has beside all that is held between calls. Follows from its size
            and from models, not from what is free at a time: results depend on it by rounding.
    """
    if engine.packs_tokens is None:
        return None
    sizes = engine.packs_on_device(calls[0][0].model) if calls else ()
    for tokens in sizes:
        if all(engine.memory.packed(*call, tokens).total <= room_bytes for call in calls):
            return tokens
    return engine.packs_tokens


# an engine that runs every legal layout
ANY = EngineModel(name="any", views=True, divides_conversations=True)


@dataclass(frozen=True)
class RoleEngines:
    """Engines that run the calls of a role."""

    # what trains and evaluates; every layout of a plan is one that it runs
    train: EngineModel = ANY
    rollout: EngineModel | None = None  # what generates, likewise; None if the same engine does
    # whether what is sent to a generation on the same devices stays in their memory: the version
    # that it has and the next (`executor.transport=cuda_ipc`)
    keeps_sent: bool = False

    def runs(self, kind: CallKind) -> EngineModel:
        return self.rollout if self.rollout is not None and kind == "generate" else self.train

    def apart(self, kind: CallKind) -> bool:
        return self.rollout is not None and kind == "generate"

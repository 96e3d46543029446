"""Role contracts and tables of learning from steps kept for later: a replay, and Q-networks.

Rows of `Transitions` are samples of a replay, each of them one step of some environment: columns
are `[sampled_step, time]` with one step of time, so that whatever is written over rows and steps
takes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeVar

from torch import Tensor

from ...dataflow.graph.axes import Axis, boolean, f32, i64
from ...dataflow.graph.role import Loss, Role, call
from .environment import COMPONENT, ENV, FEATURE, TIME, Actor, Trajectories
from .language import TrainMetrics, ValueOutput

SAMPLED_STEP = Axis("sampled_step")

SampledObs = Annotated[Tensor, f32(SAMPLED_STEP, TIME, FEATURE)]
"""What the actor saw, laid out flat."""
SampledAction = Annotated[Tensor, f32(SAMPLED_STEP, TIME, COMPONENT)]
"""One choice per component."""
PerSampledStep = Annotated[Tensor, f32(SAMPLED_STEP, TIME)]
"""One number per sampled step."""
SampledFlag = Annotated[Tensor, boolean(SAMPLED_STEP, TIME)]
"""True on sampled steps that something is true of."""
NumStored = Annotated[Tensor, i64(ENV)]
"""How many steps a replay holds, once per environment."""


@dataclass(frozen=True, kw_only=True)
class Transitions:
    """Steps sampled from a replay.

    Example:
        Two samples of a replay that does not hold enough yet: `mask = [[F], [F]]`.
    """

    obs: SampledObs
    action: SampledAction
    reward: PerSampledStep
    next_obs: SampledObs
    """What the actor saw after the step, before any reset."""
    terminated: SampledFlag
    """True if nothing comes after; an episode that was cut off goes on."""
    mask: SampledFlag
    """False where there was nothing to sample."""


@dataclass(frozen=True, kw_only=True)
class QBatch:
    """What the loss of a Q-network reads."""

    obs: SampledObs
    action: SampledAction
    mask: SampledFlag
    value_target: PerSampledStep


class Replay(Role):
    """Steps of environments, kept for later: as many as there is room for, the newest ones.

    It is one thing that every step changes, so it is on one group of one rank, its calls come in
    the order of steps, and it is part of checkpoints.
    """

    keeps_state: ClassVar[bool] = True

    @call("forward", scope="batch")
    def add(self, steps: Trajectories) -> NumStored:
        """Keep all steps that count; how many are held then, once per environment.

        Its metric:

        - `stored`: steps held after the call.
        """
        raise NotImplementedError

    @call("rollout", scope="batch")
    def sample(self, stored: NumStored, *, num_steps: int, at_least: int = 1) -> Transitions:
        """Sample steps uniformly and with replacement.

        Args:
            stored: What `add` gave: samples are taken after the steps that this graph adds.
            num_steps: Number of steps to sample.
            at_least: Sample nothing, that is, steps that are masked out, as long as fewer are held.
        """
        raise NotImplementedError


B = TypeVar("B")


class QNetwork(Actor):
    """Values of all choices in a state: acts by the best one, or at random now and then."""

    @call("forward")
    def best(self, obs: SampledObs) -> SampledAction:
        """The choice of highest value in each state."""
        raise NotImplementedError

    @call("forward")
    def value(self, obs: SampledObs, action: SampledAction) -> PerSampledStep:
        """Value of a choice in a state."""
        raise NotImplementedError

    @call("train")
    def train(
        self, loss: Loss[B, ValueOutput], batch: B, *, epochs: int = 1, num_minibatches: int = 1
    ) -> TrainMetrics:
        """Take `epochs * num_minibatches` optimizer steps and make the next weight version.

        A batch without a step that counts makes the next version too, by no optimizer step.
        Its metric, besides the loss's:

        - `epsilon`: the share of random choices after the call.
        """
        raise NotImplementedError

    @call("train")
    def follow(self, leader: QNetwork, *, share: float = 1.0, every: int = 1) -> TrainMetrics:
        """Move the weights to those of another network, and make the next weight version.

        Args:
            leader: The role whose weights are read, as they are at this line of the step.
            share: How far: 1 copies them, less is a running mean.
            every: Only in steps whose number it divides, the first of a run included.

        Its metric:

        - `followed`: 1 if the weights have been moved in this step, else 0.
        """
        raise NotImplementedError

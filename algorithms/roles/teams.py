"""The role contract of a critic that sees what all agents of a team see."""

from __future__ import annotations

from typing import TypeVar

from ...dataflow.graph.role import Loss, Role, call
from .environment import LastObservation, Observations, Values
from .language import TrainMetrics, ValueOutput

B = TypeVar("B")


class TeamCritic(Role):
    """A critic of what a whole team sees."""

    @call("forward")
    def value(self, obs: Observations, last_obs: LastObservation) -> Values:
        """The critic's value of every state, seen from every agent."""
        raise NotImplementedError

    @call("train")
    def train(
        self, loss: Loss[B, ValueOutput], batch: B, *, epochs: int = 1, num_minibatches: int = 1
    ) -> TrainMetrics:
        """Take `epochs * num_minibatches` optimizer steps and make the next weight version.

        Minibatches are sampled from single steps of agents, wherever the mask is True.
        """
        raise NotImplementedError

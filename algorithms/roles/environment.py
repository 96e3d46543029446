"""Role contracts and tables of reinforcement learning in environments, and in games.

Conventions (they hold for every table of environments):

- A row is one environment, a column of it `horizon` steps of time; rows may hold several episodes
  one after another. Columns are dense: no row is shorter than another.
- Entry t is about the step from `obs[t]` by `action[t]`: its reward, whether the episode
  `terminated` with it, or was `truncated`, cut off where it would have gone on.
- An environment is reset one step after its episode ended. That step shows the state the episode
  was left in, ignores the action and earns nothing; `mask` is False there and True on all others.
- Actions are numbers whatever they are: the index of a choice, or a real number, per component.
- `FEATURE` counts the numbers of an observation laid out flat, `CHOICE` the choices of all discrete
  components one after another; there are none where every action is always allowed.
- An actor may remember what it has seen. Then what a row began with is a column, and an episode
  begins after each step whose mask is False, with nothing remembered.

The loop of observing and acting is one node, `Env.rollout`. It asks the actor it is given, a copy
of the role's weights, through `Actor.act`, which no step function calls.

Rows of `Transitions` are samples of a replay, each of them one step of some environment: columns
are `[sampled_step, time]` with one step of time, so that whatever is written over rows and steps
takes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...dataflow.graph.axes import Axis, Behavior, GroupId, boolean, f32, i64
from ...dataflow.graph.role import Loss, Role, call
from .language_tables import PolicyOutput, TrainMetrics, ValueOutput

ENV = Axis("env")
TIME = Axis("time")
FEATURE = Axis("feature")
COMPONENT = Axis("component")
CHOICE = Axis("choice")
UNIT = Axis("unit")

EnvId = Annotated[Tensor, i64(ENV)]
"""Number of a row's environment, the same throughout a run."""
EnvGroup = Annotated[Tensor, i64(ENV), GroupId()]
"""The group a row is stepped with: all its environments live in one worker."""
Observations = Annotated[Tensor, f32(ENV, TIME, FEATURE)]
"""The actor's observation before each step, laid out flat and normalized."""
LastObservation = Annotated[Tensor, f32(ENV, FEATURE)]
"""The observation after a row's last step."""
Actions = Annotated[Tensor, f32(ENV, TIME, COMPONENT)]
"""Choices or numbers, as the actor sampled them; numbers are clipped by the environment only."""
ActionMask = Annotated[Tensor, boolean(ENV, TIME, CHOICE)]
"""True where a choice was allowed; no choices at all if everything always is."""
RecurrentStates = Annotated[Tensor, f32(ENV, UNIT)]
"""The actor's recurrent state before a row's first step; no numbers if the actor has none, or no
row has one yet."""
EnvMask = Annotated[Tensor, boolean(ENV, TIME)]
"""True on steps that something is true of."""
PerEnvStep = Annotated[Tensor, f32(ENV, TIME)]
"""One number per step."""
PerEnv = Annotated[Tensor, f32(ENV)]
"""One number per environment."""


@dataclass(frozen=True, kw_only=True)
class EnvRows:
    """The environments of a step: the same rows in every step of a run.

    Example:
        Two groups of two: `env = [0, 1, 2, 3]`, `group = [0, 0, 1, 1]`.
    """

    env: EnvId
    group: EnvGroup


@dataclass(frozen=True, kw_only=True)
class Trajectories:
    """`horizon` steps of every environment.

    Example:
        An episode that terminates with step 1, is reset in step 2 and goes on:
        `terminated = [[F, T, F, F]]`, `mask = [[T, T, F, T]]`.
    """

    env: EnvId
    obs: Observations
    last_obs: LastObservation
    action: Actions
    action_mask: ActionMask
    behavior_logprob: Annotated[Tensor, f32(ENV, TIME), Behavior()]
    """Log-probability of each action under the weights that sampled it, all components together."""
    reward: PerEnvStep
    terminated: EnvMask
    truncated: EnvMask
    mask: EnvMask
    recurrent_state: RecurrentStates


@dataclass(frozen=True, kw_only=True)
class Values:
    """A critic's values of the states of trajectories."""

    value: PerEnvStep
    """Value of the state before each step; where the mask is False, of the one left behind."""
    bootstrap_value: PerEnv
    """Value of the state after a row's last step."""


@dataclass(frozen=True, kw_only=True)
class ActionEvaluation:
    """Log-probabilities by the current weights of actions taken before."""

    logprob: PerEnvStep
    entropy: PerEnvStep


@dataclass(frozen=True, kw_only=True)
class ActorCriticBatch:
    """Columns of the losses of an actor with a critic."""

    obs: Observations
    action: Actions
    action_mask: ActionMask
    mask: EnvMask
    recurrent_state: RecurrentStates
    behavior_logprob: PerEnvStep
    advantage: PerEnvStep
    old_value: PerEnvStep
    value_target: PerEnvStep


@dataclass(frozen=True)
class ActorCriticOutput(PolicyOutput, ValueOutput):
    """The forward pass over some rows: f32[rows, T] each; entropies if the loss asked for them.

    Attributes:
        value_logits: f32[rows, T, bins] of a critic that weighs values instead of saying one.
    """

    value_logits: Tensor | None = None


@dataclass(frozen=True)
class ActionSpace:
    """Actions that an environment takes.

    Attributes:
        kind: "discrete": one choice for each component. "continuous": one number for each.
        sizes: Choices of each discrete component.
        low: Least number of each continuous component.
        high: And largest.
        masked: Whether the environment says which choices are allowed.
    """

    kind: Literal["discrete", "continuous"]
    sizes: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    masked: bool = False

    @property
    def num_components(self) -> int:
        """Numbers that make an action."""
        return len(self.sizes) if self.kind == "discrete" else len(self.low)

    @property
    def num_choices(self) -> int:
        """Width of a column of allowed choices."""
        return sum(self.sizes) if self.masked else 0


class Acts(NamedTuple):
    """One action for each environment of a group."""

    action: NDArray[np.float32]
    """f32[envs, components]."""
    logprob: NDArray[np.float32]
    """f32[envs]."""
    recurrent_state: NDArray[np.float32] | None = None
    """f32[envs, units] to be given back in the next step; None of an actor that has none."""


B = TypeVar("B")


class Actor(Role):
    """A role that acts in environments."""

    def act(
        self,
        obs: NDArray[np.float32],
        noise: NDArray[np.float64],
        action_mask: NDArray[np.bool_] | None,
        recurrent_state: NDArray[np.float32] | None = None,
    ) -> Acts:
        """Act once in all environments of a group; called by the environment worker, not by a step.

        What comes out for a group depends on nothing but the weights and these arguments: not on
        other groups, nor on where it is computed.

        Args:
            obs: f32[envs, features].
            noise: f64[envs, components], all the randomness there is: uniform in (0, 1) for
                discrete actions, standard normal for continuous ones.
            action_mask: bool[envs, choices], if the environment has one.
            recurrent_state: f32[envs, units]: what came out of the step before, 0 where an episode
                begins; None if all begin, or the actor has none.
        """
        raise NotImplementedError


class ActorCritic(Actor):
    """An actor with a critic: acts, says what states are worth, and learns from both."""

    @call("forward")
    def evaluate(
        self,
        obs: Observations,
        action: Actions,
        action_mask: ActionMask,
        recurrent_state: RecurrentStates | None = None,
        mask: EnvMask | None = None,
    ) -> ActionEvaluation:
        """Log-probability of each action, and the entropy there.

        `recurrent_state` and `mask` may be left out where no network is recurrent.
        """
        raise NotImplementedError

    @call("forward")
    def value(
        self,
        obs: Observations,
        last_obs: LastObservation,
        recurrent_state: RecurrentStates | None = None,
        mask: EnvMask | None = None,
    ) -> Values:
        """The critic's value of every state; see `evaluate` for `recurrent_state` and `mask`."""
        raise NotImplementedError

    @call("train")
    def train(
        self,
        loss: Loss[B, ActorCriticOutput],
        batch: B,
        *,
        epochs: int = 1,
        num_minibatches: int = 1,
    ) -> TrainMetrics:
        """Take `epochs * num_minibatches` optimizer steps and make the next weight version.

        Minibatches are sampled from single steps, wherever the mask is True; from whole rows if the
        network is recurrent.
        """
        raise NotImplementedError

    @call("train")
    def inherit(
        self,
        rival: ActorCritic,
        *,
        fitness: PerEnv,
        rival_fitness: PerEnv,
        mutation: float = 0.0,
        every: int = 1,
    ) -> TrainMetrics:
        """Inherit the weights of a fitter rival, changed a little (exploit and explore).

        Args:
            rival: The role whose weights are read, as they are at this line of the step.
            fitness: f32[envs], whose mean is how fit this one is.
            rival_fitness: f32[envs], of other environments, the rival's.
            mutation: Every weight w that is inherited becomes `w (1 + mutation * noise)`, with
                standard normal noise.
            every: Only in every so many steps, the last of them.

        Its metrics:

        - `fitness`: how fit this one was.
        - `replaced`: 1 if it inherited weights in this step, else 0.
        """
        raise NotImplementedError


class Env(Role):
    """Environments, which live on from step to step; see this module for what they show."""

    keeps_state: ClassVar[bool] = True

    @call("rollout", scope="group")
    def rollout(self, env: EnvId, group: EnvGroup, actor: Actor, *, horizon: int) -> Trajectories:
        """Go on for `horizon` steps in all environments of some groups, as `actor` acts.

        Args:
            env: i64[envs].
            group: i64[envs]; the rows of a group are next to each other.
            actor: Whose weights are read, as those of any rollout.
            horizon: Steps to take.
        """
        raise NotImplementedError

    @call("forward", scope="group")
    def evaluate(
        self,
        env: EnvId,
        group: EnvGroup,
        actor: Actor,
        *,
        num_episodes: int,
        max_episode_steps: int,
    ) -> PerEnv:
        """Play held-out episodes, the same ones at every call; rollouts are not touched by it.

        They show and take what the environments of `rollout` do, scaled as those are by now, and
        actions are sampled as there.

        Args:
            env: i64[envs].
            group: i64[envs]; the rows of a group are next to each other.
            actor: The actor whose weights are read.
            num_episodes: Episodes for each environment.
            max_episode_steps: A longer episode counts with what was earned by then.

        Returns:
            f32[envs], the mean return of an episode, unscaled.
        """
        raise NotImplementedError


GAME = Axis("game")

GameNumber = Annotated[Tensor, i64(GAME)]
"""Number of a row's game in its step."""
GameGroup = Annotated[Tensor, i64(GAME), GroupId()]
"""The group a game is played with: its players are asked about all of them at once."""


@dataclass(frozen=True, kw_only=True)
class GameRows:
    """The games of a step; every step begins new ones.

    Example:
        Two groups of two: `game = [0, 1, 2, 3]`, `group = [0, 0, 1, 1]`.
    """

    game: GameNumber
    group: GameGroup


class BoardGame(Role):
    """A game of two players, who move in turn."""

    @call("rollout", scope="group")
    def play(
        self, game: GameNumber, group: GameGroup, first: ActorCritic, second: ActorCritic
    ) -> Trajectories:
        """Play whole games.

        Every game makes two rows, next to each other: `env` is twice its number for the first
        player, and one more for the second. A step of a row is a turn of that player; `mask` is
        False on those after the end. What a player earns belongs to its last turn before: in most
        games 1 to who won and -1 to who lost, with the last turn of each.

        The last turn of each is `terminated`; it is `truncated` where a game was cut off that would
        have gone on, and how the player sees it then stands in the next column or in `last_obs`.

        Args:
            game: i64[games].
            group: i64[games]; the rows of a group are next to each other.
            first: The player who begins, in all games.
            second: The other.
        """
        raise NotImplementedError


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


SAMPLED_STEP = Axis("sampled_step")

SampledObs = Annotated[Tensor, f32(SAMPLED_STEP, TIME, FEATURE)]
"""The actor's observation, laid out flat."""
SampledAction = Annotated[Tensor, f32(SAMPLED_STEP, TIME, COMPONENT)]
"""One choice per component."""
PerSampledStep = Annotated[Tensor, f32(SAMPLED_STEP, TIME)]
"""One number per sampled step."""
SampledFlag = Annotated[Tensor, boolean(SAMPLED_STEP, TIME)]
"""True on sampled steps that something is true of."""
NumStored = Annotated[Tensor, i64(ENV)]
"""Number of steps that a replay holds, once per environment."""


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
    """The observation after the step, before any reset."""
    terminated: SampledFlag
    """True if nothing comes after; an episode that was cut off goes on."""
    mask: SampledFlag
    """False where there was nothing to sample."""


@dataclass(frozen=True, kw_only=True)
class QBatch:
    """Columns of the loss of a Q-network."""

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

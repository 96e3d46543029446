"""The worker of an `Env` role: groups of environments that live on, and the loop of acting in them.

The loop is the same wherever the actor computes: it hands over observations and noise and gets
actions. The noise of a step belongs to (seed, role, step, ordinal, environment, time), so neither
the number of workers nor the placement of groups can change a rollout.
"""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...algorithms.roles.environment import ActionSpace, Actor, Env, Trajectories
from ...dataflow.errors import StateError, WorkerError
from ...dataflow.graph.role import Metric, add_metrics
from ...dataflow.options import option_class
from ...dataflow.runtime.call_context import CallKey, call_key
from ...dataflow.runtime.worker_protocol import WorkerContext
from ..rollout.sampling import row_uniforms, stream_key
from .group import StepAlarm, close_all, closed_on_error, groups_of
from .live import LiveGroup
from .overlapped_groups import NumOverlapped, OverlappedGroups
from .spec import EnvSpec

PIECE = 128  # steps between looks at whether all episodes are over
MAX_GIVEN_UP = 8  # episodes in a row that one environment may give up


class Episodes:
    """The first `num_episodes` episodes of every environment of a group.

    An episode that is longer than `max_steps` counts with what was earned by then, and no other
    follows in its environment.
    """

    def __init__(self, num_envs: int, num_episodes: int, max_steps: int) -> None:
        # Of each environment: what was earned in episodes that are over, their steps, and number.
        self.total = np.zeros(num_envs)
        self.length = np.zeros(num_envs, np.int64)
        self.count = np.zeros(num_envs, np.int64)
        self.given_up = np.zeros(num_envs, np.int64)  # since the last that was not
        self.restarts = 0
        self._left, self._max_steps = np.full(num_envs, num_episodes), max_steps
        self._earned = np.zeros(num_envs)
        self._steps = np.zeros(num_envs, np.int64)

    @property
    def over(self) -> bool:
        return not self._left.any()

    def add(
        self,
        reward: NDArray[np.float32],
        mask: NDArray[np.bool_],
        ended: NDArray[np.bool_],
        failed: NDArray[np.bool_],
    ) -> None:
        """Take in steps of all environments, [envs, steps]."""
        given_up = np.zeros_like(failed)
        given_up[:, :-1] = failed[:, 1:]
        ended = ended & ~given_up
        for step in range(reward.shape[1]):
            self._give_up(failed[:, step])
            counts = mask[:, step] & (self._left > 0)
            self._earned[counts] += reward[counts, step]
            self._steps += counts
            over = counts & ended[:, step]
            long = counts & ~over & (self._steps >= self._max_steps)
            self._close(over | long)
            self._left[long] = 0

    def metrics(self) -> dict[str, Metric]:
        count = float(self.count.sum())
        return {
            "episode_return": Metric.mean(float(self.total.sum()), count),
            "episode_length": Metric.mean(float(self.length.sum()), count),
            "episodes": Metric.sum(count),
            "env_restarts": Metric.sum(float(self.restarts)),
        }

    def _close(self, over: NDArray[np.bool_]) -> None:
        self.total[over] += self._earned[over]
        self.length[over] += self._steps[over]
        self.count[over] += 1
        self.given_up[over] = 0
        self._left[over] -= 1
        self._earned[over], self._steps[over] = 0.0, 0

    def _give_up(self, failed: NDArray[np.bool_]) -> None:
        failed = failed & (self._left > 0)
        self.given_up[failed] += 1
        self._earned[failed], self._steps[failed] = 0.0, 0


_FORMAT = 1


@option_class
class EnvWorkerSpec:
    """Recipe for an `EnvWorker`."""

    env: EnvSpec
    """The environment, and how groups of it are made."""
    num_overlapped: NumOverlapped = "auto"
    """Groups that a worker rolls out at the same time; `auto`: the planner chooses from what the
    first rollout takes. Where several are, an environment that hangs ends the run instead of being
    restarted."""

    def build(self, context: WorkerContext) -> EnvWorker:
        return EnvWorker(self, context)


class EnvWorker(Env):
    """Roll out groups of environments; every group is a file of its own in saved states.

    Metrics are the return and length of the episodes that ended in a call, unscaled, their number,
    environment steps (those of resets not counted), and restarts.
    """

    def __init__(self, spec: EnvWorkerSpec, context: WorkerContext) -> None:
        self.spec = spec
        self.context = context
        self.metrics: dict[str, Metric] = {}
        self._alarm = StepAlarm(spec.env.step_limit_s)
        self._overlapped = OverlappedGroups(spec.num_overlapped, spec.env.step_limit_s)
        self._live: dict[int, LiveGroup] = {}
        self._saved: dict[int, dict[str, Any]] = {}
        self._resumed = False

    def rollout(self, env: Tensor, group: Tensor, actor: Actor, *, horizon: int) -> Trajectories:
        key = call_key(self.context.role, "rollout")
        stream = stream_key(self.context.seed, self.context.role, "noise", key)
        with self._alarm:
            lives = [self._group(*one) for one in groups_of(env, group)]
        noises: list[NDArray[np.float64]] = []
        for live in lives:
            live.check_order(key)
            noises.append(action_noise(live.actions, stream, live.numbers, horizon))
        with nullcontext() if self._overlapped.uses_threads(len(lives)) else self._alarm:
            parts = self._overlapped.roll(lives, noises, actor)
        for live in lives:
            add_metrics(self.metrics, live.metrics())
        if not parts:
            num_features, actions = self.spec.env.spaces()
            parts.append(LiveGroup.nothing(num_features, actions, horizon, actor))
        columns = {
            name: torch.from_numpy(np.concatenate([part[name] for part in parts])).contiguous()
            for name in parts[0]
        }
        return Trajectories(env=env, **columns)

    def evaluate(
        self,
        env: Tensor,
        group: Tensor,
        actor: Actor,
        *,
        num_episodes: int,
        max_episode_steps: int,
    ) -> Tensor:
        key = call_key(self.context.role, "evaluate")
        found: list[NDArray[np.float64]] = [np.zeros(0)]
        for number, numbers in groups_of(env, group):
            with self._alarm:
                live = self._held_out(number, numbers)
                with closed_on_error(live.close):
                    episodes = self._play(live, actor, key, num_episodes, max_episode_steps)
                live.close()
            add_metrics(self.metrics, episodes.metrics())
            found.append(episodes.total / episodes.count)
        return torch.from_numpy(np.concatenate(found)).float()

    def _held_out(self, number: int, numbers: list[int]) -> LiveGroup:
        """A new group that shows things as group `number` of the run does now."""
        spec, context = self.spec.env, self.context
        made = spec.group(number, numbers, context.seed, f"{context.role}/held-out", self._alarm)
        with closed_on_error(made.close):
            live = LiveGroup(made, numbers, replace(spec.normalization, rewards=False))
            if number in self._live:
                live.see_as(self._live[number].moments())
            elif number in self._saved:
                live.see_as(self._saved[number])
            elif spec.normalization.start is not None:
                live.see_as(live.moments())
            live.start()
        return live

    def _play(
        self, live: LiveGroup, actor: Actor, key: CallKey, num_episodes: int, max_steps: int
    ) -> Episodes:
        found = Episodes(len(live.numbers), num_episodes, max_steps)
        for piece in itertools.count():
            if found.over:
                break
            stream = stream_key(self.context.seed, self.context.role, "held-out", key, piece)
            part = live.roll(actor, action_noise(live.actions, stream, live.numbers, PIECE))
            ended = part["terminated"] | part["truncated"]
            found.add(part["reward"], part["mask"], ended, live.given_up(PIECE))
            restarts = live.restarts()
            found.restarts += len(restarts)
            if found.given_up.max(initial=0) >= MAX_GIVEN_UP:
                index = int(found.given_up.argmax())
                own = [said for said in restarts if said.startswith(live.named(index))]
                raise WorkerError(
                    f"{live.named(index)} gave up {found.given_up[index]} held-out episodes in a "
                    f"row; last of all, {(own or restarts)[-1]}"
                )
        return found

    def _group(self, number: int, numbers: list[int]) -> LiveGroup:
        live = self._live.get(number)
        if live is None:
            if self._resumed and number not in self._saved:
                raise StateError(
                    f"the checkpoint has no state of group {number} of role "
                    f"'{self.context.role}', environments {numbers}; resume with the number of "
                    "environments and the group size that the run was started with"
                )
            made = self.spec.env.group(
                number, numbers, self.context.seed, self.context.role, self._alarm
            )
            with closed_on_error(made.close):
                live = LiveGroup(made, numbers, self.spec.env.normalization)
                if number in self._saved:
                    live.restore(self._saved[number])
                else:
                    live.start()
            self._saved.pop(number, None)
            self._live[number] = live
        if live.numbers != numbers:
            raise StateError(
                f"group {number} of role '{self.context.role}' has environments {live.numbers}, "
                f"but was asked for {numbers}; a group's environments stay the same"
            )
        return live

    def num_overlapped(self) -> NumOverlapped:
        """Groups rolled out at the same time; "auto" as long as nothing has been chosen."""
        return self._overlapped.size

    def save_state(self, folder: Path) -> None:
        """Write a file for every group of this rank, and for those not asked for since a load.

        All ranks hold the latter, and in one of them such a group may have gone on: its file
        replaces another, and a file of those that did not go on leaves one that is there alone.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for number, live in self._live.items():
            state = {"format": _FORMAT, "group": number, **live.state()}
            draft = folder / f"group-{number}.draft"
            draft.write_text(json.dumps(state) + "\n")
            draft.replace(folder / f"group-{number}.json")
        for number, state in self._saved.items():
            path = folder / f"group-{number}.json"
            with suppress(FileExistsError), path.open("x") as file:
                file.write(json.dumps(state) + "\n")

    def load_state(self, folder: Path) -> None:
        self.close()
        self._saved.clear()
        self._resumed = True
        for file in sorted(folder.glob("group-*.json")):
            state = json.loads(file.read_text())
            if state["format"] != _FORMAT:
                raise ValueError(f"'{file}' has format {state['format']}, this version {_FORMAT}")
            self._saved[int(state["group"])] = state

    def close(self) -> None:
        live, self._live = self._live, {}
        close_all(group.close for group in live.values())


def action_noise(
    actions: ActionSpace, stream: NDArray[np.uint64], numbers: list[int], horizon: int
) -> NDArray[np.float64]:
    """All the randomness of some environments' actions, f64[horizon, envs, components]."""
    rows = np.array(numbers, dtype=np.int64)
    width = actions.num_components
    uniform = row_uniforms(stream, rows, np.zeros_like(rows), horizon * width)
    if actions.kind == "continuous":
        uniform = torch.special.ndtri(uniform)
    noise = uniform.numpy().reshape(len(numbers), horizon, width)
    return np.ascontiguousarray(noise.swapaxes(0, 1))

"""Measuring what actors earn in held-out episodes, between the steps of a stage."""

from __future__ import annotations

from collections.abc import Mapping

from ...algorithms.env_evaluate import EnvEvaluation, env_evaluate_step
from ...algorithms.roles.environment import Actor, EnvRows
from ...configs.schema import EvaluationConfig
from ...dataflow.graph.graph import NodeKind
from ...dataflow.graph.role import Role
from ...dataflow.graph.tracer import build
from ...dataflow.runtime.engine import Engine, Source
from ...dataflow.runtime.executor import Program
from ...dataflow.runtime.placement import follow
from ...dataflow.runtime.worker_protocol import WorkerSpec
from ...workers.data.task import TaskSpec
from ..inputs.env_specs import env_task
from ..run_dir.evaluations import WHOLE, Measured
from .evaluation import renamed
from .stages import Stage

_PROGRAM = "evaluate"
_RETURN = "env.evaluate/episode_return"


def env_actors(stage: Stage) -> dict[str, str]:
    """Trained role -> the role of the environments that it acts in, if they are workers of ours."""
    graph, found = stage.graph, dict[str, str]()
    for node in graph.nodes:
        role = node.role or ""
        if node.kind is not NodeKind.ROLLOUT or stage.roles[role].worker != "env":
            continue
        for read in node.reads:
            trained = read.role in graph.trains_per_step
            if trained and issubclass(graph.roles[read.role], Actor):
                found[read.role] = role
    return found


class EnvEvaluator:
    """Lets every actor of a stage play held-out episodes, on the workers that train it.

    Args:
        stage: The stage.
        config: How many episodes.
        sources: The stage's tables; that of environments says which groups there are.
        task: The run's task.
    """

    def __init__(
        self,
        stage: Stage,
        config: EvaluationConfig,
        sources: Mapping[str, Source],
        task: TaskSpec,
    ) -> None:
        table = next(name for name, kind in stage.graph.sources.items() if kind is EnvRows)
        self._rows = sources[table]
        num_envs = len(self._rows.batch(0).env) // env_task(task, stage.name).num_agents
        cfg = EnvEvaluation(
            num_episodes=-(-config.num_episodes // num_envs),
            max_episode_steps=config.max_episode_steps,
        )
        self._num_episodes = cfg.num_episodes * num_envs
        self.programs: dict[str, Program] = {}
        self.workers: dict[str, WorkerSpec | Role] = {}
        self._actors: dict[str, str] = {}
        for actor, env in env_actors(stage).items():
            graph = build(env_evaluate_step, name=f"{_PROGRAM}_{actor}", cfg=cfg)
            graph = renamed(graph, {"actor": actor, "env": env})
            placement = follow(graph, stage.graph, stage.placement)
            self.programs[graph.name] = Program(graph, placement)
            self._actors[actor] = graph.name

    def measure(self, engine: Engine) -> dict[str, Measured]:
        """Play all episodes with the current weights; nothing else may be running."""
        returns: dict[str, float] = {}
        metrics: dict[str, float] = {}
        for actor, program in self._actors.items():
            (result,) = engine.run({"rows": self._rows}, 1, program=program)
            returns[actor] = result.metrics[_RETURN]
            metrics |= {f"{actor}/{key}": value for key, value in result.metrics.items()}
        found = Measured(metrics, episode_return=returns, num_episodes=self._num_episodes)
        return {WHOLE: found}

"""Which columns of a stage are kept as samples, found in its graph: no recipe says anything of it.

Kept are the rows that a policy is trained on and that were sampled in the step: their tokens, and
whatever else the graph says of each of them by one number, or by one per token as advantages are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import networkx as nx
from rich.text import Text

from ...algorithms.roles.language import Conversations
from ...configs.schema import SamplesConfig
from ...dataflow.errors import ConfigError, one_process
from ...dataflow.graph.graph import Graph, Node, Ref
from ...dataflow.graph.role import Role
from ...dataflow.kinds import NodeKind
from ...dataflow.runtime.watch import Watch, watch_before
from ...dataflow.runtime.worker_protocol import WorkerSpec
from ...workers.data.sample_log import SampleLog, SampleLogSpec
from ..inputs.data import Data
from ..inputs.record import Stage
from ..run_dir.samples import SAMPLES, Sample, read_samples, sample_steps, shown
from ..run_dir.trackers import Trackers
from .worker_specs import stage_tokenizer

_ADVANTAGE = "advantage"


def sample_watch(
    stage: Stage, config: SamplesConfig, data: Data, home: Path
) -> tuple[Watch | None, Mapping[str, WorkerSpec | Role]]:
    """The watch on the stage's responses, and its worker; neither if nothing is kept."""
    trained = sample_node(stage.graph)
    if trained is None or not config.max_rows:
        return None, {}
    role = SAMPLES
    while role in stage.graph.roles:
        role += "_log"
    with one_process():
        # A program's prompt may differ from the problem's, so it is decoded from the tokens.
        from_task = data.section.chat or (
            not data.task.has_programs
            and any(data.task.messages(i) for i in (*data.task.train, *data.task.held_out))
        )
    spec = SampleLogSpec(
        folder=str((home / SAMPLES).resolve()),
        tokenizer=stage_tokenizer(stage, data),
        versions_per_step=stage.graph.trains_per_step[trained.role or ""],
        max_rows=config.max_rows,
        keep_steps=config.keep_steps,
        max_bytes=config.max_mib << 20,
        task=data.spec if from_task else None,
        chat=data.chat,
    )
    columns = sample_columns(stage.graph, trained)
    worker = (role, SampleLog, SampleLog.record.__name__)
    return watch_before(trained, columns, worker, stage.graph, stage.placement), {role: spec}


def newest_sample(home: Path, step: int) -> Text | None:
    """Return a response of the newest step that has some, of another prompt each time."""
    steps = sample_steps(home)
    found = read_samples(home, steps[-1:])
    return shown(found[step % len(found)]) if found else None


class SampleTables:
    """Gives the responses of a stage to the run's trackers, once they are written.

    Args:
        stage: The stage.
        home: Its folder.
        first_step: At which it begins.
        every: See `SamplesConfig.track_every`.
        trackers: Of the run.
    """

    def __init__(
        self, stage: str, home: Path, first_step: int, every: int | None, trackers: Trackers
    ) -> None:
        self._stage, self._home, self._next_step = stage, home, first_step
        self._every, self._trackers = every, trackers

    def send(self, last: int) -> None:
        """Give what has been written since the last time, of steps up to this one."""
        if self._every is None:
            return
        steps = [step for step in sample_steps(self._home) if self._next_step <= step <= last]
        for step in steps:
            self._next_step = step + 1
            if not (step + 1) % self._every and (found := self._kept(step)):
                self._trackers.log_samples(step, self._stage, found)

    def _kept(self, step: int) -> list[Sample]:
        try:
            return read_samples(self._home, [step])
        except ConfigError:
            if step in sample_steps(self._home):
                raise
            return []  # dropped meanwhile, as `samples.keep_steps` says


def sample_node(graph: Graph) -> Node | None:
    """The train node whose rows are kept: the first with advantages, or else the first of all."""
    found = [node for node in graph.nodes if _trains_on_samples(graph, node)]
    with_advantage = [node for node in found if _input(node, _ADVANTAGE)]
    return next(iter((*with_advantage, *found)), None)


def _trains_on_samples(graph: Graph, node: Node) -> bool:
    if not node.learns or not _input(node, "tokens") or not _input(node, "mask"):
        return False
    makers = nx.ancestors(graph.dag, node.name)
    return any(graph[maker].kind is NodeKind.ROLLOUT for maker in makers)


def _input(node: Node, column: str) -> Ref | None:
    """The column that a train node's batch has under this name."""
    return next((ref for path, ref in node.inputs if path.endswith(f".{column}")), None)


def sample_columns(graph: Graph, trained: Node) -> dict[str, Ref]:
    """Name in the file -> column, of the rows that `trained` is given.

    A column is named after the node that makes it, such as "reward.score", and "reward" is the
    last of those that a role gave, or a table calls "score".
    """
    tokens, mask = _input(trained, "tokens"), _input(trained, "mask")
    assert tokens is not None, "looked at before"
    assert mask is not None, "looked at before"
    rows = graph[tokens.node].output(tokens.column).rows
    if any(output.name == "mask" for output in graph[rows].outputs):
        mask = Ref(rows, "mask")  # the trained mask may lack rows without a score
    found = {"tokens": tokens, "mask": mask}
    before = nx.ancestors(graph.dag, trained.name)
    for node in graph.nodes:
        if node.name not in before:
            continue
        for output in node.outputs:
            ref, spec = Ref(node.name, output.name), output.spec
            if output.rows != rows or spec.row_axis is None or spec.ragged_axis is not None:
                continue
            if node.name == rows and output.group_id:
                found["prompt_id"] = ref
            elif node.name == rows and output.name == "finished":
                found["finished"] = ref
            elif spec.dtype.value == "f32":
                found[node.name if node.output_table is None else str(ref)] = ref
                if node.kind is NodeKind.FORWARD or output.name == "score":
                    found["reward"] = ref
    if any(output.name == "version" for output in graph[rows].outputs):
        found["version"] = Ref(rows, "version")
    if graph[rows].output_table is Conversations:
        found |= {"turn": Ref(rows, "turn"), "turn_reward": Ref(rows, "reward")}
        found |= {"piece": Ref(rows, "piece")}
    advantage = _input(trained, _ADVANTAGE)
    if advantage is not None and graph[advantage.node].output(advantage.column).rows == rows:
        found = {name: ref for name, ref in found.items() if ref != advantage}
        found[_ADVANTAGE] = advantage
    return found

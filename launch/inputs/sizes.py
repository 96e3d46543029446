"""Checks that a step's sizes divide and fit, from the graph alone.

Rows are followed through the graph: a table brings `per_step` items, a rollout makes
`sampling.num_samples` rows of each prompt, other nodes keep their rows. Where an op makes rows of
its own, their number is unknown before the run and nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...algorithms.roles.language_tables import PreferencePairs, Sampling
from ...configs.validate import nearest_key
from ...dataflow.errors import ConfigError
from ...dataflow.graph.graph import Constant, Graph, Node
from ...dataflow.graph.role import Loss
from ...dataflow.kinds import NodeKind
from ...dataflow.runtime.placement import Placement
from ...workers.rollout.generate_calls import check_turns


@dataclass(frozen=True)
class _Rows:
    """Rows of a node's output: `items` of the data, each of `each` rows, longer by `new_tokens`.

    Of conversations `most_tokens` says instead how long they may be, prompt included.
    """

    source: str
    items: int
    each: int
    why: str
    new_tokens: int = 0
    most_tokens: int = 0

    def reach(self, prompt: int) -> int:
        """Tokens of the longest row, after a prompt of so many."""
        return self.most_tokens or prompt + self.new_tokens


def check_sizes(graph: Graph, placement: Placement, per_step: Mapping[str, int], at: str) -> None:
    """Check what one step takes of each table.

    Args:
        graph: The recorded step.
        placement: Where it runs.
        per_step: Items per step of each table.
        at: The key of the algorithm's section, for messages.

    Raises:
        ConfigError: If a table has no size, an unknown table has one, or a size does not divide by
            the minibatches or ranks that share it.
    """
    for name in per_step:
        if name not in graph.sources:
            typo = nearest_key(name, graph.sources)
            other = f"; '~{at}.per_step.{name}' takes away what the algorithm's YAML says"
            raise ConfigError(
                f"'{at}.per_step' names a table '{name}', which {graph.name} does not read{typo}\n"
                f"    it reads: {', '.join(graph.sources)}{'' if typo else other}"
            )
    for name, table in graph.sources.items():
        if name not in per_step:
            raise ConfigError(
                f"'{at}.per_step.{name}' is missing: how many items of '{name}' "
                f"({table.__name__}) one step takes"
            )
    rows = _rows(graph, per_step)
    for node in graph.nodes:
        if node.kind is NodeKind.TRAIN:
            _check_train(node, rows, placement, at)


def train_items(graph: Graph, per_step: Mapping[str, int]) -> dict[str, int]:
    """Train node -> items of data in a step, which the ranks of its group must divide.

    Nodes whose rows an op makes are left out: their number is unknown before the run. So are all if
    a table has no size.
    """
    if graph.sources.keys() - per_step.keys():
        return {}
    rows = _rows(graph, per_step)
    made = {
        node.name: next((rows[ref.node] for _, ref in node.inputs if ref.node in rows), None)
        for node in graph.nodes
        if node.kind is NodeKind.TRAIN
    }
    return {name: row.items for name, row in made.items() if row is not None}


def check_lengths(
    graph: Graph,
    per_step: Mapping[str, int],
    longest: Mapping[str, int],
    positions: Mapping[str, int],
    shorten: str,
) -> None:
    """Check that the longest rows fit the models that read them.

    Args:
        graph: The recorded step.
        per_step: Items per step of each table.
        longest: Tokens of the longest row of each table.
        positions: Role -> longest sequence its model is made for, in tokens.
        shorten: How responses are made shorter, for the message.

    Raises:
        ConfigError: Naming the node, the lengths and the model's limit.
    """
    rows = _rows(graph, per_step)
    for node in graph.nodes:
        if converses(node):
            _check_turns(node)
        names = [node.name, *(ref.node for _, ref in node.inputs)]
        read = next((rows[name] for name in names if name in rows), None)
        if node.kind is NodeKind.ROLLOUT and read is not None:
            _check_room(node, read.source, longest.get(read.source, 0))
        limit = positions.get(node.role or "")
        if limit is None or read is None or read.source not in longest:
            continue
        length, new = longest[read.source], read.new_tokens
        if read.reach(length) <= limit:
            continue
        what = f"{read.source} of up to {length} tokens"
        leave_out = "leave long rows out: task.max_prompt_tokens, task.max_response_tokens"
        if new:
            what += f" with responses of up to {new}"
            leave_out = f"{shorten}, or leave long prompts out: task.max_prompt_tokens"
        if read.most_tokens:
            what = f"conversations of up to {read.most_tokens} tokens"
            leave_out = "lower max_total_tokens: task.max_total_tokens"
        raise ConfigError(
            f"'{node.name}' has {what}, but the model of '{node.role}' has {limit} positions\n"
            f"    {leave_out}"
        )


def longest_sampled(
    graph: Graph, per_step: Mapping[str, int], longest: Mapping[str, int]
) -> int | None:
    """Tokens of the longest prompt with its response that a step samples; None if unknown.

    Args:
        graph: The recorded step.
        per_step: Items per step of each table.
        longest: Tokens of the longest row of each table.
    """
    rows, found = _rows(graph, per_step), [0]
    for node in graph.nodes:
        if node.kind is NodeKind.ROLLOUT:
            made = rows.get(node.name)
            if made is None or made.source not in longest:
                return None
            found.append(made.reach(longest[made.source]))
    return max(found)


def _rows(graph: Graph, per_step: Mapping[str, int]) -> dict[str, _Rows]:
    rows: dict[str, _Rows] = {}
    for node in graph.nodes:
        if node.kind is NodeKind.SOURCE:
            each = 2 if graph.sources[node.name] is PreferencePairs else 1
            rows[node.name] = _Rows(node.name, per_step[node.name], each, "rows of a pair")
        elif node.kind is NodeKind.ROLLOUT:
            inputs = [rows[ref.node] for _, ref in node.inputs if ref.node in rows]
            sampling = _constant(node, Sampling)
            if inputs and isinstance(sampling, Sampling):
                rows[node.name] = replace(
                    inputs[0],
                    each=inputs[0].each * sampling.num_samples,
                    why="samples",
                    new_tokens=inputs[0].new_tokens + sampling.max_new_tokens,
                    most_tokens=sampling.max_total_tokens if converses(node) else 0,
                )
        else:
            kept = {output.rows for output in node.outputs} - {node.name}
            if len(kept) == 1 and (made := kept.pop()) in rows:
                rows[node.name] = rows[made]
    return rows


def converses(node: Node) -> bool:
    """Return whether a node holds conversations, sampled turn by turn."""
    return node.method == "converse"


def _check_turns(node: Node) -> None:
    """Check the turns of a node, as far as the graph knows them."""
    values = {name: one.value for name, one in node.arguments if isinstance(one, Constant)}
    sampling = _constant(node, Sampling)
    if isinstance(sampling, Sampling):
        branch = bool(values.get("branch", False))
        check_turns(f"'{node.name}'", sampling, values.get("max_turns", 1), branch=branch)


def _check_room(node: Node, source: str, prompt: int) -> None:
    """Refuse prompts that fill `max_total_tokens` by themselves."""
    sampling = _constant(node, Sampling)
    if isinstance(sampling, Sampling) and 0 < sampling.max_total_tokens <= prompt:
        key = "task.max_total_tokens" if converses(node) else "cfg.sampling.max_total_tokens"
        raise ConfigError(
            f"'{node.name}' has {source} of up to {prompt} tokens, and max_total_tokens is "
            f"{sampling.max_total_tokens}: none are left for a response\n    raise {key}, or leave "
            "long prompts out: task.max_prompt_tokens"
        )


def _constant(node: Node, kind: type) -> Any:
    values = [argument.value for _, argument in node.arguments if isinstance(argument, Constant)]
    return next((value for value in values if isinstance(value, kind)), None)


def _check_train(node: Node, rows: Mapping[str, _Rows], placement: Placement, at: str) -> None:
    made = next((rows[ref.node] for _, ref in node.inputs if ref.node in rows), None)
    if made is None:
        return
    arguments = dict(node.arguments)
    minibatches = arguments.get("num_minibatches")
    num_minibatches = minibatches.value if isinstance(minibatches, Constant) else 1
    num_ranks = placement.group(placement.nodes[node.name]).num_ranks
    loss = _constant(node, Loss)
    grouped = loss is not None and loss.unit == "group"
    unit, total = ("groups", made.items) if grouped else ("rows", made.items * made.each)
    count = f"{made.items} {made.source}"
    if not grouped and made.each > 1:
        count += f" x {made.each} {made.why} = {total} rows"
    if not isinstance(num_minibatches, int) or num_minibatches < 1:
        raise ConfigError(
            f"'{node.name}' is to take {num_minibatches} minibatches per pass\n"
            f"    num_minibatches must be at least 1 ({at}.cfg)"
        )
    if total % num_minibatches:
        raise ConfigError(
            f"'{node.name}' trains on {count} per step, which {num_minibatches} minibatches do not "
            f"divide\n    choose {at}.per_step.{made.source} or num_minibatches so that the "
            f"{unit} divide evenly"
        )
    if made.items % num_ranks:
        raise ConfigError(
            f"'{node.name}' trains on {count} per step, which the {num_ranks} ranks of group "
            f"'{placement.nodes[node.name]}' do not divide\n"
            f"    choose {at}.per_step.{made.source} as a multiple of {num_ranks}"
        )

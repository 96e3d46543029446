"""`executor.memory_limit`: a run that is predicted to need more is refused before it starts.

The prediction is the planner's, for the main algorithm where it is placed and with the options that
its workers have: what all processes of the run hold together, each at its peak. It is made for
language models that the torch engine computes on CPUs. Nothing is watched while the run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...configs.schema import WorkloadConfig
from ...dataflow.errors import ConfigError, PlanError
from ...dataflow.graph.graph import Node
from ...planner.cost.memory import GroupLedger, Parts
from ...planner.formatting import bytes_of, bytes_text, part_text
from ...planner.inputs.calls import Call, Lengths, calls_of
from ...planner.inputs.layout import Layout
from ...workers.engines.engine import EngineKind, MemorySaving
from ..inputs.run import Run, executor_kind
from ..placement.models import PlanInputs

# Bytes of a process without models: Python, torch, transformers and all that is not a tensor.
# Measured as `peak_memory_bytes` of a run of `model=tiny`.
_PROCESS_BYTES = 620 * 2**20
# Bytes that a process occupies for each byte of tensors, because the C library keeps freed blocks.
# 1.05 to 1.15 was measured of a model of 36M weights in float32.
_OCCUPIED = 1.08
# Bytes beside tensors at the least where the model is in 16 bits: such blocks, and what oneDNN
# compiles for each size of product. With it no measured run of SmolLM2 needs more than is
# predicted; `docs/configuration.md` compares them.
_LIBRARY_BYTES = 520 * 2**20
_LARGEST = 3  # parts that a message names

_Options = Mapping[str, Any]


def check_memory(run: Run) -> None:
    """Refuse a run that is predicted to need more memory than its configuration allows."""
    text = run.executor.memory_limit
    if text is None:
        return
    asked, limit = _Asked(run, _works(run)), bytes_of(text)
    for work in asked.works:
        if asked.options(work, {}, {}).get("offload"):  # on a CPU, host memory is what is limited
            raise _not_judged(f"'{work.call.role}' is offloaded to the memory that it limits")
    if asked.total({}, {}) <= limit:
        return
    changes = [(train, rollout, asked.total(train, rollout)) for train, rollout in asked.smaller()]
    fitting = next((change for change in changes if change[2] <= limit), None)
    train, rollout, needed = fitting or changes[-1]
    keys = " ".join(asked.keys(train, rollout))
    advice = f"set {keys}, for {bytes_text(needed)}"
    if fitting is None:
        advice = (
            f"raise the limit, or choose shorter responses or a smaller model: with {keys} it is "
            f"still {bytes_text(needed)}"
        )
    raise PlanError(f"{asked.excess(limit)}\n    {advice}")


@dataclass(frozen=True)
class _Work:
    call: Call
    node: Node
    saving: MemorySaving
    engine: EngineKind


def _works(run: Run) -> list[_Work]:
    inputs, stage = PlanInputs(run), run.main
    device = run.executor.device
    if device != "cpu":
        raise _not_judged(f"what '{device}' devices hold is not compared with it")
    try:
        models = inputs.models({})
        calls = calls_of(stage.graph, inputs.workload(WorkloadConfig()), models)
    except (ConfigError, PlanError) as error:
        raise _not_judged(str(error).splitlines()[0]) from error
    if not calls:
        raise _not_judged(f"no role of {stage.graph.name} has a language model")
    works: list[_Work] = []
    for call in calls:
        node = stage.graph[call.name]
        engine = run.engines.runs(stage.graph, node)
        own = call.role in run.engines.own
        if own or engine.saving is None:
            where = "a worker of your own" if own else f"engine={engine.name}"
            raise _not_judged(f"'{call.name}' runs on {where}, which is not predicted")
        works.append(_Work(_may_end_early(call), node, engine.saving, engine))
    policy = [work for work in works if work.call.role == stage.policy]
    policy.sort(key=lambda work: work.call.kind != "generate")
    for suite in run.suites if policy else ():
        call = replace(
            policy[0].call,
            name=f"evaluation {suite.name}".rstrip(),
            kind="generate",
            num_sequences=suite.prompts.num_prompts * suite.sampling.num_samples,
            prompt=Lengths.constant(suite.prompts.longest),
            response=Lengths.constant(suite.longest - suite.prompts.longest),
            samples_per_prompt=suite.sampling.num_samples,
        )
        works.append(replace(policy[0], call=_may_end_early(call)))
    return works


def _may_end_early(call: Call) -> Call:
    """A generation whose rows end at different lengths, so that those that are left are copied."""
    longest = call.response.longest
    if call.kind != "generate" or len(call.response.tokens) > 1 or longest == 1:
        return call
    return replace(call, response=Lengths(tokens=(1, longest)))


def _not_judged(why: str) -> ConfigError:
    return ConfigError(f"'executor.memory_limit' is set, but {why}\n    leave it out")


@dataclass(frozen=True)
class _Asked:
    """Calls of the main stage of a run, with its options as given or changed."""

    run: Run
    works: Sequence[_Work]

    def total(self, train: _Options, rollout: _Options) -> int:
        """Bytes of all processes together; arguments are changes, as of `smaller`."""
        total = _PROCESS_BYTES if executor_kind(self.run.executor.kind).has_processes else 0
        for ledger in self._ledgers(train, rollout):
            tensors = ledger.peak[1].total
            occupied = int(_OCCUPIED * tensors)
            if self.run.model.precision != "float32":
                occupied = max(occupied, tensors + _LIBRARY_BYTES)
            total += ledger.num_devices * (_PROCESS_BYTES + occupied)
        return total

    def smaller(self) -> list[tuple[_Options, _Options]]:
        """Changes of options that train and of those that generate, the least costly first."""
        trains: list[_Options] = [{}]
        rollouts: list[_Options] = [{}]
        if saving := self.run.engines.train.saving:
            trains += saving.for_training(self.run.engines.options)
        for work in [work for work in self.works if work.call.kind == "generate"][:1]:
            rollouts += work.saving.for_generating(self.options(work, {}, {}))
        return [(train, rollout) for rollout in rollouts for train in trains][1:]

    def keys(self, train: _Options, rollout: _Options) -> list[str]:
        """The changes as words of the configuration."""
        main, places = self.run.main, dict[str, None]()
        for work in self.works:
            if work.call.kind == "generate":
                own = f"{main.at}.roles.{work.call.role}.options"
                apart = self.run.engines.apart(main.graph, work.node)
                places["rollout.options" if apart else own] = None
        changes = [("engine.options", train), *((at, rollout) for at in places)]
        return [
            f"{at}.{key}={str(value).lower() if isinstance(value, bool) else value}"
            for at, options in changes
            for key, value in options.items()
        ]

    def excess(self, limit: int) -> str:
        ledgers = self._ledgers({}, {})
        worst = max(ledgers, key=lambda ledger: ledger.num_devices * ledger.peak[1].total)
        call, parts = worst.peak
        sizes = sorted(zip(parts, parts._fields, strict=True), reverse=True)[:_LARGEST]
        largest = ", ".join(f"{part_text(name)} {bytes_text(size)}" for size, name in sizes if size)
        return (
            f"'executor.memory_limit' is {bytes_text(limit)}, but the planner predicts a peak of "
            f"{bytes_text(self.total({}, {}))}\n    in '{call}': {largest}; and "
            f"{bytes_text(_PROCESS_BYTES)} of each process without models"
        )

    def _ledgers(self, train: _Options, rollout: _Options) -> list[GroupLedger]:
        placement = self.run.main.placement
        found: list[GroupLedger] = []
        for group in placement.groups:
            here = [w for w in self.works if placement.nodes[w.node.name] == group.name]
            held: dict[str, Parts] = {}
            starts = set[str | None]()
            for work in sorted(here, key=lambda work: work.call.kind != "train"):
                if work.call.role not in held:
                    held[work.call.role] = self._resident(work, starts)
            adds = {
                work.call.name: work.saving.transient(
                    work.call, group.num_ranks, self.options(work, train, rollout)
                )
                for work in here
            }
            found.append(GroupLedger(group.name, group.num_ranks, held, adds))
        return found

    def _resident(self, work: _Work, starts: set[str | None]) -> Parts:
        """Return what a role adds to what other roles of the process hold already.

        Adapted language models that start from the same place share their frozen weights.
        """
        call, start = work.call, self.run.main.roles[work.call.role].start
        parts = work.engine.planned.memory.resident(call, Layout())
        if not self.run.model.lora or call.head == "scalar":
            return parts
        shared = call.model.num_params(call.head) * call.model.dtype_bytes if start in starts else 0
        starts.add(start)
        return parts._replace(weights=parts.weights - shared)

    def options(self, work: _Work, train: _Options, rollout: _Options) -> _Options:
        """Fields of the spec of the worker that does something; a role's own win."""
        engines, role = self.run.engines, work.call.role
        if engines.apart(self.run.main.graph, work.node):
            return {**engines.rollout_options_of(role), **rollout}
        group = self.run.main.placement.nodes[work.node.name]
        planned = self.run.main.planned_options.get(role, {}).get(group, {})
        own = self.run.main.roles[role].options
        changed = rollout if work.call.kind == "generate" else {}
        return {**planned, **engines.options_of(role), **train, **own, **changed}

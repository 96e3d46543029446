"""A run's models: as local folders in one precision, and as the shapes that the planner reads.

A model's name becomes a folder, its precision `auto` a dtype. A run's config.yaml records the
snapshot and the precision, so that it goes on with the same elsewhere.

For the planner nothing is built: the step is recorded with stand-ins, and a model is the shape its
config describes. A tokenizer is made only if a model's vocabulary or the task's prompts are asked
for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...algorithms.roles.language import Reward, RewardModel
from ...algorithms.roles.language_tables import Feedback, PreferencePairs
from ...configs.references import option_file, options_of
from ...configs.schema import ModelConfig, RoleConfig, WorkloadConfig
from ...dataflow.errors import ConfigError, nearest
from ...dataflow.files import read_json
from ...dataflow.graph.graph import Graph
from ...planner.inputs.calls import Lengths, Workload
from ...planner.inputs.model_shape import ModelShape, adapter_params, shape_of
from ...workers.data.chat import BadRow
from ...workers.models.hub import PACKAGED, hub_folder, is_hub_id, packaged_folder
from ...workers.models.model_folder import folder_config
from ..inputs.data import Data, load_data
from ..inputs.engines import asked_for, is_own
from ..inputs.record import Stage
from ..inputs.run import AUTO, Run
from ..inputs.sizes import train_items
from ..run_dir.stop import say
from .machine import has_fast_bfloat16

if TYPE_CHECKING:
    from ...planner.search.options import Option

_PROMPTS_MEASURED = 2000  # training prompts whose lengths stand for all
_NO_SHAPE = ("folder", "hub")  # options of `model=` that are models only with a further key


def with_models(run: Run) -> Run:
    """The run with a precision and a model that are here.

    Of a model of a hub all but the weights is downloaded: what is wrong with the rest of a run
    should not be said after a hundred gigabytes. One of a package is converted.
    """
    device = run.executor.device
    # Where weights are averaged, 16 bits do not hold the shares.
    in_float32 = any(
        node.leader is not None and node.constants.get("share", 1.0) != 1.0
        for stage in run.stages
        for node in stage.graph.nodes
    )
    cluster = run.cluster if device.startswith("cuda") else None

    def is_fast() -> bool:
        if in_float32:
            return False
        if cluster is not None:
            return cluster.computes_faster("bfloat16")
        return has_fast_bfloat16(device)

    model = local_model(run.model, is_fast)
    run = run.having(model=model.model_copy(update={"lora": model.lora.resolved()}))
    # With folders in place of the models of hubs and packages that roles start from.
    snapshots: dict[str, str] = {}
    stages: list[Stage] = []
    for stage in run.stages:
        roles: dict[str, RoleConfig] = {}
        for role, given in stage.config.roles.items():
            at = f"{stage.at}.roles.{role}.start"
            starts = [start for start in (given.start, *given.start_mean) if start is not None]
            found = {start: _local_start(start, at, run, snapshots) for start in starts}
            mean = {found[start]: share for start, share in given.start_mean.items()}
            start = None if given.start is None else found[given.start]
            roles[role] = given.model_copy(update={"start": start, "start_mean": mean})
        stages.append(replace(stage, config=stage.config.model_copy(update={"roles": roles})))
    return replace(run, stages=tuple(stages), snapshots=snapshots)


def _local_start(start: str, at: str, run: Run, snapshots: dict[str, str]) -> str:
    name, _, revision = start.partition("@")
    if any(start == stage.name for stage in run.stages) or Path(start).exists():
        return start
    if start in PACKAGED:
        return str(packaged_folder(start, say))
    if not is_hub_id(name):
        return start
    folder = hub_folder(name, revision or None, weights=False, key=at)
    snapshots[start] = f"{name}@{folder.name}"
    return str(folder)


def fetch_weights(run: Run) -> None:
    wanted = [("algorithm.roles", snapshot) for snapshot in run.snapshots.values()]
    if run.model.hub is not None:
        wanted.append(("model.hub", f"{run.model.hub}@{run.model.revision}"))
    for key, snapshot in wanted:
        name, _, commit = snapshot.partition("@")
        folder_config(hub_folder(name, commit, weights=False, key=key))
        hub_folder(name, commit, weights=True, key=key)


def local_model(model: ModelConfig, is_fast: Callable[[], bool]) -> ModelConfig:
    """The section with the folder of its model, if that is in a hub or a package, and a precision.

    It is 16 bits for trained weights where these are computed faster. Random weights stay in
    float32: small models that begin from nothing learn better so.
    """
    named = [key for key in ("hub", "package", "folder", "architecture") if getattr(model, key)]
    if len(named) > 1 and named[0] in ("hub", "package"):
        raise ConfigError(
            f"'model' has '{named[0]}' and '{named[1]}', and is one thing only\n    choose "
            "model=org/name, model=PATH or an option of model=, which set nothing else"
        )
    if model.revision is not None and model.hub is None:
        raise ConfigError(
            "'model.revision' is set, but only models of a hub have revisions\n    leave it out, "
            "or choose model=org/name"
        )
    if model.hub is not None:
        folder = hub_folder(model.hub, model.revision, weights=False)
        model = model.model_copy(update={"folder": str(folder), "revision": folder.name})
    elif model.package is not None:
        if model.package not in PACKAGED:
            raise ConfigError(
                f"'model.package': there is no model '{model.package}'"
                f"{nearest(model.package, PACKAGED)}\n    models in packages are: "
                f"{', '.join(PACKAGED)}"
            )
        model = model.model_copy(update={"folder": str(packaged_folder(model.package, say))})
    if model.dtype != AUTO:
        return model
    dtype = "bfloat16" if model.folder is not None and is_fast() else "float32"
    return model.model_copy(update={"dtype": dtype})


class PlanInputs:
    """The main algorithm of a run as the planner sees it; tables call its model `model_name`."""

    def __init__(self, run: Run, model_name: str = "") -> None:
        self._run, self._model_name = run, model_name
        self._algorithm = run.main.config
        self.graph: Graph = run.main.graph

    @cached_property
    def _data(self) -> Data:
        return load_data(self._run.config.task, self._run.model)

    def models(self, given: Mapping[str, str | None]) -> dict[str, ModelShape | None]:
        for role in given:
            if role not in self.graph.roles:
                raise ConfigError(
                    f"'plan.models' names a role '{role}', which {self.graph.name} does not have"
                    f"{nearest(role, self.graph.roles)}\n"
                    f"    its roles are: {', '.join(self.graph.roles)}"
                )
        lora = self._run.model.lora.resolved()
        shapes: dict[str, ModelShape | None] = {}
        for role in self.graph.roles:
            shape = self._model(role, given)
            if shape is not None and lora and (role in self._run.main.changed_roles or lora.folder):
                adapters = adapter_params(shape, lora.rank, lora.target_modules)
                shape = shape.model_copy(update={"adapter_params": adapters})
            shapes[role] = shape
        return shapes

    def _model(self, role: str, given: Mapping[str, str | None]) -> ModelShape | None:
        if role in given:
            name = given[role]
            return None if name is None else self._named(role, name)
        if not self._has_model(role):
            return None
        start = self._section(role).start
        if start is not None and (Path(start) / "config.json").is_file():
            return self._in_folder(Path(start))
        return self._shape(self._run.model, self._model_name)

    def _section(self, role: str) -> RoleConfig:
        return self._algorithm.roles.get(role) or RoleConfig()

    def left_out(self, models: Mapping[str, ModelShape | None]) -> tuple[str, ...]:
        sections = self._algorithm.roles
        return tuple(
            f"'{role}' is left out: {sections[role].worker} asks for no model, so its memory and "
            f"time are not known (plan.models.{role}=MODEL says what it computes)"
            for role, shape in models.items()
            if shape is None and role in sections and is_own(sections[role].worker)
        )

    def _has_model(self, role: str) -> bool:
        contract, section = self.graph.roles[role], self._section(role)
        if section.worker is not None and is_own(section.worker):
            at = f"{self._run.main.at}.roles.{role}"
            return "model" in asked_for(section.worker, section, at)
        if section.worker is not None:
            of_model = section.worker in ("policy", "value", "reward_model")
            return of_model or (section.worker != "rule" and not issubclass(contract, Reward))
        if contract is Reward:
            learned = any(stage.trained(RewardModel) for stage in self._run.stages[:-1])
            return section.start is not None or learned
        return contract.model_head is not None

    def _named(self, role: str, name: str) -> ModelShape:
        if (Path(name) / "config.json").is_file():
            return self._in_folder(Path(name))
        known = [option for option in options_of("model") if option not in _NO_SHAPE]
        if name not in known:
            raise ConfigError(
                f"'plan.models.{role}': there is no model '{name}'{nearest(name, known)}\n"
                f"    give one of {', '.join(known)}, or a folder with a config.json"
            )
        preset = option_file("model", name)
        section = ModelConfig(
            architecture=preset.get("architecture", {}),
            package=preset.get("package"),
            dtype=preset.get(
                "dtype", "float32" if "architecture" in preset else self._run.model.precision
            ),
        )
        return self._shape(local_model(section, lambda: False), name)

    def _in_folder(self, folder: Path) -> ModelShape:
        section = ModelConfig(folder=str(folder), dtype=self._run.model.precision)
        return self._shape(section, folder.name)

    def _shape(self, section: ModelConfig, name: str) -> ModelShape:
        architecture: dict[str, Any] = dict(section.architecture)
        if section.folder is not None:
            file = Path(section.folder) / "config.json"
            try:
                architecture = read_json(file)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"'{file}' cannot be read: {error}\n"
                    "    give a local folder that save_pretrained wrote"
                ) from error
        if not architecture:
            raise ConfigError(
                "'model' has neither a folder nor an architecture\n"
                "    choose one: model=llama-7b, model=org/name or model=PATH"
            )
        sizes = architecture.get("vocab_size")
        vocab_size = self._data.tokenizer.vocab_size if sizes is None else None
        return shape_of(architecture, name=name, vocab_size=vocab_size, dtype=section.precision)

    def workload(self, section: WorkloadConfig) -> Workload:
        table = next(iter(self.graph.sources))
        num_prompts = section.num_prompts or self._algorithm.per_step.get(table)
        if num_prompts is None:
            raise ConfigError(
                f"'algorithm.per_step.{table}' is missing: how many items of '{table}' one step "
                "takes\n    give it, or workload.num_prompts"
            )
        sampling = self._run.main.sampling
        samples = 1 if sampling is None else sampling.num_samples
        if self.graph.sources[table] in (PreferencePairs, Feedback):
            samples = 2
        section_of_task = self._run.config.task
        longest = section_of_task.pack_tokens or section_of_task.max_response_tokens
        if sampling is not None:
            longest = sampling.max_new_tokens
            if any(node.method == "converse" for node in self.graph.nodes):
                longest = sampling.max_total_tokens
        prompt, response = (
            Lengths.constant(given) if isinstance(given, int) else given
            for given in (section.prompt, section.response)
        )
        return Workload(
            num_prompts=num_prompts,
            samples_per_prompt=section.samples_per_prompt or samples,
            prompt=prompt or self._prompts(),
            response=response or Lengths.constant(longest),
            segment_tokens=self._run.config.schedule.segment_tokens or None,
            updates_per_train=section.updates_per_train,
            passes_per_train=section.passes_per_train,
        )

    def allows(self, workload: Workload) -> Callable[[str, Option], bool]:
        """Whether a call group may have an option: the ranks of a call divide a step's items."""
        per_step = {next(iter(self.graph.sources)): workload.num_prompts}
        items = train_items(self.graph, {**self._algorithm.per_step, **per_step})
        return lambda _, option: all(
            items.get(name, layout.dp) % layout.dp == 0 and layout.dp <= workload.num_prompts
            for name, layout in option.layouts.items()
        )

    def _prompts(self) -> Lengths:
        task = self._data.task
        encoded = self._data.prompts.encode(task.buffered(0)[:_PROMPTS_MEASURED])
        longest = self._run.config.task.max_prompt_tokens or math.inf
        # A text to imitate as a whole has no prompt but its first token.
        counts = Counter(len(tokens) or 1 for tokens in encoded if not isinstance(tokens, BadRow))
        lengths = sorted(length for length in counts if length <= longest)
        if not lengths:
            raise ConfigError(
                f"none of the first {len(encoded)} prompts of task '{task.task_id}' can be used, "
                "so their lengths are not known\n    give them: workload.prompt=1024"
            )
        weights = tuple(float(counts[length]) for length in lengths)
        return Lengths(tokens=tuple(lengths), weights=weights)

"""The planner's inputs from the configuration of a run: shapes of models, and lengths.

Nothing is built: the step is recorded with stand-ins, and a model is the shape its config
describes. A tokenizer is made only if a model's vocabulary or the task's prompts are asked for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ...algorithms.roles.language import Reward, RewardModel
from ...algorithms.roles.language_tables import PreferencePairs, Sampling
from ...configs.references import option_file, options_of
from ...configs.schema import ModelConfig, RoleConfig, WorkloadConfig
from ...configs.validate import nearest_key
from ...dataflow.errors import ConfigError
from ...dataflow.files import read_json
from ...dataflow.graph.graph import Graph
from ...planner.inputs.calls import Lengths, Workload
from ...planner.inputs.model_shape import ModelShape, adapter_params, shape_of
from ...workers.data.row_report import BadRow
from ..inputs.data import Data, load_data
from ..inputs.own_workers import asked_for, is_own
from ..inputs.run import Run
from ..inputs.sizes import converses
from .models import local_model

_PROMPTS_MEASURED = 2000
"""Training prompts whose lengths stand for all."""

_NO_ROLE = RoleConfig()
_NO_SHAPE = ("folder", "hub")
"""Options of `model=` that are models only with a further key."""


class PlanInputs:
    """The main algorithm of a run as the planner sees it.

    Args:
        run: The run.
        model_name: What tables call the run's model.
    """

    def __init__(self, run: Run, model_name: str = "") -> None:
        self._run, self._model_name = run, model_name
        self._algorithm = run.main.config
        self.graph: Graph = run.main.graph

    @cached_property
    def _data(self) -> Data:
        return load_data(self._run.config.task, self._run.model)

    def models(self, given: Mapping[str, str | None]) -> dict[str, ModelShape | None]:
        """Role -> shape; None for a role without a model."""
        for role in given:
            if role not in self.graph.roles:
                raise ConfigError(
                    f"'plan.models' names a role '{role}', which {self.graph.name} does not have"
                    f"{nearest_key(role, self.graph.roles)}\n"
                    f"    its roles are: {', '.join(self.graph.roles)}"
                )
        return {role: self._model(role, given) for role in self.graph.roles}

    def _model(self, role: str, given: Mapping[str, str | None]) -> ModelShape | None:
        shape = self._bare_model(role, given)
        lora = self._run.model.lora.resolved()
        if shape is None or not lora or not (self._is_changed(role) or lora.folder):
            return shape
        adapters = adapter_params(shape, lora.rank, lora.target_modules)
        return shape.model_copy(update={"adapter_params": adapters})

    def _is_changed(self, role: str) -> bool:
        following = {node.role for node in self.graph.nodes if node.leader is not None}
        return role in self.graph.learning_roles or role in following

    def _bare_model(self, role: str, given: Mapping[str, str | None]) -> ModelShape | None:
        if role in given:
            name = given[role]
            return None if name is None else self._named(role, name)
        if not self._has_model(role):
            return None
        start = (self._algorithm.roles.get(role) or _NO_ROLE).start
        if start is not None and (Path(start) / "config.json").is_file():
            return self._in_folder(Path(start))
        return self._shape(self._run.model, self._model_name)

    def left_out(self, models: Mapping[str, ModelShape | None]) -> tuple[str, ...]:
        """Describe roles that own workers play and that are not planned for."""
        sections = self._algorithm.roles
        return tuple(
            f"'{role}' is left out: {sections[role].worker} asks for no model, so its memory and "
            f"time are not known (plan.models.{role}=MODEL says what it computes)"
            for role, shape in models.items()
            if shape is None and role in sections and is_own(sections[role].worker)
        )

    def _has_model(self, role: str) -> bool:
        contract = self.graph.roles[role]
        section = self._algorithm.roles.get(role) or _NO_ROLE
        if section.worker is not None and is_own(section.worker):
            return "model" in asked_for(
                section.worker, section, f"{self._run.main.at}.roles.{role}"
            )
        if section.worker is not None and section.worker in ("policy", "value", "reward_model"):
            return True
        if section.worker is not None:
            return section.worker != "rule" and not issubclass(contract, Reward)
        if contract is Reward:
            return section.start is not None or self._learns_reward
        return contract.model_head is not None

    @cached_property
    def _learns_reward(self) -> bool:
        return any(stage.trained(RewardModel) for stage in self._run.stages[:-1])

    def _named(self, role: str, name: str) -> ModelShape:
        if (Path(name) / "config.json").is_file():
            return self._in_folder(Path(name))
        known = [option for option in options_of("model") if option not in _NO_SHAPE]
        if name not in known:
            raise ConfigError(
                f"'plan.models.{role}': there is no model '{name}'{nearest_key(name, known)}\n"
                f"    give one of {', '.join(known)}, or a folder with a config.json"
            )
        preset = option_file("model", name)
        section = ModelConfig(
            architecture=preset.get("architecture", {}),
            package=preset.get("package"),
            dtype=preset.get("dtype", "float32" if "architecture" in preset else self._dtype),
        )
        return self._shape(local_model(section), name)

    def _in_folder(self, folder: Path) -> ModelShape:
        return self._shape(ModelConfig(folder=str(folder), dtype=self._dtype), folder.name)

    @property
    def _dtype(self) -> Literal["float32", "bfloat16"]:
        return self._run.model.precision

    def _shape(self, section: ModelConfig, name: str) -> ModelShape:
        architecture: dict[str, Any] = dict(section.architecture)
        if section.folder is not None:
            architecture = _config_json(Path(section.folder))
        if not architecture:
            raise ConfigError(
                "'model' has neither a folder nor an architecture\n"
                "    choose one: model=llama-7b, model=org/name or model=PATH"
            )
        sizes = architecture.get("vocab_size")
        vocab_size = self._data.tokenizer.vocab_size if sizes is None else None
        return shape_of(architecture, name=name, vocab_size=vocab_size, dtype=section.precision)

    def workload(self, section: WorkloadConfig) -> Workload:
        """How much one step computes."""
        table = next(iter(self.graph.sources))
        num_prompts = section.num_prompts or self._algorithm.per_step.get(table)
        if num_prompts is None:
            raise ConfigError(
                f"'algorithm.per_step.{table}' is missing: how many items of '{table}' one step "
                "takes\n    give it, or workload.num_prompts"
            )
        return Workload(
            num_prompts=num_prompts,
            samples_per_prompt=section.samples_per_prompt or self._samples(table),
            prompt=self._prompt(section),
            response=self._response(section),
            segment_tokens=self._run.config.schedule.segment_tokens or None,
            updates_per_train=section.updates_per_train,
            passes_per_train=section.passes_per_train,
        )

    def _samples(self, table: str) -> int:
        if self.graph.sources[table] is PreferencePairs:
            return 2
        sampling = self._sampling
        return 1 if sampling is None else sampling.num_samples

    @cached_property
    def _sampling(self) -> Sampling | None:
        return self._run.main.sampling

    def _response(self, section: WorkloadConfig) -> Lengths:
        if section.response is not None:
            return _lengths(section.response)
        sampling = self._sampling
        longest = self._run.config.task.max_response_tokens
        if any(converses(node) for node in self.graph.nodes) and sampling is not None:
            return Lengths.constant(sampling.max_total_tokens)
        return Lengths.constant(longest if sampling is None else sampling.max_new_tokens)

    def _prompt(self, section: WorkloadConfig) -> Lengths:
        """As configured, or as long as the prompts of the task's training problems are."""
        if section.prompt is not None:
            return _lengths(section.prompt)
        task = self._data.task
        encoded = self._data.prompts.encode(task.train[:_PROMPTS_MEASURED])
        longest = self._run.config.task.max_prompt_tokens or math.inf
        counts = Counter(len(tokens) for tokens in encoded if not isinstance(tokens, BadRow))
        lengths = sorted(length for length in counts if 0 < length <= longest)
        if not lengths:
            raise ConfigError(
                f"none of the first {len(encoded)} prompts of task '{task.task_id}' can be used, "
                "so their lengths are not known\n    give them: workload.prompt=1024"
            )
        weights = tuple(float(counts[length]) for length in lengths)
        return Lengths(tokens=tuple(lengths), weights=weights)


def _lengths(given: Lengths | int) -> Lengths:
    return Lengths.constant(given) if isinstance(given, int) else given


def _config_json(folder: Path) -> dict[str, Any]:
    try:
        data: Any = read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"'{folder / 'config.json'}' cannot be read: {error}\n"
            "    give a local folder that save_pretrained wrote"
        ) from error
    return data

"""A run's models for others: folders in Hugging Face's layout, with a card, and their hashes.

A run may be looked at from outside, whether it has ended or goes on: nothing in its folder is
changed. What is read may be removed meanwhile, by the run itself when it writes newer checkpoints:
that is found out, and said.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import transformers
import yaml

from ... import __version__
from ...dataflow.errors import ConfigError, PenstockError, WorkerError
from ...dataflow.files import opened, writing
from ...dataflow.graph.role import Role
from ...dataflow.runtime.worker_protocol import WorkerContext, WorkerSpec, is_spec
from ...planner.plan.plan import Plan
from ...workers.engines.roles import ADAPTER
from ...workers.models.architecture import quiet_transformers
from ...workers.models.hub import hub_name
from ...workers.models.lora import ADAPTER_SETTINGS
from ...workers.models.spec import HEAD_FILE
from ...workers.models.tokenizer import Tokenizer, folder_end
from ...workers.training.flat_parameters import tensors_sha256
from ..inputs.run import Run, resolve, run_config
from ..run_dir.checkpoint import checkpoints_in, fault_of
from ..run_dir.evaluations import Evaluations
from ..run_dir.resume import stored_config
from ..run_dir.run_folder import RunFolder, open_run, record_of
from ..run_dir.step_logs import read_metrics
from .evaluation import logged
from .prepare import prepare
from .stage_result import Headline
from .worker_specs import MODEL, Results, exporting_specs

MODELS = "models"  # below a stage's folder: a model folder for each trained role

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of a step's sampling that a generation config has under the same name."""


def export_roles(
    roles: Mapping[str, WorkerSpec | Role],
    checkpoint: Path,
    tokenizer: Tokenizer | None,
    folder: Path,
    seed: int,
) -> tuple[dict[str, Path], dict[str, str]]:
    """Write a model folder for every trained role, from the checkpoint that holds its state.

    The weights are read in this process whatever executor trained them, and written to a folder
    that is complete or absent. Returned are these folders by role, without those of workers that
    cannot write one, and each role's hash over names, types, shapes and bytes of its weights.
    """
    folders: dict[str, Path] = {}
    hashes: dict[str, str] = {}
    for role, spec in roles.items():
        worker: Any = spec
        if is_spec(spec):
            worker = RestoredSpec(spec, checkpoint / role).build(WorkerContext(role, seed))
        hashes[role] = tensors_sha256(worker.export_weights())
        draft = folder / f"{role}.writing"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        with writing(draft):
            if worker.save_pretrained(draft) is False:
                draft.rmdir()
                continue
            if tokenizer is not None:
                tokenizer.save(draft)
        shutil.rmtree(folder / role, ignore_errors=True)
        folders[role] = draft.rename(folder / role)
    return folders, hashes


@dataclass(frozen=True)
class RestoredSpec:
    """Recipe for the worker of another recipe with a saved state; a `WorkerSpec`."""

    spec: WorkerSpec
    state: Path

    def build(self, context: WorkerContext) -> Any:
        spec: Any = self.spec
        if is_dataclass(self.spec) and hasattr(spec, "optimizer"):
            spec = replace(spec, optimizer=None)
        built = spec.build(context)
        built.load_state(self.state)
        return built


def files_sha256(folder: Path) -> dict[str, str]:
    """Path within the folder -> hash, of every file below it."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with opened(path) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.relative_to(folder).as_posix()] = digest
    return found


def combined_sha256(hashes: Mapping[str, str]) -> str:
    """One hash for all trained roles: the only one's own, or that of `role:hash` lines."""
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    lines = "".join(f"{role}:{hashes[role]}\n" for role in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()


@dataclass(frozen=True)
class KeptCheckpoint:
    step: int  # steps that were complete
    folder: Path  # where it is


@dataclass(frozen=True)
class KeptRun:
    folder: RunFolder  # the folder
    run: Run  # the run, made ready as if to go on
    best_by: str | None  # the metric of which it keeps the best checkpoint; None if it keeps none

    def checkpoint(self, step: int | str | None) -> KeptCheckpoint:
        """The checkpoint of a step, the best one, or the newest."""
        found, run = checkpoints_in(self.folder.checkpoints), f"run '{self.folder.id}'"
        steps = ", ".join(map(str, found))
        there = f"    checkpoints are there of steps: {steps or 'none'}"
        if step == "best":
            metric = self.best_by
            step = None if metric is None else Evaluations(self.folder.path).best(metric)
            if step is None:
                why = "it was not to keep one" if metric is None else "no step is evaluated yet"
                raise ConfigError(
                    f"{run} has no best step: {why}\n{there}; evaluation.keep_best keeps the best "
                    "one of a run"
                )
        faults: list[str] = []
        for kept in [step] if isinstance(step, int) else reversed(found):
            folder = found.get(kept)
            if folder is None:
                continue
            fault = fault_of(folder)
            if fault is None:
                return KeptCheckpoint(kept, folder)
            if folder.exists():
                faults.append(f"checkpoint '{folder}' cannot be used: {fault}\n")
        if faults:
            raise ConfigError("    ".join(faults) + there)
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise ConfigError(f"{run} keeps {which}\n{there}")

    def policy(
        self, step: int | str | None, role: str | None = None
    ) -> tuple[KeptCheckpoint, WorkerSpec]:
        """Return the main stage's policy, or another role, at a step or as the run exported it."""
        role = role or self.run.main.policy
        if role is None:
            raise ConfigError(
                f"run '{self.folder.id}' trains no policy that answers problems\n"
                "    its returns are in its summary.json"
            )
        spec: Any = self.specs()[role]
        models = self.folder.path / MODELS / role
        if step is None and not checkpoints_in(self.folder.checkpoints) and models.is_dir():
            model = replace(spec.model, folder=str(models), architecture={})
            ended = KeptCheckpoint(self.run.main.config.num_steps, models)
            changes: dict[str, Any] = {"model": model, "optimizer": None}
            if lora := getattr(spec, "lora", None):  # it is merged into the model
                changes["lora"] = replace(lora, folder=None)
            return ended, replace(spec, **changes)
        kept = self.checkpoint(step)
        return kept, RestoredSpec(spec, kept.folder / role)

    @contextmanager
    def reading(self, kept: KeptCheckpoint) -> Generator[None]:
        """While a checkpoint is read: what fails because it is gone is said so."""
        try:
            yield
        except Exception as error:
            if kept.folder.exists():
                raise
            raise ConfigError(
                f"the checkpoint of step {kept.step} was removed while it was read: run "
                f"'{self.folder.id}' goes on, and keeps its newest "
                f"{self.run.config.keep_checkpoints}\n    try again with the newest one: leave "
                "step out"
            ) from error

    def specs(self) -> dict[str, WorkerSpec | Role]:
        """Specs of the main stage's roles that read what any engine has trained."""
        run = self.run
        results: Results = {
            stage.name: (stage, self.folder.stage(stage.name).path / MODELS)
            for stage in run.stages[:-1]
        }
        return exporting_specs(run.main, run, results)


def kept_run(
    path: str, changed: Callable[[dict[str, Any]], dict[str, Any]] = lambda stored: stored
) -> KeptRun:
    folder = open_run(Path(path))
    stored = stored_config(folder)
    best_by = run_config(stored).evaluation.keep_best
    config = run_config(changed(stored))
    plan = Plan.read(folder.plan) if folder.plan.exists() else None
    try:
        return KeptRun(folder, prepare(resolve(config), plan), best_by)
    except PenstockError as error:
        error.add_note(f"this is about the configuration of run '{folder.id}', in {folder.config}")
        raise


def write_card(
    folder: Path, home: RunFolder, run: Run, role: str, step: int, weights_sha256: str
) -> None:
    stage, model, record = run.main, run.model, record_of(home)
    base = stage.roles[role].start
    named = model.folder if base == MODEL else base
    known = hub_name(named) if named else None
    parts = Path(named).parts if named else (model.architecture.get("model_type"),)
    began = "/".join(map(str, parts[-3:] if parts[-2:-1] == ("models",) else parts[-1:]))
    began = began if known is None else known[0]
    about: dict[str, Any] = {"library_name": "transformers", "tags": ["penstock", stage.graph.name]}
    if (folder / ADAPTER_SETTINGS).exists():
        about["library_name"] = "peft"
    if known is not None:
        about["base_model"] = known[0]
    facts = {
        "algorithm": stage.graph.name,
        "stages": ", ".join(one.name for one in run.stages),
        "role": role,
        "began as": began,
        **({"LoRA rank": model.lora.rank} if model.lora.rank else {}),
        "data": f"{run.data.task.task_id} (fingerprint {run.data.fingerprint})",
        "steps": f"{step} of {stage.config.num_steps}",
        "seed": run.config.seed,
        "run": home.id,
        "code": record.code,
        **({"not reproducible": record.not_reproducible} if record.not_reproducible else {}),
        "weights_sha256": weights_sha256,
    }
    lines = [
        "---",
        yaml.safe_dump(about, sort_keys=False).strip(),
        "---",
        "",
        f"# {home.id}, step {step}",
        "",
        f"Trained with Penstock {__version__}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {_cell(value)} |" for name, value in facts.items()),
        "",
        *_rewards(home, run, step),
        *_evaluations(home, step),
    ]
    with writing(folder / "README.md"):
        (folder / "README.md").write_text("\n".join(lines).rstrip() + "\n")


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _rewards(home: RunFolder, run: Run, step: int) -> list[str]:
    rows = [row for row in read_metrics(home.metrics) if row["step"] < step]
    metric = Headline(run.main).curve(rows[-1]) if rows else None
    if metric is None:
        return []
    first, last = (row.get(metric.name) for row in (rows[0], rows[-1]))
    if first is None or last is None:
        return []
    where = f"step {rows[0]['step'] + 1} | step {rows[-1]['step'] + 1}"
    return [
        f"| in training | {where} |",
        "|---|---|---|",
        f"| {metric.label} | {first:.4g} | {last:.4g} |",
        "",
    ]


def _evaluations(home: RunFolder, step: int) -> list[str]:
    kept = Evaluations(home.path)
    steps = [one for one in kept.steps() if one <= step]
    if not steps:
        return []
    first, last = (logged(kept.read(one)) for one in (steps[0], steps[-1]))
    lines = [
        f"| on held-out problems | after {steps[0]} steps | after {steps[-1]} steps |",
        "|---|---|---|",
    ]
    for name, value in last.items():
        before = f"{first[name]:.4g}" if name in first else ""
        shown = _cell(name.removeprefix("evaluation/"))
        lines.append(f"| {shown} | {before} | {value:.4g} |")
    return [*lines, ""]


def write_generation_config(folder: Path, run: Run) -> None:
    """Write generation_config.json: what ends a response, and how training sampled."""
    sampling: Mapping[str, Any] = run.main.config.cfg.get("sampling", {})
    end = run.data.tokenizer.end
    end = end.sampled_by(run.main.sampling) if run.main.sampling else end
    # Zeros as well: without its key transformers takes top_k=50, or what the base model was given.
    given = {key: sampling[key] for key in _SAMPLING if key in sampling}
    if not given.get("temperature"):  # greedy: no word of the file says so
        given = {}
    tokenizer = run.data.tokenizer
    with quiet_transformers(), writing(folder / "generation_config.json"):
        try:
            config = transformers.GenerationConfig.from_pretrained(folder)
        except OSError:  # there is none
            config = transformers.GenerationConfig()
        found = folder_end(folder, end).as_generation_config()
        if config.pad_token_id is None:
            found["pad_token_id"] = tokenizer.pad_id
        if given:
            found |= {"do_sample": True, **given}
        config.update(**found)
        config.save_pretrained(folder)


def write_model(
    run: Run,
    home: RunFolder,
    spec: Mapping[str, WorkerSpec | Role],
    point: KeptCheckpoint,
    folder: Path,
    *,
    adapter: bool = False,
) -> str:
    """Write the model of the one role in `spec`, at a checkpoint, as a folder for others.

    The folder is complete or as it was before, and may be there if it is empty. Returned is the
    hash of the weights.
    """
    (role,) = spec
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.writing")
    tokenizer = run.data.tokenizer if run.data.has_text else None
    try:
        folders, hashes = export_roles(spec, point.folder, tokenizer, draft, run.main.seed)
        if role not in folders:
            raise ConfigError(
                f"'role': the worker of '{role}' writes no model folder\n    give it a method "
                "save_pretrained(folder), or choose another role"
            )
        if tokenizer is not None and role == run.main.policy:
            write_generation_config(folders[role], run)
        written = folders[role]
        if adapter:
            written = _adapter_of(written, role, tokenizer)
        write_card(written, home, run, role, point.step, hashes[role])
        written.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return hashes[role]


def _adapter_of(model: Path, role: str, tokenizer: Tokenizer | None) -> Path:
    alone = model / ADAPTER
    if not alone.is_dir():
        raise ConfigError(
            f"'adapter' is true, but '{role}' was trained without one (model.lora.rank)\n"
            "    leave it out: the whole model is written"
        )
    if tokenizer is not None:
        tokenizer.save(alone)
    if (model / HEAD_FILE).exists():
        (model / HEAD_FILE).replace(alone / HEAD_FILE)
    return alone


def check_token(key: str, hub: str | None) -> None:
    """Require a token for the hub, if there is one to push to."""
    if hub is not None and not os.environ.get("HF_TOKEN"):
        raise ConfigError(
            f"'{key}' is {hub}, but the environment has no HF_TOKEN\n"
            "    set it to a token that may write there; it is never shown"
        )


def push_folder(folder: Path, repository: str, message: str, *, private: bool) -> str:
    """Upload a folder to the hub that HF_ENDPOINT names, made there if need be."""
    import huggingface_hub

    token = os.environ["HF_TOKEN"]
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        hub = huggingface_hub.HfApi(endpoint=endpoint, token=token)
        hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except Exception as error:  # of many kinds, and of the client below it
        said = " ".join(str(error).split()).replace(token, "HF_TOKEN")
        raise WorkerError(
            f"'{folder}' is written, but {endpoint} did not take it as '{repository}': "
            f"{type(error).__name__}: {said:.300}\n    see that the token in HF_TOKEN may write "
            "there, and upload the folder again"
        ) from None
    finally:
        huggingface_hub.close_session()
    return f"{endpoint}/{repository}"

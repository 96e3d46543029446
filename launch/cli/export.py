"""`penstock export`: a run's model at a checkpoint as a folder for others, and onto a hub.

The run may be going on: its checkpoint is read, and nothing of its folder is touched. The folder
holds config, weights as safetensors, the tokenizer with its chat template, a generation config and
a model card; it is complete, or it is not there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dataflow.errors import ConfigError, WorkerError, nearest
from .hydra_app import hydra_app

if TYPE_CHECKING:
    from ...configs.schema import ExportConfig
    from ...workers.models.tokenizer import Tokenizer
    from ..stages.kept_run import KeptCheckpoint, KeptRun


def export_command(arguments: list[str]) -> int:
    """Run the command; `arguments` are the words after `penstock export`."""
    hydra_app("export", arguments, _export)
    return 0


def _export(composed: dict[str, Any]) -> None:
    # Imported here: torch and all that follows it take seconds, and `--help` needs none of it.
    from ...configs.schema import ExportConfig
    from ...configs.validate import validated
    from ..stages.kept_run import kept_run

    keys = validated(ExportConfig, composed)
    if keys.push is not None and not os.environ.get("HF_TOKEN"):
        raise ConfigError(
            f"'push' is {keys.push}, but the environment has no HF_TOKEN\n"
            "    set it to a token that may write there; it is never shown"
        )
    kept = kept_run(keys.run)
    role = _role(kept, keys.role)
    point = kept.checkpoint(keys.step)
    folder = target_folder(keys.output or f"{kept.folder.id}-step-{point.step}")
    digest = _write(kept, point, role, folder, adapter=keys.adapter)
    print(f"wrote {folder}: {role} of {kept.folder.id} after {point.step} steps")
    print(f"weights_sha256: {digest}")
    if keys.push is not None:
        print(f"uploaded to {_pushed(keys, folder, f'{kept.folder.id}, step {point.step}')}")


def _role(kept: KeptRun, given: str | None) -> str:
    trained = list(kept.run.main.graph.trains_per_step)
    if given is None:
        return kept.run.main.policy or trained[0]
    if given not in trained:
        raise ConfigError(
            f"'role': run '{kept.folder.id}' trains no '{given}'{nearest(given, trained)}\n"
            f"    it trains: {', '.join(trained)}"
        )
    return given


def target_folder(given: str) -> Path:
    """The folder to write, which must be new or empty: nobody's files are replaced."""
    folder = Path(given)
    if folder.is_dir() and not any(folder.iterdir()):
        return folder
    if folder.exists() or folder.is_symlink():
        what = "is not empty" if folder.is_dir() else "is no folder"
        raise ConfigError(
            f"'output': '{folder}' {what}\n    give a folder that is not there yet, or remove it"
        )
    if not folder.absolute().parent.is_dir():
        raise ConfigError(f"'output': '{folder}' cannot be written: there is no such folder")
    return folder


def _write(kept: KeptRun, point: KeptCheckpoint, role: str, folder: Path, *, adapter: bool) -> str:
    from ..stages.export import export_roles
    from ..stages.model_card import write_card, write_generation_config

    run = kept.run
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.writing")
    tokenizer = run.data.tokenizer if run.data.has_text else None
    try:
        with kept.reading(point):
            specs = {role: kept.specs()[role]}
            made = export_roles(specs, point.folder, tokenizer, draft, run.main.seed)
        if role not in made.folders:
            raise ConfigError(
                f"'role': the worker of '{role}' writes no model folder\n    give it a method "
                "save_pretrained(folder), or choose another role"
            )
        if tokenizer is not None and role == run.main.policy:
            write_generation_config(made.folders[role], run)
        digest = made.weights_sha256[role]
        whole = made.folders[role]
        written = _adapter_of(whole, role, tokenizer) if adapter else whole
        write_card(written, kept.folder, run, role, point.step, digest)
        written.replace(folder)
    except OSError as error:
        raise ConfigError(f"'output': '{folder}' cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return digest


def _adapter_of(model: Path, role: str, tokenizer: Tokenizer | None) -> Path:
    from ...workers.engines.roles import ADAPTER
    from ...workers.models.heads import HEAD_FILE

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


def _pushed(keys: ExportConfig, folder: Path, message: str) -> str:
    assert keys.push is not None, "who asks for no upload does not come here"
    return push_folder(folder, keys.push, message, private=keys.private)


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

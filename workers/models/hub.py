"""Models of a hub: which snapshot of one is meant, and where its files lie once they are here.

The Hugging Face client does the work, so its cache, `HF_ENDPOINT`, `HF_HUB_OFFLINE` and `HF_TOKEN`
mean what they mean elsewhere. Only configuration, tokenizer, chat template and safetensors are
taken: no code, which a run never executes, no pickles, and none of the other formats of the same
weights that often lie beside them.
"""

from __future__ import annotations

import re
from pathlib import Path

from ...dataflow.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_TEXTS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_WEIGHTS = ("*.safetensors",)
_LEFT_OUT = ("*/*", "consolidated*")
"""Folders below, which hold the same for other programs, and weights under a publisher's names."""


def is_hub_id(name: str) -> bool:
    """Return whether a text has the form of a model's name on a hub: "org/name"."""
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

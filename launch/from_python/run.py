"""`penstock.run`: what the command `run` does, in this process, with a handle of what comes out.

What Python says of a run becomes the words of a command line: values quoted, objects by name.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from ...dataflow.errors import ConfigError
from ..cli.hydra_app import given_overrides, hydra_app
from ..cli.overrides import literal
from ..cli.run import run_composed
from ..run_dir.run_folder import RunFolder
from .handle import LiveCurve, RunHandle, in_notebook


def run(*words: str, **keys: Any) -> RunHandle:
    """Train as an algorithm, a model and a task say, or go on with a run; comes back at its end.

    It composes and runs what `penstock run` would with the same words. With the default executor
    everything happens in this thread: `breakpoint()` works in a step, an op or a worker, and both
    may be defined in the notebook or the script that calls. In Jupyter the curve is shown while
    the run goes on. Interrupting the kernel stops the run in good order, with a checkpoint.

    Args:
        *words: As on the command line: "algorithm=ppo", "algorithm.num_steps=20".
        **keys: Keys whose values Python has: `seed=1`, `algorithm={"step": my_step}`.

    Returns:
        The run.

    Raises:
        ConfigError: If a key is wrong, or it is not called from the main thread.
        FlowError: If the step is no valid graph.
        PlanError: If it fits nowhere.
        WorkerError: If code of a step fails while it runs; the original error is its cause.
        KeyboardInterrupt: If it was interrupted, once its checkpoint is written.

    Example:
        >>> run = penstock.run("algorithm=grpo", "task=chain_sum", seed=1)
        >>> run.metrics["reward.score/reward/mean"].plot()
    """
    _check_thread()
    made: list[RunFolder] = []
    shown = LiveCurve() if in_notebook() else None

    def carried_out(composed: dict[str, Any]) -> None:
        made.append(run_composed(composed, given_overrides(), shown))

    hydra_app("run", as_words("run", words, keys), carried_out)
    return RunHandle(made[0])


def _check_thread() -> None:
    """Refuse a thread in which a run could not be interrupted in good order."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "penstock.run was called in a thread of its own, and a run is interrupted by signals, "
            "which reach the main thread alone\n    call it there, or start `penstock run` as a "
            "process"
        )


_OPTIONS = ("--config-dir", "-cd")  # those of the command line that mean something here


# A name that is read as a text without quotes
_PLAIN = re.compile(r"(?!(?:null|true|false|nan|inf)$)[A-Za-z_]\w*", re.ASCII | re.IGNORECASE)


def as_words(command: str, words: Sequence[str], keys: Mapping[str, Any]) -> list[str]:
    """The words of a command line that say the same."""
    for word in words:
        if not isinstance(word, str):  # pyright: ignore[reportUnnecessaryIsInstance] - user code
            raise ConfigError(
                f"penstock.{command}: expected words such as 'algorithm=ppo', got {word!r:.80}\n"
                "    give other values by their keys: seed=1"
            )
        if word.startswith("-") and word.partition("=")[0] not in _OPTIONS:
            raise ConfigError(
                f"penstock.{command}: '{word}' is an option of the terminal's\n"
                f"    {_instead(command, word)}"
            )
    said = list(words)
    for key, value in keys.items():
        try:
            said += _said(key, value)
        except RecursionError:
            raise ConfigError(f"'{key}' is nested too deeply, or contains itself") from None
    return said


def _instead(command: str, word: str) -> str:
    if word in ("-m", "--multirun"):
        return f"call penstock.{command} once for each combination: for seed in range(3): ..."
    if word == "--dry-run":
        return f"use it in a terminal, with the words of the run: penstock {command} {word} WORDS"
    return f"use it in a terminal: penstock {command} {word}"


def _said(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, inner in cast("Mapping[Any, Any]", value).items():
            yield from _said(f"{key}.{name}", inner)
    else:
        yield f"{key}={_text(key, value)}"


def _text(key: str, value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        try:
            return repr(value)
        except ValueError:  # Python writes no more than 4300 digits
            raise ConfigError(f"'{key}': a number has too many digits") from None
    if isinstance(value, str):
        return literal(value)
    if isinstance(value, Mapping):
        inner = cast("Mapping[Any, Any]", value).items()
        return f"{{{','.join(f'{_inner_key(key, n)}:{_text(key, one)}' for n, one in inner)}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(_text(key, one) for one in cast('Sequence[Any]', value))}]"
    if callable(value):
        return literal(_name(key, value))
    if hasattr(value, "__fspath__"):
        return literal(value.__fspath__())
    raise ConfigError(
        f"'{key}': expected a number, a text, a list, a mapping, a function or a class, got a "
        f"{type(value).__name__}"
    )


def _inner_key(key: str, name: Any) -> str:
    if isinstance(name, str) and _PLAIN.fullmatch(name):
        return name
    raise ConfigError(
        f"'{key}': expected names of letters, digits and '_' in a mapping inside a list, got "
        f"{name!r:.80}"
    )


def _name(key: str, value: Any) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and name and getattr(sys.modules.get(module), name, None) is value:
        return f"{module}:{name}"
    raise ConfigError(
        f"'{key}': {name or repr(value)} cannot be found by its name\n    define it at the top of "
        "a module or of the notebook, and give what stands there under its name"
    )

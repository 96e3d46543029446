"""Shell completion: commands first, then what Hydra knows of a command's groups and keys.

`penstock -sc install=bash` prints a script to evaluate. For every Tab that script asks
`penstock COMMAND -sc query=bash`, which Hydra answers from the line in `COMP_LINE`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from ...dataflow.errors import ConfigError
from .doctor import OPTIONS

_SCRIPT = """\
_penstock_complete()
{
    local word="${COMP_WORDS[COMP_CWORD]}" choices
    if [ "$COMP_CWORD" -eq 1 ]; then
        choices="{commands} --help --version"
    else
        choices=$(COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" \\
            "${COMP_WORDS[0]}" "${COMP_WORDS[1]}" -sc query=bash 2>/dev/null)
    fi
    COMPREPLY=($(compgen -o default -W "$choices" -- "$word"))
    # A blank belongs after a command, and nowhere after a key.
    if [ "$COMP_CWORD" -eq 1 ]; then compopt +o nospace 2>/dev/null; fi
}
# Bash must not cut words at "=", or no value could be completed.
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _penstock_complete penstock
"""


_COMPOSE_NOTHING = ("samples", "scale", "runs", "watch")


def complete(words: list[str], commands: Iterable[str]) -> int:
    """Answer `[COMMAND] -sc install=SHELL | uninstall=SHELL | query=SHELL`."""
    request = next((word for word in words if "=" in word), "")
    action, _, shell = request.partition("=")
    if action not in ("install", "uninstall", "query") or shell not in ("bash", "zsh"):
        raise ConfigError(
            f"shell completion was asked for with '{request or 'nothing'}'\n"
            "    use: penstock -sc install=bash (or zsh), uninstall=..., query=..."
        )
    if action == "install":
        if shell == "zsh":
            print("autoload -U +X bashcompinit && bashcompinit")
        print(_SCRIPT.replace("{commands}", " ".join(commands)), end="")
    elif action == "uninstall":
        print("complete -r penstock; unset -f _penstock_complete")
    elif words[0] == "doctor":  # no Hydra application: it has nothing to compose
        print(" ".join(OPTIONS))
    elif words[0] == "runs":
        from .runs import ACTIONS  # here: what it needs takes half a second

        print(" ".join(ACTIONS))
    elif words[0] in commands and words[0] not in _COMPOSE_NOTHING:
        _query(words[0])
    return 0


def _query(command: str) -> None:
    from .hydra_app import hydra_app

    # Hydra takes the first word for the program and all others for overrides.
    program, _, rest = os.environ.get("COMP_LINE", "").lstrip().partition(" ")
    os.environ["COMP_LINE"] = f"{program} {rest.lstrip().removeprefix(command).lstrip()}"

    def never(_: object) -> None:
        raise AssertionError("a completion query runs no task")

    hydra_app(command, ["-sc", "query=bash"], never)

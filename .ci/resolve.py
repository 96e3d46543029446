"""Do the pinned requirements fit every Python that Penstock allows, on CPUs and on GPUs?

    python .ci/resolve.py            resolve each case anew and hold it against the pins
    python .ci/resolve.py --write    write requirements-cuda.txt (part of `make requirements`)

uv resolves for other Pythons and machines than the one it runs on, from metadata: no package is
downloaded, and no GPU is needed. Every pin must have a wheel there, but for the few packages that
nobody has wheels of. It shows that an installation is possible, not that Penstock runs in it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORM = "x86_64-manylinux_2_31"
"""glibc 2.31 or newer: vLLM needs llguidance, which has wheels for no older one."""

WITHOUT_WHEELS = ("antlr4-python3-runtime", "cellpylib", "pycosat", "zss")
"""Built where they are installed: Hydra needs the first, reasoning-gym the others."""

SAME_EVERYWHERE = ("cuda-python==13.4.4",)
"""Where the newest version that one Python can have is not the newest of another, though one
serves all: 12.6, which 3.11 and 3.12 would get, has no wheel for 3.13."""

OF_TORCH = re.compile(r"(nvidia|cuda)-[\w-]+|triton")
"""What the build of torch for CUDA asks for; `make setup` installs that for CPUs where there is
one, so requirements.txt does not have it."""

DEADLINE_S = 300.0


@dataclass(frozen=True)
class Case:
    """Requirements for one kind of machine.

    Attributes:
        file: Where its pins are.
        extras: Of pyproject.toml, which they are made from.
        beside: Names that a resolution may have beside the pins.
    """

    file: str
    extras: tuple[str, ...]
    beside: re.Pattern[str] | None = None


CASES = {
    "cpu": Case("requirements.txt", ("ray", "dev"), OF_TORCH),
    "cuda": Case("requirements-cuda.txt", ("cuda", "megatron")),
}


class UnresolvedError(Exception):
    """Requirements that cannot be installed together, or a registry that cannot be reached."""


def pins(file: str) -> list[str]:
    """The pins of a file at the top of the repository, without its comments."""
    lines = (ROOT / file).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def resolved(case: Case, python: str, constraints: Sequence[str]) -> list[str]:
    """What uv would install, as `name==version`.

    Args:
        case: What is wanted.
        python: For which version.
        constraints: Which versions packages must have, should they be needed.

    Raises:
        UnresolvedError: If there is no solution within `constraints`; uv's reason is the message.
    """
    command = [
        *(str(Path(sys.executable).with_name("uv")), "pip", "compile", "pyproject.toml"),
        *("--quiet", "--no-header", "--no-annotate", "--no-python-downloads"),
        *("--python-version", python, "--python-platform", PLATFORM, "--only-binary", ":all:"),
        *(word for name in WITHOUT_WHEELS for word in ("--no-binary", name)),
        *(word for extra in case.extras for word in ("--extra", extra)),
        *("--constraint", "-"),
    ]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        input="\n".join(constraints),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if ran.returncode:
        raise UnresolvedError(f"{case.file}, Python {python}: {ran.stderr.strip()}")
    return [re.sub(r"\+[a-z0-9]+$", "", line) for line in ran.stdout.split("\n") if line]


def differences(case: Case, python: str) -> list[str]:
    """What a resolution for this Python has that is not pinned."""
    known = pins(case.file)
    found = resolved(case, python, known)
    beyond = sorted(set(found) - set(known))
    may = case.beside
    return [line for line in beyond if may is None or not may.fullmatch(line.partition("==")[0])]


def write() -> None:
    """Write the pins for GPUs; of what requirements.txt has too, the same versions."""
    file = ROOT / CASES["cuda"].file
    head = [line for line in file.read_text().splitlines() if line.startswith("#")]
    shared = [*pins("requirements.txt"), *SAME_EVERYWHERE]
    file.write_text("\n".join([*head, *resolved(CASES["cuda"], PYTHONS[0], shared)]) + "\n")


def main(words: Sequence[str]) -> int:
    """Hold every case against its pins, or write those for GPUs."""
    if list(words) == ["--write"]:
        write()
        return 0
    wrong = 0
    for name, case in CASES.items():
        for python in PYTHONS:
            try:
                beyond = differences(case, python)
            except UnresolvedError as error:
                beyond = [str(error)]
            wrong += bool(beyond)
            print(f"{name}, Python {python}: {'; not pinned: '.join(['', *beyond])[2:] or 'fits'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

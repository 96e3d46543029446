"""Our formulas against those of verl, OpenRLHF, TRL, rlax and torchrl, on random inputs.

The packages live in an environment of their own, `.venv-parity`, which is made if it is missing
(a few hundred megabytes). A case computes the same thing with ours and with theirs; what is printed
is the largest difference over many draws, relative to the size of the result where that is above 1.
Losses are compared with their gradients.

    python benchmarks/parity.py                    # print
    python benchmarks/parity.py --json FILE        # and keep
    python benchmarks/parity.py --page FILE        # write the table of docs/algorithms/parity.md
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import venv
from pathlib import Path
from typing import Any

from bench import parser, report, table

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE.parent / ".venv-parity"
REQUIRED = (
    "torch==2.13.0", "trl==1.16.0", "rlax==0.1.9", "torchrl==0.14.1", "tensordict", "omegaconf",
    "hydra-core", "ray", "codetiming", "torchdata", "networkx", "psutil", "pydantic",
)  # fmt: skip
WITHOUT_DEPENDENCIES = ("verl==0.9.1", "openrlhf==0.11.2")
"""Only their formulas are loaded; what they need to train is not."""


def parity_python() -> Path:
    """The interpreter of the packages' environment, which is made if it is missing."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        print(f"making {ENVIRONMENT.name} with {', '.join(REQUIRED)}", flush=True)
        venv.create(ENVIRONMENT, with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *REQUIRED], check=True)
        subprocess.run([*pip, "--no-deps", *WITHOUT_DEPENDENCIES], check=True)
    return python


def run_cases(draws: int) -> dict[str, Any]:
    """All cases, in the packages' environment."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "penstock").symlink_to(HERE.parent)
        found = subprocess.run(
            [parity_python(), HERE / "parity_cases.py", str(draws)],
            env={**os.environ, "PYTHONPATH": folder},
            stdout=subprocess.PIPE,
            check=True,
            timeout=1200,
            text=True,
        )
    return json.loads(found.stdout.splitlines()[-1])


def page(result: dict[str, Any]) -> str:
    """The documentation's table."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        "# The same numbers as other packages",
        "",
        "For readers who switch from another package, or doubt a formula: each is computed with",
        "theirs and with ours.",
        "",
        "<!-- not run: it installs the other libraries, and takes minutes -->",
        "    python benchmarks/parity.py               # compare again",
        "    python benchmarks/parity.py --page FILE   # and write this page",
        "",
        f"Inputs are random, {result['draws']} samples each, with ragged masks and interleaved",
        "groups, in double precision. The last column is the largest difference of any element,",
        "relative to the result's size where that is above 1; losses include their gradients.",
        f"Versions: {versions}.",
        "",
        "| what | theirs | ours | largest difference |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {one['what']} | `{one['theirs']}` | `{one['ours']}` | {one['difference']:.1e} |"
        for one in result["cases"]
    ]
    lines += [
        "",
        "Differences near 1e-7 come from packages that compute in single precision, near 1e-9 from",
        "a small number added to a denominator. Where packages disagree with each other, an option",
        "chooses; see [the page of the algorithm](index.md).",
        "",
        "These packages have no separate function for REBEL, P3O, A-LoL, Kimi's mirror descent,",
        "MA-RLHF, Safe RLHF, Lite PPO, KTO and CGPO. Those are tested against numbers that were",
        "calculated separately.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Compare, print a table, keep it if asked."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--draws", type=int, default=50)
    options.add_argument("--page", type=Path, metavar="FILE", help="also write the docs' page")
    args = options.parse_args()
    result = run_cases(args.draws)
    rows = [
        [one["what"], one["theirs"], one["ours"], f"{one['difference']:.1e}"]
        for one in result["cases"]
    ]
    print(table(["what", "theirs", "ours", "difference"], rows))
    if args.page is not None:
        args.page.write_text(page(result))
        print(f"written to {args.page}")
    report(result, args.json)


if __name__ == "__main__":
    main()

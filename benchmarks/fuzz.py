"""Fuzz everything that is read: keys, the bytes of every file, and other input of strangers.

`python benchmarks/fuzz.py --minutes 10 --seed 0 --json FILE`. What is tried follows from the seed
alone; only how far it gets in that time does not. A command may be accepted (exit code 0), refused
(2) or end while running (1). It may not show a traceback or an error without a message of ours,
hang, leave a process or a file of a refusal, touch a file outside its folder, or do other than it
was told. Each fault is printed once per cause, with the command that shows it; of several hostile
words, the least that do. `--part surfaces --cases 1000` tries what `fuzz_surfaces.py` makes.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from bench import parser, report, table
from fuzz_case import LIMIT_S, Case, Commands, Outcome
from fuzz_files import file_case, scenes
from fuzz_ground import ground
from fuzz_keys import GROUPS, key_cases
from fuzz_surfaces import surface_cases
from fuzz_values import ValueFuzzer
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

_BATCH = 50
"""Cases that Hypothesis makes at a time; each batch has a seed of its own."""
_SHARE_OF_VALUES = 0.2
"""Of the time; hundreds a second are tried in it."""
_PATIENCE = 3.0
"""What seems to hang is given so many times as long, alone, before it is called that."""
_ALGORITHMS = tuple(name for name in GROUPS["algorithm"] if name != "own")


@dataclass
class Found:
    """What has come out so far.

    Attributes:
        endings: Part and ending -> how many.
        faults: Kind and cause -> what shows it.
        times: Seconds of each case.
    """

    endings: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    faults: dict[tuple[str, str], dict[str, Any]] = field(
        default_factory=dict[tuple[str, str], dict[str, Any]]
    )
    times: list[float] = field(default_factory=list[float])


def hostile_keys(seed: int) -> Iterator[list[Case]]:
    """Batches of cases with hostile keys, without end."""
    for batch in count():
        algorithms = tuple(random.Random(f"{seed}/{batch}").sample(_ALGORITHMS, 4))
        made: list[Case] = []

        @hypothesis_seed(seed * 100_003 + batch)
        @settings(
            max_examples=_BATCH,
            database=None,
            phases=[Phase.generate],
            deadline=None,
            suppress_health_check=[
                HealthCheck.too_slow,
                HealthCheck.data_too_large,
                HealthCheck.filter_too_much,
            ],
        )
        @given(key_cases(algorithms))
        def make(case: Case | None) -> None:
            if case is not None:
                made.append(case)  # noqa: B023 - called below, in this round

        make()
        yield made


def ending(outcome: Outcome) -> str:
    """How a command ended, for the counts."""
    if outcome.code is None:
        return "ended while it took steps" if outcome.steps else "hung"
    return {0: "accepted", 1: "failed while running", 2: "refused"}.get(outcome.code, "other")


def least(case: Case, fault: tuple[str, str], commands: Commands) -> Case:
    """The case with as few hostile words as still show the fault."""
    num_base = len(case.words) - case.num_hostile
    for at in reversed(range(num_base, len(case.words))):
        words = case.words[:at] + case.words[at + 1 :]
        fewer = replace(case, words=words, num_hostile=case.num_hostile - 1)
        if case.num_hostile > 1 and fault in commands.run(fewer).faults:
            case = fewer
    return case


def attempt(part: str, case: Case, commands: Commands, found: Found) -> None:
    """Run a case; count how it ended, and print each cause of a fault once."""
    outcome = commands.run(case)
    if any(kind == "hang" for kind, _ in outcome.faults):
        outcome = commands.run(case, LIMIT_S * _PATIENCE)
    found.endings[part, ending(outcome)] += 1
    found.times.append(outcome.seconds)
    for fault in outcome.faults:
        if fault in found.faults:
            found.faults[fault]["times"] += 1
            continue
        shown = case if fault[0] == "hang" else least(case, fault, commands)
        found.faults[fault] = {
            "kind": fault[0],
            "cause": fault[1],
            "times": 1,
            "command": shown.command,
            "file": shown.what,
        }
        print(f"{fault[0]}: {fault[1]}\n    {shown.command}\n    {shown.what}", flush=True)


def try_values(seed: int, seconds: float, found: Found) -> None:
    """Resolve hostile values in this process for a while."""
    fuzzer, until = ValueFuzzer(seed, _ALGORITHMS), time.monotonic() + seconds
    while time.monotonic() < until:
        accepted, what, fault = fuzzer.attempt()
        found.endings["values", "accepted" if accepted else "refused"] += 1
        if fault is None:
            continue
        if fault not in found.faults:
            print(f"{fault[0]}: {fault[1]}\n    {what}", flush=True)
            about = {"kind": fault[0], "cause": fault[1], "times": 0, "command": what, "file": ""}
            found.faults[fault] = about
        found.faults[fault]["times"] += 1


def try_surfaces(seed: int, num_cases: int, seconds: float, found: Found) -> None:
    """Run `num_cases` cases of `fuzz_surfaces.py`, or as many as fit; group faults by cause."""
    commands, started = Commands(), time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-ground-") as name:
            cases = surface_cases(ground(Path(name), commands), seed)
            for number, (kind, case) in enumerate(cases):
                if number == num_cases or time.monotonic() > started + seconds:
                    break
                outcome = commands.run(case)
                if outcome.code is None:  # once more, as the machine may have been busy
                    outcome = commands.run(case)
                found.endings[kind, ending(outcome)] += 1
                found.times.append(outcome.seconds)
                for fault, cause in outcome.faults:
                    _note_surface(found, (fault, f"{kind}: {cause}"), case)
    finally:
        commands.close()


def _note_surface(found: Found, fault: tuple[str, str], case: Case) -> None:
    if fault not in found.faults:
        about = {"kind": fault[0], "cause": fault[1], "times": 0}
        found.faults[fault] = {**about, "command": case.command, "file": case.what}
        print(f"{fault[0]}: {fault[1]}\n    {case.command:.300}\n    {case.what}", flush=True)
    found.faults[fault]["times"] += 1


def main() -> None:
    """Fuzz for as long as was asked, and say what came out."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--part", choices=("both", "keys", "files", "surfaces"), default="both")
    options.add_argument("--cases", type=int, default=1000, help="of surfaces")
    args = options.parse_args()
    found = Found()
    if args.part == "surfaces":
        try_surfaces(args.seed, args.cases, 60 * args.minutes, found)
        _report(found, args.seed, args.minutes, args.json)
        raise SystemExit(bool(found.faults))
    try_values(args.seed, 60 * args.minutes * _SHARE_OF_VALUES, found)
    commands = Commands()
    chance = random.Random(f"{args.seed}/files")
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-scenes-") as name:
            stages = scenes(Path(name), commands) if args.part != "keys" else []
            until = time.monotonic() + 60 * args.minutes * (1 - _SHARE_OF_VALUES)
            for batch in hostile_keys(args.seed):
                for case in batch if args.part != "files" else batch[:1]:
                    if time.monotonic() > until:
                        break
                    if args.part != "files":
                        attempt("keys", case, commands, found)
                    if args.part != "keys":
                        attempt("files", file_case(stages, chance), commands, found)
                if time.monotonic() > until:
                    break
    finally:
        commands.close()
    _report(found, args.seed, args.minutes, args.json)
    if found.faults:
        raise SystemExit(1)


def _report(found: Found, seed: int, minutes: float, file: Path | None) -> None:
    rows = [[part, how, num] for (part, how), num in sorted(found.endings.items())]
    print(table(["part", "ending", "commands"], rows))
    times = sorted(found.times)
    middle, most = times[len(times) // 2], times[-1]
    tried = sum(found.endings.values())
    print(f"{tried} tried in {minutes:g} minutes; {len(found.faults)} causes of faults")
    print(f"seconds: {middle:.2f} in the middle, {most:.1f} at most")
    endings: dict[str, dict[str, int]] = {}
    for part, how, num in rows:
        endings.setdefault(str(part), {})[str(how)] = int(num)
    report(
        {
            "seed": seed,
            "minutes": minutes,
            "tried": tried,
            "commands": len(times),
            "endings": endings,
            "faults_by_kind": dict(Counter(kind for kind, _ in found.faults)),
            "faults": list(found.faults.values()),
            "median_s": round(middle, 3),
            "max_s": round(most, 1),
        },
        file,
    )


if __name__ == "__main__":
    main()

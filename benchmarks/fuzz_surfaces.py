"""Hostile input beside keys and bytes: adapters, templates, tokenizers, archives, run folders, API.

Each kind is a function of the ground and a `random.Random`, so a seed gives the same cases. What
must hold of all is in `fuzz_case.py`; a kind adds what must be refused, or must go on all the same.
"""

from __future__ import annotations

import importlib
import io
import json
import random
import tarfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fuzz_case import PRECIOUS, SCRIPT, Case, Content
from fuzz_files import other_value
from fuzz_ground import (
    KINDS,
    Ground,
    adapter_words,
    as_json,
    chat_words,
    fifo,
    kind,
    link,
    model_words,
)
from fuzz_keys import small_words

_OUTSIDE = f"../{PRECIOUS}"
_SMALL = small_words("grpo")


def surface_cases(ground: Ground, seed: int) -> Iterator[tuple[str, Case]]:
    """Yield cases without end; each round has every kind once, in another order."""
    for name in ("fuzz_models", "fuzz_servers"):
        importlib.import_module(name)  # which registers its kinds
    chance = random.Random(f"{seed}/surfaces")
    while True:
        names = sorted(KINDS)
        chance.shuffle(names)
        for name in names:
            yield name, KINDS[name](ground, chance)


def _odd_file(chance: random.Random) -> tuple[str, Content]:
    """Return something that is not a regular file, to put where one belongs, and its name."""
    places: tuple[tuple[str, Content], ...] = (
        ("a pipe", fifo),
        ("a link to a device", link("/dev/zero")),
        ("a link to nothing that ends", link("/proc/kmsg")),
        ("a folder", lambda path: path.mkdir()),
        ("a link to itself", lambda path: path.symlink_to(path.name)),
    )
    return chance.choice(places)


@kind("no file: adapters and models")
def _(ground: Ground, chance: random.Random) -> Case:
    what, content = _odd_file(chance)
    names = ("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "config.json")
    name = chance.choice(
        (
            *(f"m/{n}" for n in names),
            "a/adapter_model.safetensors",
            "m/model.safetensors",
            "a/adapter_config.json",
            "m/generation_config.json",
        )
    )
    return Case(adapter_words(), ground.adapter, {name: content}, f"{name} is {what}")


@kind("no file: rows")
def _(ground: Ground, chance: random.Random) -> Case:
    what, content = _odd_file(chance)
    words = model_words() if chance.randrange(2) else chat_words()
    name = "chat.jsonl" if "task.path=chat.jsonl" in words else "d.jsonl"
    return Case(words, ground.model, {name: content}, f"{name} is {what}", must_refuse=True)


@kind("no file: rows at a device")
def _(ground: Ground, chance: random.Random) -> Case:
    path = chance.choice(("/proc/kmsg", "/dev/zero", "/dev/random", "/dev/stdin", "/proc/self/mem"))
    return Case(model_words(f"task.path={path}"), ground.model, what=path, must_refuse=True)


_RUN_FILES = (
    "summary.json",
    "plan.json",
    "groups.json",
    "scale.json",
    "metrics.jsonl",
    "run.json",
    "events.jsonl",
    "ledger.jsonl",
    "config.yaml",
    "trace.json",
    "tags.json",
    "graph.svg",
)


@kind("no file: listed runs")
def _(ground: Ground, chance: random.Random) -> Case:
    what, content = _odd_file(chance)
    name = f"runs/two/{chance.choice(_RUN_FILES)}"
    words = chance.choice((("list",), ("list", "seed=0"), ("list", "sort=seed", "limit=5")))
    return Case(
        ("runs", *words), ground.runs, {name: content}, f"{name} is {what}", must_succeed=True
    )


@kind("no file: shown, compared and exported runs")
def _(ground: Ground, chance: random.Random) -> Case:
    what, content = _odd_file(chance)
    name = f"runs/two/{chance.choice(_RUN_FILES)}"
    words = chance.choice(
        (("show", "two"), ("compare", "one", "two"), ("diff", "one", "two"), ("export", "two", "t"))
    )
    return Case(("runs", *words), ground.runs, {name: content}, f"{name} is {what}")


@kind("no file: resumed runs")
def _(ground: Ground, chance: random.Random) -> Case:
    what, content = _odd_file(chance)
    name = f"runs/stopped/{chance.choice(_RUN_FILES)}"
    return Case(("run", "resume=runs/stopped"), ground.runs, {name: content}, f"{name} is {what}")


@kind("no file: a token of Prometheus")
def _(ground: Ground, chance: random.Random) -> Case:
    what, content = _odd_file(chance)
    words = model_words("tracker=prometheus", "+tracker.options.token_file=token")
    return Case(words, ground.model, {"token": content}, f"the token is {what}", must_refuse=True)


@kind("links: what a run writes")
def _(ground: Ground, chance: random.Random) -> Case:
    words, name = chance.choice(
        (
            (("run", "resume=runs/stopped"), "runs/stopped/.lock"),
            (("runs", "export", "two", "a.tar"), "runs/two/.lock"),
            (("runs", "export", "two", "a.tar"), ".a.tar.new"),
            (("runs", "delete", "two", "sure=true"), "runs/two/.lock"),
            (("run", "resume=runs/stopped"), "runs/stopped/metrics.jsonl"),
            (("run", "resume=runs/stopped"), "runs/stopped/events.jsonl"),
            (("run", "resume=runs/stopped"), "runs/stopped/ledger.jsonl"),
            (("run", "resume=runs/stopped"), "runs/stopped/trace.json"),
        )
    )
    up = "../" * name.count("/")
    target = f"{up}{_OUTSIDE}"
    return Case(words, ground.runs, {name: link(target)}, f"{name} -> {target}")


@kind("links: a run that is a link")
def _(ground: Ground, chance: random.Random) -> Case:
    name = chance.choice(("linked", "'*'"))
    words = ("runs", "delete", name.strip("'"), "sure=true")
    kept = {"runs/linked": link("../elsewhere")}
    files: dict[str, Content] = {"elsewhere/run.json": _about(ground), **kept}
    return Case(words, ground.runs, files, "runs/linked -> ../elsewhere", must_refuse=True)


def _about(ground: Ground) -> bytes:
    return (ground.runs / "runs" / "two" / "run.json").read_bytes()


def _changed(ground: Ground, name: str, chance: random.Random, values: Sequence[Any]) -> Content:
    """Return a JSON file of a run, replaced by another value or with one value changed."""
    if values and chance.randrange(2):
        return as_json(chance.choice(values))
    data = json.loads((ground.runs / "runs" / "two" / name).read_text())
    other_value(data, chance)
    return as_json(data)


@kind("damaged run: run.json beside good runs")
def _(ground: Ground, chance: random.Random) -> Case:
    data = json.loads(_about(ground))
    data |= chance.choice(
        (
            {"created": "2026-11-26T10:00:00"},
            {"created": 5},
            {"seed": float("inf")},
            {"seed": []},
            {"code": {"package": "1", "commit": 5, "dirty": False}},
            {"code": []},
            {"name": None},
            {"name": "\ud800"},
            {"config": {"algorithm": 3}},
            {"environment": 3},
        )
    )
    words = chance.choice(
        (("list",), ("list", "sort=seed"), ("list", "show=code"), ("list", "seed=0"))
    )
    files: dict[str, Content] = {"runs/two/run.json": as_json(data)}
    return Case(("runs", *words), ground.runs, files, "run.json changed", must_succeed=True)


@kind("damaged run: summary.json beside good runs")
def _(ground: Ground, chance: random.Random) -> Case:
    values = ([1], "x", 3, None, {}, {"num_steps": "x"}, {"accuracy_after_rl": "high"}, [[]])
    content = _changed(ground, "summary.json", chance, values)
    words = chance.choice(
        (("list",), ("list", "sort=num_steps"), ("list", "show=num_steps,accuracy_after_rl"))
    )
    files = {"runs/two/summary.json": content}
    return Case(("runs", *words), ground.runs, files, "summary.json changed", must_succeed=True)


@kind("damaged run: shown, plotted and compared")
def _(ground: Ground, chance: random.Random) -> Case:
    name = chance.choice(("run.json", "summary.json", "plan.json", "groups.json"))
    content = _changed(ground, name, chance, ([1], "x", 3, None))
    words = chance.choice(
        (
            ("show", "two"),
            ("diff", "one", "two"),
            ("compare", "one", "two"),
            ("plot", "one", "two", "metric=step_s", "file=p.svg"),
            ("reproduce", "two"),
        )
    )
    return Case(("runs", *words), ground.runs, {f"runs/two/{name}": content}, f"{name} changed")


@kind("damaged run: metrics")
def _(ground: Ground, chance: random.Random) -> Case:
    lines = (ground.runs / "runs" / "two" / "metrics.jsonl").read_text().splitlines()
    data = json.loads(lines[-1])
    name = chance.choice(sorted(data))
    data[name] = chance.choice(("x", None, [], {}, True, 10**400, "NaN", "\ud800"))
    lines[-1] = json.dumps(data)
    files: dict[str, Content] = {"runs/two/metrics.jsonl": "\n".join([*lines, ""]).encode()}
    words = chance.choice((("show", "two"), ("plot", "two", f"metric={name}", "file=p.svg")))
    return Case(("runs", *words), ground.runs, files, f"{name} is {data[name]!r:.30}")


@kind("damaged run: what is scaled")
def _(ground: Ground, chance: random.Random) -> Case:
    name = chance.choice(("groups.json", "scale.json"))
    good: Content = as_json({"rollout": {"most": 4, "why_not": ""}})
    odd = (
        [1],
        None,
        "x",
        {"rollout": "x"},
        {"rollout": 3 if name == "groups.json" else -3},
        {"all": [1]},
        {"rollout": {"most": "x"}},
        {"rollout": {"most": 4, "nope": 1}},
        {"rollout": {"most": None, "why_not": 5}},
    )
    bad = chance.choice([*map(as_json, odd), b"{", b"[" * 100_000, b"\xff"])
    files: dict[str, Content] = {"runs/stopped/groups.json": good, f"runs/stopped/{name}": bad}
    words = ("scale", "run=runs/stopped", "rollout=2")
    return Case(words, ground.runs, files, f"{name} is {bad!r:.40}", must_refuse=True)


@kind("damaged run: resumed")
def _(ground: Ground, chance: random.Random) -> Case:
    source = ground.runs / "runs" / "one"
    summary = json.loads((source / "summary.json").read_text())
    other_value(summary, chance)
    if chance.randrange(2):
        summary.pop("num_steps", None)
    content = as_json(chance.choice((summary, [1], "x", None)))
    return Case(
        ("run", "resume=runs/one", "algorithm.num_steps=3"),
        ground.runs,
        {"runs/one/summary.json": content},
        f"summary.json is {content!r:.40}",
    )


def _archive(
    ground: Ground, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]
) -> bytes:
    """Return the ground's archive with its members changed."""
    with tarfile.open(ground.runs / "one.tar") as tar:
        members = [(m, (tar.extractfile(m) or io.BytesIO()).read()) for m in tar.getmembers()]
    change(members)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for header, content in members:
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    return made.getvalue()


def _imported(ground: Ground, what: str, content: bytes) -> Case:
    words = ("runs", "import", "b.tar", "runs=other")
    return Case(words, ground.runs, {"b.tar": content}, what, must_refuse=True)


@kind("archive: a sparse member")
def _(ground: Ground, chance: random.Random) -> Case:
    size = chance.choice((400 << 20, 1 << 30))
    found = (ground.runs / "one.tar").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(found)) as tar:
        manifest = json.loads((tar.extractfile(tar.getmembers()[0]) or io.BytesIO()).read())
        names = [m["name"] for m in manifest["files"]]
    for one in manifest["files"]:
        if one["name"] == names[0]:
            one["size_bytes"] = size

    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        members[0] = (members[0][0], as_json(manifest))
        header = members[1][0]
        header.pax_headers = {
            "GNU.sparse.major": "0",
            "GNU.sparse.minor": "1",
            "GNU.sparse.name": header.name,
            "GNU.sparse.size": str(size),
            "GNU.sparse.numblocks": "1",
            "GNU.sparse.map": f"{size - 512},512",
        }
        members[1] = (header, bytes(512))

    return _imported(ground, f"a member of 512 bytes as {size}", _archive(ground, change))


@kind("archive: its manifest")
def _(ground: Ground, chance: random.Random) -> Case:
    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        manifest = json.loads(members[0][1])
        action = chance.randrange(4)
        if action == 0:
            manifest["run"] = chance.choice(("\ud800", 5, None, "", "../x", "a\0b", "x" * 300))
        elif action == 1:
            manifest["files"][0]["name"] = chance.choice((5, None, "\ud800", "../x", "/etc/x"))
        elif action == 2:
            manifest["files"] = chance.choice(([], 5, [5], [{}], None))
        else:
            manifest = chance.choice(([], 5, None, {}, {"format": 10**30}))
        members[0] = (members[0][0], as_json(manifest))

    return _imported(ground, "its manifest changed", _archive(ground, change))


@kind("archive: its members")
def _(ground: Ground, chance: random.Random) -> Case:
    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        at = chance.randrange(1, len(members))
        header, content = members[at]
        action = chance.randrange(5)
        if action == 0:
            header.type, header.linkname = (
                chance.choice((tarfile.SYMTYPE, tarfile.LNKTYPE)),
                "/etc/x",
            )
        elif action == 1:
            header.name = chance.choice(
                (
                    f"../{PRECIOUS}",
                    "/tmp/x",
                    "a\ud800".encode("utf-8", "surrogatepass").decode("latin1"),
                )
            )
        elif action == 2:
            header.pax_headers = {f"GNU.sparse.{n}": "x" for n in ("major", "minor", "map", "size")}
        elif action == 3:
            header.type = chance.choice((tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE))
        else:
            content += b"x"
        members[at] = (header, content)

    return _imported(ground, "a member changed", _archive(ground, change))


@kind("archive: bytes")
def _(ground: Ground, chance: random.Random) -> Case:
    content = bytearray((ground.runs / "one.tar").read_bytes())
    for _ in range(chance.choice((1, 3))):
        content[chance.randrange(min(len(content), 4096))] ^= 1 << chance.randrange(8)
    words = ("runs", "import", "b.tar", "runs=other")
    return Case(words, ground.runs, {"b.tar": bytes(content)}, "bits of headers flipped")


def _bomb(chance: random.Random, levels: int = 9) -> str:
    width = chance.choice((8, 10))
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


@kind("YAML: aliases and size")
def _(ground: Ground, chance: random.Random) -> Case:
    what = chance.choice(("value", "config", "top", "comments", "deep", "binary", "cycle"))
    bomb = _bomb(chance)
    inner = "".join(f"    {line}\n" for line in bomb.splitlines())
    good = "kind: chain_sum\n"
    content = {
        "value": f"{good}{bomb}num_train: *a8\n",
        "config": f"kind: os:path\nconfig:\n{inner}",
        "top": bomb + good,
        "comments": good + ("#" * 99 + "\n") * 200_000,
        "deep": good + "num_train: " + "[" * 50_000,
        "binary": good + "num_train: !!binary aGVsbG8=\n",
        "cycle": good + "config: &c {c: *c}\n",
    }[what]
    files: dict[str, Content] = {"conf/task/mine.yaml": content.encode()}
    words = [w for w in _SMALL if not w.startswith("task.")]
    return Case(
        ("run", *words, "task=mine", "--config-dir", "conf"),
        None,
        files,
        f"YAML: {what}",
        must_refuse=True,
    )


@kind("YAML: a run's own configuration")
def _(ground: Ground, chance: random.Random) -> Case:
    source = (ground.runs / "runs" / "stopped" / "config.yaml").read_text()
    content = chance.choice(
        (
            _bomb(chance) + source,
            source + "#" * (20 << 20),
            source + "x: &c [*c]\n",
            source + "y: !!binary aGk=\n",
            "[" * 100_000,
        )
    )
    files: dict[str, Content] = {"runs/stopped/config.yaml": content.encode()}
    return Case(("run", "resume=runs/stopped"), ground.runs, files, "config.yaml of a run")


@kind("sweep: words")
def _(ground: Ground, chance: random.Random) -> Case:
    words = chance.choice(
        (
            ("seed=range(0,100000000000)",),
            ("seed=range(0,5,0)",),
            ("seed=range(5,0)",),
            ("seed=0,1", "sweep.metric=nope"),
            ("seed=0,1", "sweep.metric="),
            ("seed=0,1", "sweep.trials=0"),
            ("seed=0,1", "sweep.trials=-1"),
            ("seed=0,1", f"sweep.seed={10**50}", "sweep.trials=1"),
            ("algorithm.optimizer.lr=interval(1,0)", "sweep.trials=1"),
            ("algorithm.optimizer.lr=interval(nan,1)", "sweep.trials=1"),
            ("algorithm.optimizer.lr=tag(log,interval(-1,1))", "sweep.trials=1"),
            ("seed=0,1", "sweep.minutes=nan", "sweep.trials=1"),
            ("seed=0,1", "sweep.direction=sideways"),
            ("seed=0,1", "sweep.name=../x", "sweep.trials=1"),
            (
                f"seed={','.join(map(str, range(5000)))}",
                f"algorithm.per_step.prompts={','.join(map(str, range(1, 5000)))}",
            ),
        )
    )
    case = ("run", "--multirun", *_SMALL, *words)
    return Case(case, None, what=f"{words!r:.80}", num_hostile=len(words), must_refuse=True)


_API = """\
import penstock
{code}
"""


@kind("API: values that nobody would give")
def _(ground: Ground, chance: random.Random) -> Case:
    small = ", ".join(map(repr, _SMALL))
    code = chance.choice(
        (
            "penstock.open_run(None)",
            "penstock.open_run(5)",
            "penstock.open_run('a\\0b')",
            "penstock.open_run('runs/one').stage(None)",
            "penstock.open_run('runs/one').stage('../..')",
            f"penstock.run({small}, seed=10**5000)",
            f"penstock.run({small}, runs='a\\0b')",
            f"penstock.run({small}, seed=float('nan'))",
            f"penstock.run({small}, seed=object())",
            f"penstock.run({small}, None)",
            f"penstock.run({small}, 5)",
            f"t = {{}}; t['config'] = t; penstock.run({small}, task=t)",
            f"t = []\nfor _ in range(5000): t = [t]\npenstock.run({small}, task={{'config': t}})",
            f"penstock.run({small}, **{{'algorithm.num_steps': 'x'}})",
            f"penstock.run({small}, **{{'': 1}})",
            f"penstock.run({small}, model={{'architecture': {{1: 2}}}})",
            "penstock.plan(None)",
            "penstock.plan('model=tiny', seed=b'x')",
        )
    )
    return Case((SCRIPT, _API.format(code=code)), ground.runs, what=code[-100:], must_refuse=True)


_GONE = """\
import shutil
CALLS = []
def varied(prompt, response, answer):
    CALLS.append(1)
    if len(CALLS) == 20:
        shutil.rmtree("runs")
    return float(sum(map(ord, response)) % 7)
"""


@kind("a run whose folder is removed")
def _(ground: Ground, chance: random.Random) -> Case:
    steps = chance.choice((10, 20, 40))
    words = model_words(f"algorithm.num_steps={steps}", "checkpoint_every=1")
    files: dict[str, Content] = {"reward.py": _GONE.encode()}
    what, left = "runs/ is removed in a step", ("runs/*/run.json",)
    return Case(words, ground.model, files, what, must_fail=True, absent=left)


@kind("commands without sense")
def _(ground: Ground, chance: random.Random) -> Case:
    words = chance.choice(
        (
            ("runs", "show", "a\ud800"),
            ("runs", "show", "runs"),
            ("runs", "plot", "one", "metric=nope", "file=p.svg"),
            ("runs", "plot", "one", "metric=step_s", "file=p.exe"),
            ("runs", "compare", "one"),
            ("runs", "regress", "one", "reference=/dev/zero"),
            ("runs", "import", "/dev/zero"),
            ("runs", "import", "runs"),
            ("samples", "run=runs/none"),
            ("samples", "run=runs/one", "step=x"),
            ("eval", "run=runs/one/models"),
            ("eval", "model=/dev/zero"),
            ("export", "run=/proc"),
            ("scale", "run=/dev/null", "a=1"),
            ("watch", "nope"),
            ("watch", "port=99999"),
        )
    )
    return Case(words, ground.runs, what=f"{words}", must_refuse=True)

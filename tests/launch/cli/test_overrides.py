"""The words of a command line: escapes, folders of one's own configurations, sweeps over them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.errors import ConfigError
from penstock.launch.cli.hydra_app import (
    command_line,
    compose,
    composed,
    hydra_app,
    jobs_of,
    literal,
    quoted,
    read_override,
    with_escapes,
)

from ...docs.pages import ROOT, commands


def value_of(word: str) -> Any:
    return read_override(with_escapes(word)).value()


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (r"a='x\ny'", "x\ny"),
        (r'a="x\ty\rz"', "x\ty\rz"),
        (r"a=['\n\n','###']", ["\n\n", "###"]),
        (r"a=[\n\n,b]", ["\n\n", "b"]),
        (r"a=\n", "\n"),
        (r"a={b:'\n',c:[{d:\t}]}", {"b": "\n", "c": [{"d": "\t"}]}),
        (r"a='x\\ny'", r"x\ny"),
        (r"a=x\\ny", r"x\ny"),
        (r"a='x\\\ny'", "x\\\ny"),
        (r"a='(\d+)\.\s*\w'", r"(\d+)\.\s*\w"),
        (r"a='\b\\.\(\x41\u0041\0'", r"\b\\.\(\x41\u0041\0"),
        (r"a='it\'s\n'", "it's\n"),
        (r"a='C:\\new\\text'", r"C:\new\text"),
        ("a='x\ny'", "x\ny"),
        (r"a='\\'", "\\"),
        (r"a=x\,y", "x,y"),
        ("a=1e-3", 0.001),
    ],
)
def test_an_escape_is_the_character_that_it_names(word: str, value: Any) -> None:
    assert value_of(word) == value


PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\x00", exclude_categories=["Cs"]))
SLASHES = st.text(st.sampled_from("\\\\\\nrt'\"d \n"))


@pytest.mark.slow
@given(text=PLAIN.filter(lambda text: "${" not in text) | SLASHES)
def test_a_text_of_python_stays_as_it_is(text: str) -> None:
    assert value_of(f"a={literal(text)}") == text
    assert read_override(f"a={quoted(text)}").value() == text
    assert value_of(f"a=[{literal(text)},{{b:{literal(text)}}}]") == [text, {"b": text}]


@given(text=st.text(st.sampled_from("abx019.-_/%*@?|+ ")))
def test_a_word_without_backslashes_stays_as_it_is(text: str) -> None:
    for word in (f"a={text}", f"a='{text}'", f"a=[{text}]", f"a={text},{text}"):
        assert with_escapes(word) == word


def documented(page: str, key: str) -> list[str]:
    """Return the words of the page's command that sets a key."""
    found = [one.words for one in commands(ROOT / page) if any(f"{key}=" in w for w in one.words)]
    return list(found[0][2:])


def test_the_documented_stop_string_is_two_line_feeds() -> None:
    made = compose("run", documented("docs/configuration.md", "sampling.stop"))
    assert made["algorithm"]["cfg"]["sampling"]["stop"] == ["\n\n"]


def test_the_documented_prompt_template_has_a_line_feed() -> None:
    made = compose("run", documented("docs/data.md", "task.prompt_template"))
    assert made["task"]["prompt_template"] == "{question}\nWrite [words] to search."


TEXTS = {
    "task.prompt_template": r"'{question}\nWrite'",
    "task.chat_template": r"'{{ messages }}\n'",
    "model.tokenizer.alphabet": r"'ab\n'",
    "algorithm.roles.reward.options.template": r"'{prompt}\n\n{response}'",
    "algorithm.roles.agent.options.separator": r"\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("key", TEXTS)
def test_escapes_mean_the_same_in_every_key_and_in_sweeps(key: str) -> None:
    text = TEXTS[key].strip("'").replace(r"\n", "\n")
    word = f"{key}={TEXTS[key]}"
    (parts,) = [key.split(".")]
    for made in (
        compose("run", ["+model.tokenizer={}", word][key[:7] != "model.t" :]),
        *(composed("run", job) for job in jobs_of(command_line("run", ["seed=0,1", word, "-m"]))),
        *(composed("run", job) for job in jobs_of(command_line("run", [f"{word},'x'", "-m"]))[:1]),
    ):
        found: Any = made
        for part in parts:
            found = found[part]
        assert found == text


def test_a_varied_text_of_a_search_has_its_escapes() -> None:
    sweep = pytest.importorskip("penstock.launch.cli.sweep")
    read, _, _ = sweep._read(["-m", "sweep.seed=1", r"a='\n',x\ty,'\\n'", r"b=['\n']"])
    (key,) = read.keys
    found = [OverridesParser.create().parse_override(f"a={one}").value() for one in key.choices]
    assert found == ["\n", "x\ty", r"\n"]
    assert [read_override(word).value() for word in read.fixed] == [["\n"]]


OWN = {
    "conf/experiment/small.yaml": "# @package _global_\nalgorithm: {num_steps: 3}\n",
    "conf/algorithm/mine.yaml": "defaults: [sft, _self_]\nnum_steps: 4\n",
    "conf/model/mini.yaml": "defaults: [tiny, _self_]\ninit_seed: 5\n",
    "more/task/sums.yaml": "defaults: [chain_sum, _self_]\nnum_held_out: 6\n",
    "more/cluster/lab.yaml": "defaults: [cpu, _self_]\nnum_nodes: 7\n",
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working directory with two folders of configurations."""
    for name, text in OWN.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


CONF: Sequence[Sequence[str]] = (
    ("--config-dir", "conf"),
    ("--config-dir=conf",),
    ("-cd", "conf"),
    ("hydra.searchpath=[conf]",),
    ("hydra.searchpath=['file://conf']",),
)


@pytest.mark.slow
@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("folder", CONF, ids=" ".join)
def test_own_configurations_in_a_run(folder: Sequence[str]) -> None:
    made = compose("run", [*folder, "experiment=small", "model=mini"])
    assert (made["algorithm"]["num_steps"], made["model"]["init_seed"]) == (3, 5)


@pytest.mark.slow
@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("folder", [CONF[0], CONF[3]], ids=" ".join)
def test_own_configurations_in_a_sweep(folder: Sequence[str]) -> None:
    found: list[tuple[int, int, int]] = []

    def noted(made: dict[str, Any]) -> None:
        found.append((made["algorithm"]["num_steps"], made["model"]["init_seed"], made["seed"]))

    hydra_app("run", ["algorithm=mine,sft", "model=mini", "seed=1", *folder, "--multirun"], noted)
    assert found == [(4, 5, 1), (150, 5, 1)]


@pytest.mark.slow
@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("command", ["run", "dry_run", "graph", "eval", "plan"])
@pytest.mark.parametrize("more", [["--config-dir", "more"], ["hydra.searchpath=[more]"]], ids=str)
def test_every_folder_counts_in_every_command(command: str, more: list[str]) -> None:
    words = ["--config-dir", "conf", *more, "algorithm=mine", "task=sums", "model=mini"]
    made = compose(command, words if command != "plan" else [*words[:-2], "cluster=lab"])
    assert made["algorithm"]["num_steps"] == 4
    if command == "plan":
        assert made["cluster"]["num_nodes"] == 7
    else:
        assert made["task"]["num_held_out"] == 6
    line = command_line(command, [*words, "seed=0,1", "-m"])
    assert len(jobs_of(line)) == 2


@pytest.mark.usefixtures("own")
def test_an_experiment_chooses_an_own_task(own: Path) -> None:
    text = "# @package _global_\ndefaults:\n  - override /task: mine\nalgorithm:\n  num_steps: 20\n"
    (own / "conf/experiment/small.yaml").write_text(text)
    (own / "conf/task").mkdir()
    (own / "conf/task/mine.yaml").write_text("defaults: [file, _self_]\npath: rows.jsonl\n")
    page = "penstock run --config-dir conf experiment=small --multirun seed=0,1"
    for job in jobs_of(command_line("run", page.split()[2:])):
        made = composed("run", job)
        assert (made["task"]["path"], made["algorithm"]["num_steps"]) == ("rows.jsonl", 20)


@pytest.mark.usefixtures("own")
def test_an_experiment_without_its_first_line_is_refused(own: Path) -> None:
    (own / "conf/experiment/small.yaml").write_text("algorithm: {num_steps: 3}\n")
    with pytest.raises(ConfigError, match="let the file begin with the line: # @package _global_"):
        compose("run", ["--config-dir", "conf", "experiment=small"])


@pytest.mark.usefixtures("own")
def test_own_options_are_among_those_of_a_pattern() -> None:
    jobs = jobs_of(command_line("run", ["-cd", "conf", "-m", "model=glob(mi*)"]))
    assert [job[-1] for job in jobs] == ["model=mini", "model=mixtral-8x7b"]


@pytest.mark.usefixtures("own")
def test_a_search_has_own_configurations() -> None:
    sweep = pytest.importorskip("penstock.launch.cli.sweep")
    words = ["--config-dir", "conf", "-m", "sweep.seed=1", "experiment=small", "seed=0,1"]
    read, _, _ = sweep._read(words)
    assert composed("run", [*read.fixed, "seed=1"])["algorithm"]["num_steps"] == 3


REFUSED = {
    "--seed=1": (
        "penstock run: unrecognized arguments: --seed=1; keys have no dashes: key=value\n"
    ),
    "task=cartpole": (
        "'algorithm.cfg.sampling.max_new_tokens' takes its value from another key, which the "
        "chosen options lack: Interpolation key 'task.max_response_tokens' not found\n    choose "
    ),
    "--config-dir nope": "--config-dir: there is no folder 'nope'",
    "--config-path conf": (
        "--config-path would replace penstock's own configurations\n    add yours to them: "
        "--config-dir conf"
    ),
    "hydra.searchpath=3": (
        "'hydra.searchpath': expected a list of folders, got '3'\n    "
        "hydra.searchpath=[FOLDER], or --config-dir FOLDER"
    ),
    "-m seed=range(0,100000000000)": (
        "'seed=range(0,100000000000)': expected a range of at most 10000 values"
    ),
    "-m seed=range(0,1e300)": "'seed=range(0,1e300)': expected a range of at most 10000 values",
    "-m seed=range(0,5,0)": "'seed=range(0,5,0)' cannot be read: the step of a range is 0",
    "-m seed=range(5,0)": (
        "--multirun: the values make 0 combinations; expected 1 to 10000\n    give fewer values, "
        "or let Optuna choose among them: sweep.trials=20"
    ),
    "-m seed=range(200) max_lag=range(200)": (
        "--multirun: the values make 40000 combinations; expected 1 to 10000\n    give fewer "
        "values, or let Optuna choose among them: sweep.trials=20"
    ),
    "-m seed=glob(*)": "'seed=glob(*)' matches no option of a group\n    groups are: algorithm, ",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_composed_is_refused_at_once(words: str) -> None:
    def never(_: object) -> None:
        raise AssertionError("nothing is run")

    with pytest.raises(ConfigError) as raised:
        hydra_app("run", words.split(), never)
    assert str(raised.value).startswith(REFUSED[words])

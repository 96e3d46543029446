"""What is told of processes that died, and where a stage's mirror is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.dataflow.runtime.executor import Recovered, Restart
from penstock.launch.stages.run_stage import mirror_of
from penstock.launch.stages.stage_result import Deaths

from ..run_dir.drafts import written

SAID = "rank 1 of group 'main' died: killed by signal 9"


def test_each_death_is_told_and_all_are_counted() -> None:
    told: list[tuple[str, int, str]] = []

    def tell(kind: str, step: int, text: str, fields: dict[str, Any]) -> None:
        assert text == f"{fields['seen']}; {fields['means']}"
        told.append((kind, step, text))

    deaths = Deaths()
    deaths.note(Recovered(SAID, 0, 1, "start", 0.5, 1))
    deaths.tell = tell
    deaths.note(Recovered(f"{SAID}\nand more", 12, 15, "checkpoint", 4.2, 2))
    deaths.num_complete = 17
    deaths.note(Restart("rollout", 30.0, (1,), held_up_s=3.0))
    assert told == [
        (
            "recovered",
            12,
            f"{SAID}; the run goes on from step 12 of its checkpoint, 3 steps are computed again "
            "(pause 4.2 s)",
        ),
        (
            "restarted",
            17,
            "a process of group 'rollout' died; it was started again beside the run, which took "
            "30.0 s",
        ),
    ]
    assert deaths.summary == {
        "num_recoveries": 2,
        "num_restarts": 1,
        "longest_pause_s": 4.2,
        "steps_recomputed": 4,
    }
    assert deaths.text == (
        "processes died: the run went back 2 times and computed 4 steps again, groups were started "
        "again beside it 1 times; the longest pause was 4.2 s"
    )


def test_nothing_is_said_if_nobody_died() -> None:
    assert Deaths().text == ""
    assert set(Deaths().summary.values()) == {0}


def test_a_mirror_begins_empty_and_leaves_nothing(tmp_path: Path) -> None:
    with mirror_of(tmp_path, mirrored=False) as none:
        assert none is None
    with mirror_of(tmp_path, mirrored=True) as mirror:
        assert mirror is not None
        place = mirror.folder.parent
        with written(mirror, 3) as folder:
            (folder / "state").write_text("it")
        with mirror_of(tmp_path, mirrored=True) as other:  # after a process that was killed
            assert other is not None
            assert (other.folder, other.latest()) == (mirror.folder, None)
    assert not place.exists()

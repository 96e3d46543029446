"""Two real processes train as one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from forked_ranks import run_groups
from penstock.workers.training.checkpoint_files import open_state, read_state_json, read_whole
from penstock.workers.training.data_parallel import RankGroup
from torch import Tensor

RANK = Path(__file__).parents[1] / "data_parallel_rank.py"


def run(folder: Path, split: int) -> list[list[dict[str, Tensor]]]:
    """What one rank found, and what each of two did."""
    run_groups(folder, RANK, (1, ["split=0"]), (2, [f"split={split}"]))
    return [
        [safetensors.torch.load_file(folder / f"{size}-{rank}.safetensors") for rank in range(size)]
        for size in (1, 2)
    ]


def whole_state(folder: Path) -> dict[str, Tensor]:
    """Whole tensors of a saved state, whoever wrote which part of it."""
    state = read_state_json(folder)
    return {
        f"{kind}/{name}": tensor
        for kind in ("weights", "optimizer")
        for name, tensor in read_whole(open_state(folder, state, kind)).items()
    }


@pytest.mark.slow
# With 6 the second rank holds no rows at all.
@pytest.mark.parametrize("split", [pytest.param(2, marks=pytest.mark.nightly), 6])
def test_two_ranks_train_as_one(tmp_path: Path, split: int):
    (alone,), ranks = run(tmp_path, split)
    tokens = torch.cat([rank.pop("tokens") for rank in ranks])
    assert torch.equal(tokens, alone.pop("tokens"))
    assert alone["metric/first/replaced"] == 0
    assert alone["metric/second/replaced"] == 1
    weights = {name for name in alone if not name.startswith("metric/")}
    for rank in ranks:
        assert rank.keys() == alone.keys()
        for name, value in alone.items():
            # Adam divides a gradient by its own size, and so what rounding left of a small one.
            torch.testing.assert_close(rank[name], value, atol=3e-5, rtol=1e-5)
    for name in weights:
        assert torch.equal(ranks[0][name], ranks[1][name]), name
    states = [whole_state(tmp_path / f"state-{num_ranks}") for num_ranks in (1, 2)]
    assert len(list((tmp_path / "state-2").iterdir())) == 5, "two files of each rank, and one"
    assert states[0].keys() == states[1].keys()
    for name in weights:
        if name.startswith("actor/"):
            assert torch.equal(states[1][f"weights/{name[6:]}"], ranks[0][name]), name
    said = [(tmp_path / f"2-{rank}.txt").read_text() for rank in range(2)]
    assert said[0] == said[1] == (tmp_path / "1-0.txt").read_text()
    assert "not finite: column 'advantage' of its batch; " in said[0]


def test_one_rank_talks_to_nobody():
    group = RankGroup(0, 1, torch.device("cpu"))
    assert group.alone
    assert group.sum_(torch.tensor([3.0])).tolist() == [3.0]
    assert [part.tolist() for part in group.gather(torch.tensor([4, 5]))] == [[4, 5]]
    assert group.union(["b", "a"]) == ["a", "b"]

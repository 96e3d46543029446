"""One rank performing work by hand: chunked and whole calls agree, and wrong outputs are named."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.dataflow.graph.axes import Axis, GroupId, f32, i64
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.role import Loss, Metric, Role, Streamed, call
from penstock.dataflow.graph.tracer import build, op
from penstock.dataflow.runtime.call_context import call_key
from penstock.dataflow.runtime.columns import (
    Packed,
    Part,
    concatenate,
    cut_table,
    even_cuts,
    lengths_of,
    pack,
    unpack,
)
from penstock.dataflow.runtime.host import Host
from penstock.dataflow.runtime.messages import NextAnswer, NodeCall, RankWork, Result, work
from torch import Tensor

ROW = Axis("row")
STEP = Axis("step", ragged=True)
Ids = Annotated[Tensor, i64(ROW, STEP)]
Key = Annotated[Tensor, i64(ROW), GroupId()]
Values = Annotated[Tensor, f32(ROW, STEP)]
Score = Annotated[Tensor, f32(ROW)]
Scalar = Annotated[Tensor, f32()]


@dataclass(frozen=True, kw_only=True)
class Data:
    key: Key
    ids: Ids


@dataclass(frozen=True, kw_only=True)
class Pair:
    values: Values
    score: Score


@dataclass(frozen=True, kw_only=True)
class Batch:
    ids: Ids
    values: Values


@dataclass(frozen=True)
class Metrics:
    metrics: dict[str, Metric]


class AnyLoss(Loss[Batch, Tensor]):
    """Never called: the model below trains by itself."""


class Model(Role):
    @call("rollout")
    def extend(self, key: Key, ids: Ids, times: int) -> Data:
        raise NotImplementedError

    @call("forward")
    def value(self, ids: Ids) -> Values:
        raise NotImplementedError

    @call("train")
    def train(self, loss: Loss[Batch, Tensor], batch: Batch, *, rate: float = 1.0) -> Metrics:
        raise NotImplementedError


class Doubler(Model):
    """Doubles ids, and is trained to do nothing else."""

    def __init__(self) -> None:
        self.metrics: dict[str, Metric] = {}
        self.weight = torch.tensor(2.0)
        self.trained_on: Batch | None = None

    def extend(self, key: Key, ids: Ids, times: int) -> Data:
        keys = key.repeat_interleave(times)
        ends = torch.full((len(keys), 1), 9) + call_key("model", "extend").step
        rows = [row[row >= 0] for row in ids.repeat_interleave(times, dim=0)]
        grown = [torch.cat([row, end]) for row, end in zip(rows, ends, strict=True)]
        padded = torch.nn.utils.rnn.pad_sequence(grown, batch_first=True, padding_value=-1)
        return Data(key=keys, ids=padded)

    def value(self, ids: Ids) -> Values:
        self.metrics["rows"] = Metric.mean(float(len(ids)), 1.0)
        return torch.where(ids >= 0, self.weight * ids, 0.0)

    def train(self, loss: Loss[Batch, Tensor], batch: Batch, *, rate: float = 1.0) -> Metrics:
        self.trained_on = batch
        self.metrics["from_worker"] = Metric.mean(1.0, 1.0)
        return Metrics({"loss": Metric.mean(rate, 1.0)})

    def export_weights(self) -> Mapping[str, Tensor]:
        return {"weight": self.weight.clone()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self.weight = weights["weight"]

    def save_state(self, folder: Path) -> None:
        (folder / "weight.txt").write_text(str(self.weight.item()))

    def load_state(self, folder: Path) -> None:
        self.weight = torch.tensor(float((folder / "weight.txt").read_text()))


@op(scope="row")
def pair(values: Values, ids: Ids) -> Pair:
    return Pair(values=values + 1, score=values.sum(1))


@op(scope="batch")
def center(values: Values) -> Values:
    return values - values.mean()


@op(scope="batch")
def total(score: Score) -> Scalar:
    return score.sum()


@op(scope="row")
def shift(score: Score, by: Scalar) -> Score:
    return score + by


@op(scope="batch", makes_rows=True)
def drop_first(data: Data) -> Data:
    return Data(key=data.key[1:], ids=data.ids[1:])


def whole_step(data: Data, model: Model) -> object:
    value = model.value(data.ids)
    both = pair(value, data.ids)
    shifted = shift(both.score, total(both.score))
    batch = Batch(ids=data.ids, values=center(both.values))
    return model.train(AnyLoss(), batch, rate=0.5), shifted, drop_first(data)


def rollout_step(data: Data, model: Model) -> object:
    return model.extend(data.key, data.ids, 2)


GRAPH = build(whole_step)


def data_part(keys: list[int], rows: list[list[int]]) -> Part:
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
    return (Packed(torch.tensor(keys)), pack("ids", ids, i64(ROW, STEP), lengths_of(ids)))


KEYS = [4, 4, 7, 7, 7]
ROWS = [[1, 2, 3], [5], [6, 7], [], [8, 9, 10, 11]]
CHUNKS = [data_part(KEYS[:2], ROWS[:2]), data_part(KEYS[2:], ROWS[2:])]


def host(graph: Graph = GRAPH, num_chunks: int = 2, model: Role | None = None) -> Host:
    return Host(graph, {"model": model or Doubler()}, num_chunks, fetch=lambda handle: handle)


def node_call(node: str, chunk: int | None, step: int = 0, **inputs: Part | list[Part]) -> NodeCall:
    handles = {
        name.replace("__", "."): tuple(part) if isinstance(part, list) else (part,)
        for name, part in inputs.items()
    }
    return NodeCall(node, step, chunk, handles)


def call_work(node: str, chunk: int | None, step: int = 0, **inputs: Part | list[Part]) -> RankWork:
    return work(Host.call, node_call(node, chunk, step, **inputs))


def perform(node: str, chunk: int | None, **inputs: Part | list[Part]) -> Result:
    """By a rank that has done nothing yet."""
    return host().perform(work(Host.call, node_call(node, chunk, 0, **inputs)))


def values() -> list[Part]:
    return list(perform("model.value", None, data=CHUNKS).parts)


def pairs() -> list[Part]:
    return list(perform("pair", None, data=CHUNKS, model__value=values()).parts)


def shifted(pairs: list[Part]) -> tuple[list[Result], Result]:
    """Chunk by chunk, and all at once."""
    totals = list(perform("total", None, pair=pairs).parts)
    chunks = [perform("shift", i, pair=pairs[i], total=totals[i]) for i in range(2)]
    return chunks, perform("shift", None, pair=pairs, total=totals)


def dense(results: list[Result], graph: Graph, node: str) -> list[Tensor]:
    """Every output column of a node, all parts joined."""
    parts = [part for result in results for part in result.parts]
    columns = zip(graph[node].outputs, *parts, strict=True)
    return [unpack(concatenate(pieces), output.spec.dtype) for output, *pieces in columns]


def test_a_chunked_call_is_the_whole_call_in_pieces() -> None:
    rank = host()
    chunked = [rank.perform(call_work("model.value", i, data=CHUNKS[i])) for i in range(2)]
    whole = [rank.perform(call_work("model.value", None, data=CHUNKS))]
    assert [len(result.parts) for result in (*chunked, *whole)] == [1, 1, 2]
    assert torch.equal(*dense(chunked, GRAPH, "model.value"), *dense(whole, GRAPH, "model.value"))
    assert dense(whole, GRAPH, "model.value")[0].tolist() == [
        [2, 4, 6, 0],
        [10, 0, 0, 0],
        [12, 14, 0, 0],
        [0, 0, 0, 0],
        [16, 18, 20, 22],
    ]


def test_a_table_of_outputs_is_stored_column_by_column() -> None:
    result = perform("pair", 1, data=CHUNKS[1], model__value=values()[1])
    paired, score = result.parts[0]
    assert score.values.tolist() == [26, 0, 76]
    assert paired.values.tolist() == [13, 15, 17, 19, 21, 23]
    assert paired.lengths is not None
    assert paired.lengths.tolist() == [2, 0, 4]
    assert result.report.num_rows == (3,)
    assert result.report.num_bytes == paired.num_bytes + score.num_bytes


def test_a_whole_batch_s_output_is_cut_like_its_inputs() -> None:
    paired = pairs()
    result = perform("center", None, pair=paired)
    assert result.report.num_rows == (2, 3)
    (expected,) = dense([result], GRAPH, "center")
    unpacked = unpack(
        concatenate([part[0] for part in paired]), GRAPH["pair"].outputs[0].spec.dtype
    )
    inside = torch.arange(unpacked.shape[1]) < torch.tensor([3, 1, 2, 0, 4])[:, None]
    assert torch.equal(expected, torch.where(inside, unpacked - unpacked.mean(), 0.0))


@op(scope="row")
def spoil(score: Score) -> Score:
    return score.mul_(0)


def test_an_op_that_works_in_place_leaves_its_inputs_as_they_are() -> None:
    def step(data: Data, model: Model) -> object:
        score = pair(model.value(data.ids), data.ids).score
        return spoil(score), shift(score, total(score))

    rank, paired = host(build(step)), pairs()
    for chunk, part in enumerate(paired):
        rank.perform(call_work("spoil", chunk, pair=part))
    assert torch.cat([part[1].values for part in paired]).tolist() == [12, 10, 26, 0, 76]


def test_a_scalar_reaches_every_chunk() -> None:
    totals = perform("total", None, pair=pairs()).parts
    assert [part[0].values.item() for part in totals] == [124, 124]
    expected = [136, 134, 150, 124, 200]
    chunks, whole = shifted(pairs())
    assert torch.cat([result.parts[0][0].values for result in chunks]).tolist() == expected
    assert dense([whole], GRAPH, "shift")[0].tolist() == expected


def test_a_returned_column_with_one_number_per_row_is_reported_as_its_mean() -> None:
    chunks, whole = shifted(pairs())
    assert [result.report.metrics for result in (*chunks, whole)] == [
        {"mean": Metric.mean(270, 2)},
        {"mean": Metric.mean(474, 3)},
        {"mean": Metric.mean(744, 5)},
    ]


def test_rows_that_are_nan_are_counted_beside_the_mean_of_the_others() -> None:
    paired = pairs()
    totals = perform("total", None, pair=paired).parts
    score = next(i for i, output in enumerate(GRAPH["pair"].outputs) if output.name == "score")

    def reported(chunk: int) -> Mapping[str, Metric]:
        return perform("shift", chunk, pair=paired[chunk], total=totals[chunk]).report.metrics

    paired[0][score].values[0] = torch.nan
    assert reported(0) == {"mean": Metric.mean(134, 1), "mean_nan": Metric.sum(1)}
    assert reported(1) == {"mean": Metric.mean(474, 3)}
    paired[0][score].values[:] = torch.nan
    assert math.isnan(reported(0)["mean"].value)
    assert reported(0)["mean_nan"].value == 2


def test_neither_ids_nor_columns_that_the_step_keeps_are_reported() -> None:
    assert perform("drop_first", None, data=CHUNKS).report.metrics == {}
    assert perform("pair", None, data=CHUNKS, model__value=values()).report.metrics == {}


def test_new_rows_are_cut_evenly_between_groups() -> None:
    result = perform("drop_first", None, data=CHUNKS)
    assert [part[0].values.tolist() for part in result.parts] == [[4], [7, 7, 7]]


def test_a_rollout_makes_its_own_rows_and_draws_by_its_step() -> None:
    graph = build(rollout_step)
    result = host(graph).perform(call_work("model.extend", 0, step=3, data=CHUNKS[0]))
    key, ids = result.parts[0]
    assert key.values.tolist() == [4, 4, 4, 4]
    assert unpack(ids, graph["data"].outputs[1].spec.dtype).tolist() == [
        [1, 2, 3, 12],
        [1, 2, 3, 12],
        [5, 12, -1, -1],
        [5, 12, -1, -1],
    ]


def test_training_gets_the_whole_table_and_its_metrics_are_merged() -> None:
    model = Doubler()
    rank = host(model=model)
    result = rank.perform(call_work("model.train", None, data=CHUNKS, center=values()))
    assert result.parts == ()
    assert {name: metric.value for name, metric in result.report.metrics.items()} == {
        "from_worker": 1.0,
        "loss": 0.5,
    }
    assert model.trained_on is not None
    assert model.trained_on.ids.shape == (5, 4)


def test_a_worker_that_knows_of_no_pieces_is_given_none() -> None:
    model = Doubler()
    call = node_call("model.train", None, data=CHUNKS, center=values())
    with pytest.raises(ConfigError) as caught:
        host(model=model).perform(work(Host.call, replace(call, piece="first")))
    assert str(caught.value) == (
        "'model.train' would be given a step's rows in pieces (Schedule.streaming or "
        "Schedule.segment_tokens), which Doubler does not take\n"
        "    leave both out, or give 'model' a worker that reads `call_piece` and says "
        "`takes_pieces = True`"
    )
    assert model.trained_on is None


class Together(Doubler):
    """Serves calls together."""

    unfinished = Data

    def stream(self, method: str, calls: Sequence[Mapping[str, Any]]) -> Iterator[Streamed]:
        for number, arguments in enumerate(calls):
            yield Streamed(number, Doubler.extend(self, **arguments), number)

    def stream_segment(
        self,
        method: str,
        calls: Sequence[Mapping[str, Any]],
        begun: Sequence[Any | None],
        length: int,
    ) -> Iterator[Streamed]:
        raise NotImplementedError


class Once(Together):
    """Defines the method anew, and not how calls are served together."""

    def extend(self, key: Key, ids: Ids, times: int) -> Data:
        return super().extend(key, ids, 1)


class Both(Once):
    """Defines both."""

    def stream(self, method: str, calls: Sequence[Mapping[str, Any]]) -> Iterator[Streamed]:
        return super().stream(method, calls)


def answer(rank: Host, number: int) -> Result:
    return rank.perform(work(Host.answer, NextAnswer("model.extend", 0, number)))


def streamed_keys(model: Role) -> list[list[int]]:
    graph = build(rollout_step)
    rank = host(graph, model=model)
    calls = tuple(node_call("model.extend", chunk, data=CHUNKS[chunk]) for chunk in range(2))
    rank.perform(work(Host.begin_stream, calls))
    answers = [answer(rank, number) for number in range(2)]
    return [answer.parts[0][0].values.tolist() for answer in answers]


def test_a_method_that_a_class_defines_anew_is_called_and_not_passed_by() -> None:
    twice, once = [[4, 4, 4, 4], [7, 7, 7, 7, 7, 7]], [[4, 4], [7, 7, 7]]
    assert streamed_keys(Doubler()) == streamed_keys(Together()) == twice
    assert streamed_keys(Once()) == once
    assert streamed_keys(Both()) == twice


def test_an_object_s_own_method_is_called_and_not_passed_by() -> None:
    model = Together()
    model.extend = Once().extend
    assert streamed_keys(model) == [[4, 4], [7, 7, 7]]


def test_a_method_that_a_class_defines_anew_does_not_go_on_in_later_steps() -> None:
    rank = host(build(rollout_step), model=Once())
    calls = (node_call("model.extend", 0, data=CHUNKS[0]),)
    rank.perform(work(Host.begin_stream, calls, 1, (None,)))
    with pytest.raises(ConfigError) as caught:
        answer(rank, 0)
    assert str(caught.value) == (
        "'model.extend' is to go on in later steps (Schedule.segment_tokens), and Once defines its "
        "own `extend`, which would not be called\n"
        "    set schedule.segment_tokens=0, or define `stream_segment` too"
    )


def test_a_call_s_metrics_are_taken_once() -> None:
    model = Doubler()
    rank = host(model=model)
    first = rank.perform(call_work("model.value", 0, data=CHUNKS[0])).report.metrics
    assert first["rows"].value == 2.0
    assert model.metrics == {}


def test_weights_and_state_come_and_go(tmp_path: Path) -> None:
    one, two = Doubler(), Doubler()
    one.weight = torch.tensor(5.0)
    weights = host(model=one).perform(work(Host.export_weights, "model")).weights
    assert weights is not None
    host(model=two).perform(work(Host.import_weights, "model", weights))
    assert two.weight.item() == 5.0
    host(model=one).perform(work(Host.save_state, "model", str(tmp_path)))
    three = Doubler()
    host(model=three).perform(work(Host.load_state, "model", str(tmp_path)))
    assert three.weight.item() == 5.0


def test_a_part_survives_its_file(tmp_path: Path) -> None:
    file = str(tmp_path / "part.safetensors")
    host().perform(work(Host.save_part, CHUNKS[1], file))
    (part,) = host().perform(work(Host.load_part, file)).parts
    for before, after in zip(CHUNKS[1], part, strict=True):
        assert torch.equal(before.values, after.values)
        assert (before.lengths is None) == (after.lengths is None)
    assert part[1].lengths is not None
    assert part[1].lengths.tolist() == [2, 0, 4]


# --- outputs that contradict their declaration --------------------------------------------------


class Wrong(Model):
    """Returns whatever it is told to."""

    def __init__(self, returned: object) -> None:
        self.returned: Any = returned

    def value(self, ids: Ids) -> Values:
        return self.returned

    def extend(self, key: Key, ids: Ids, times: int) -> Data:
        return self.returned


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.float64),
         "'model.value.out' should be f32[row, step~], but the call returned float64[2, 3]; make "
         "it torch.float32 with 2 axes"),
        (torch.zeros(3, 3),
         "'model.value.out' is f32[row, step~], with 2 rows of up to 3 steps, but the call "
         "returned float32[3, 3]; an op that drops or adds rows says @op(..., makes_rows=True)"),
        (torch.zeros(2, 2),
         "'model.value.out' is f32[row, step~], with 2 rows of up to 3 steps, but the call "
         "returned float32[2, 2]"),
        ([0.0], "'model.value.out' should be f32[row, step~], but the call returned a list"),
        (None, "'model.value.out' should be f32[row, step~], but the call returned a NoneType"),
    ],
    ids=["dtype", "rows", "width", "list", "none"],
)  # fmt: skip
def test_a_column_that_is_not_as_declared(returned: object, message: str) -> None:
    with pytest.raises(WorkerError) as caught:
        host(model=Wrong(returned)).perform(call_work("model.value", 0, data=CHUNKS[0]))
    assert str(caught.value) == message


def test_a_table_that_is_not_as_declared() -> None:
    graph = build(rollout_step)
    for returned, shown in ((torch.zeros(2), "Tensor"), ({"key": 1}, "dict")):
        with pytest.raises(WorkerError) as caught:
            host(graph, model=Wrong(returned)).perform(call_work("model.extend", 0, data=CHUNKS[0]))
        assert str(caught.value) == (f"'model.extend' should return Data, but returned a {shown}")


@op(scope="row")
def halve(score: Score) -> Score:
    return score[::2]


def test_rows_that_vanish_are_noticed() -> None:
    def step(data: Data, model: Model) -> object:
        return halve(pair(model.value(data.ids), data.ids).score)

    graph = build(step)
    paired = (values()[1][0], Packed(torch.zeros(3)))
    with pytest.raises(WorkerError) as caught:
        host(graph).perform(call_work("halve", 0, pair=paired))
    assert str(caught.value) == (
        "'halve.out' is f32[row]: expected 3 rows like its inputs from 'data', got 2; declare the "
        "op with makes_rows=True if it changes rows"
    )


def test_a_trained_role_s_worker_needs_what_publishing_asks_of_it() -> None:
    with pytest.raises(WorkerError) as caught:
        host(model=Wrong(None)).perform(work(Host.export_weights, "model"))
    assert str(caught.value) == (
        "the engine needs `export_weights` of a Wrong, which does not define it\n    its role is "
        "trained: define export_weights, load_weights, save_state and load_state"
    )


# --- cuts ---------------------------------------------------------------------------------------


@given(num_rows=st.integers(0, 40), num_chunks=st.integers(1, 8))
def test_even_cuts_add_up_and_differ_by_one_row_at_most(num_rows: int, num_chunks: int) -> None:
    sizes = even_cuts(num_rows, num_chunks, None)
    assert len(sizes) == num_chunks
    assert sum(sizes) == num_rows
    assert max(sizes) - min(sizes) <= 1


@given(sizes=st.lists(st.integers(1, 5), max_size=12), num_chunks=st.integers(1, 6))
def test_even_cuts_never_part_a_group(sizes: list[int], num_chunks: int) -> None:
    groups = torch.tensor([g for g, size in enumerate(sizes) for _ in range(size)]).long()
    cuts = even_cuts(len(groups), num_chunks, groups)
    assert len(cuts) == num_chunks
    assert sum(cuts) == len(groups)
    assert min(cuts) >= 0
    pieces = [set(piece.tolist()) for piece in torch.split(groups, cuts)]
    for index, piece in enumerate(pieces):
        assert all(piece.isdisjoint(other) for other in pieces[index + 1 :])


def test_groups_that_are_not_together_cannot_be_cut() -> None:
    keys = [4, 4, 7, 4, 7]
    with pytest.raises(WorkerError) as caught:
        cut_table(GRAPH["data"], data_part(keys, ROWS), 2)
    assert str(caught.value) == (
        "'data.key' has rows of group 4 in places apart, again from row 3 on, and cutting the rows "
        "into 2 chunks would part them; put the rows of a group next to each other, or set "
        "num_chunks to 1"
    )
    (part,) = cut_table(GRAPH["data"], data_part(keys, ROWS), 1)
    assert part[0].values.tolist() == keys


def test_a_table_without_rows_is_cut_into_empty_parts() -> None:
    none = torch.zeros(0).long()
    parts = cut_table(GRAPH["data"], (Packed(none), Packed(none, none)), 2)
    assert [part[0].num_rows for part in parts] == [0, 0]

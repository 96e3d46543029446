"""The rules of a step: the whole text of each error, and the valid steps each must let pass."""
# ruff: noqa: E501 - messages stand here as they are printed

from __future__ import annotations

import inspect
from typing import Any

import pytest
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.losses import ClippedPolicyLoss, ClippedValueLoss, CrossEntropyLoss
from penstock.algorithms.ops.rollout_correction import RolloutCorrection, corrected_batch
from penstock.algorithms.roles import (
    Demonstrations,
    PerSample,
    PerToken,
    Policy,
    PolicyBatch,
    Prompts,
    ReferencePolicyBatch,
    Reward,
    Rollout,
    SampleFlag,
    Sampling,
    TokenMask,
    TrainMetrics,
    ValueBatch,
    ValueModel,
)
from penstock.dataflow.errors import FlowError
from penstock.dataflow.graph.check import FlowWarning, check_lag
from penstock.dataflow.graph.tracer import build, op

from ..refused import refused

SAMPLING = Sampling(num_samples=2)
LOSS = ClippedPolicyLoss()


@op(scope="row")
def scale(value: PerToken, *, by: float = 1.0) -> PerToken:
    return by * value


@op(scope="row")
def per_sample(score: PerSample, finished: SampleFlag | None = None) -> PerSample:
    return score


@op(scope="row")
def add(one: PerToken, other: PerToken) -> PerToken:
    return one + other


@op(scope="row")
def read_table(roll: Rollout) -> PerSample:
    return roll.finished.float()


@op(scope="row")
def unannotated(value, mask: TokenMask) -> PerToken:  # pyright: ignore[reportMissingParameterType, reportUnknownParameterType]
    return value  # pyright: ignore[reportUnknownVariableType]


@op(scope="row")
def no_return(value: PerToken):  # noqa: ANN201
    return value


@op(scope="row")
def returns_int(value: PerToken) -> int:
    return len(value)


@op(scope="row")
def takes_list(values: list[PerToken], **others: object) -> PerToken:
    return values[0]


def batch_of(roll: Rollout, advantage: PerToken) -> PolicyBatch:
    return PolicyBatch(
        tokens=roll.tokens,
        mask=roll.mask,
        behavior_logprob=roll.behavior_logprob,
        advantage=advantage,
    )


@refused(
    """node 'actor.train', input 'batch.advantage': expected f32[sample, token~], got f32[sample]
        'reward.score.out' was produced at {2}
        one value per sample was given where one per token is needed; use an op such as broadcast_over_tokens(..., mask=...)"""
)
def test_a_sample_s_value_where_a_token_s_is_needed(
    prompts: Prompts, actor: Policy, reward: Reward
) -> TrainMetrics:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    return actor.train(LOSS, batch_of(roll, advantage=score))


@refused(
    """node 'actor.logprob', input 'tokens': expected i64[sample, token~], got i64[prompt, token~]
        'prompts.prompt' was produced at {0}
        its rows are prompts where samples are needed; take the column from a table with those rows, or convert it in an op"""
)
def test_prompt_rows_where_sample_rows_are_needed(prompts: Prompts, actor: Policy) -> object:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
    return actor.logprob(prompts.prompt, roll.mask)


@refused(
    """node 'scale', input 'value': expected f32[sample, token~], got bool[sample, token~]
        'actor.generate.mask' was produced at {1}
        the dtype differs; convert to f32 inside an op"""
)
def test_a_wrong_dtype(prompts: Prompts, actor: Policy) -> object:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
    return scale(roll.mask)


@refused(
    """node 'add', input 'other': expected f32[sample, token~], got a float (0.5)
        give a column: a field of a table, or what an op or a role's method returned"""
)
def test_a_number_where_a_column_is_needed(prompts: Prompts, actor: Policy) -> object:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
    return add(roll.behavior_logprob, 0.5)  # pyright: ignore[reportArgumentType]


@refused(
    """node 'scale', input 'value': expected f32[sample, token~], got the whole table 'Rollout'
        'actor.generate' was called at {1}
        give one of its f32[sample, token~] columns: behavior_logprob"""
)
def test_a_whole_table_where_a_column_is_needed(prompts: Prompts, actor: Policy) -> object:
    roll: Any = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
    return scale(roll)


@refused(
    """node 'scale', input 'value': expected f32[sample, token~], got the whole table 'Prompts'
        'prompts' was declared at {0}
        none of its columns is f32[sample, token~]; it has prompt i64[prompt, token~], prompt_id i64[prompt]"""
)
def test_a_whole_table_without_a_fitting_column(prompts: Prompts, actor: Policy) -> object:
    table: Any = prompts
    return scale(table)


@refused(
    """node 'read_table', input 'roll': expected a Rollout, got the whole table 'Prompts'
        'prompts' was declared at {0}
        build a Rollout(prompt_id=..., tokens=..., mask=..., behavior_logprob=..., finished=..., version=...)"""
)
def test_a_column_or_another_table_where_a_table_is_needed(prompts: Prompts) -> object:
    table: Any = prompts
    return read_table(table)


@refused(
    """node 'scale', input 'value': expected f32[sample, token~], got the result of 'actor.train', which exists only after the step has run
        'actor.train' was called at {2}
        give a column: a field of a table, or what an op or a role's method returned"""
)
def test_a_train_result_where_a_column_is_needed(prompts: Prompts, actor: Policy) -> object:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
    trained: Any = actor.train(LOSS, batch_of(roll, roll.behavior_logprob))
    return scale(trained)


@refused(
    """node 'scale', input 'by': expected data, got the result of 'actor.train'
        metrics exist only after the step has run; return them from the step instead"""
)
def test_a_train_result_as_an_option(prompts: Prompts, actor: Policy) -> object:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
    trained: Any = actor.train(LOSS, batch_of(roll, roll.behavior_logprob))
    return scale(roll.behavior_logprob, by=trained)


@refused(
    """node 'scale', input 'value': expected f32[sample, token~], got the role 'actor'; call one of its methods
        give a column: a field of a table, or what an op or a role's method returned"""
)
def test_a_role_where_a_column_is_needed(actor: Policy) -> object:
    role: Any = actor
    return scale(role)


def test_an_optional_column_may_be_left_out() -> None:
    def step(prompts: Prompts, actor: Policy, reward: Reward) -> object:
        roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
        score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
        return per_sample(score), per_sample(score, None), per_sample(score, roll.finished)

    assert len(build(step).nodes) == 6


@refused(
    """node 'per_sample', input 'finished': expected bool[sample], got bool[sample, token~]
        'actor.generate.mask' was produced at {1}
        one value per token was given where one per sample is needed; reduce it in an op"""
)
def test_an_optional_column_may_not_be_wrong(
    prompts: Prompts, actor: Policy, reward: Reward
) -> object:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    return per_sample(score, finished=roll.mask)


@refused(
    """node 'unannotated', input 'value': got a column (f32[sample, token~]), but this parameter is not annotated as one
        'actor.generate.behavior_logprob' was produced at {1}
        annotate it with Annotated[Tensor, f32(...)], i64(...) or boolean(...)"""
)
def test_a_column_for_a_parameter_that_is_not_annotated_as_one(
    prompts: Prompts, actor: Policy
) -> object:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
    return unannotated(roll.behavior_logprob, roll.mask)


@refused(
    """node 'takes_list', input 'values': got <column 'actor.generate.behavior_logprob' f32[sample, token~]> inside a list
        give every column its own parameter or table field, and call a role's methods"""
)
def test_a_column_inside_a_list(prompts: Prompts, actor: Policy) -> object:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
    return takes_list([roll.behavior_logprob])


@refused(
    """node 'takes_list', input 'others': got <uncalled method 'actor.generate'> inside a dict
        give every column its own parameter or table field, and call a role's methods"""
)
def test_a_method_that_is_not_called(actor: Policy) -> object:
    return takes_list([], other=actor.generate)


@refused(
    f"""'no_return' has no return annotation
        it is defined at test_check.py:{inspect.getsourcelines(no_return)[1]}
        annotate the return type with Annotated[Tensor, f32(...)] or a dataclass of such columns"""
)
def test_an_op_without_a_return_annotation(prompts: Prompts, actor: Policy) -> object:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
    return no_return(roll.behavior_logprob)


@refused(
    f"""'returns_int' is annotated to return int, which is neither a column nor a table of columns
        it is defined at test_check.py:{inspect.getsourcelines(returns_int)[1]}
        annotate the return type with Annotated[Tensor, f32(...)] or a dataclass of such columns"""
)
def test_an_op_that_returns_no_column(prompts: Prompts, actor: Policy) -> object:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
    return returns_int(roll.behavior_logprob)


@refused(
    """node 'add': inputs 'one' and 'other' are both sample by token~, but of different rows: 'actor.generate' made the one and 'actor.generate#2' the other
        'actor.generate.behavior_logprob' was produced at {1}; 'actor.generate#2.behavior_logprob' was produced at {2}
        take both from one producer; their lengths differ row by row"""
)
def test_columns_of_two_rollouts_mixed(prompts: Prompts, actor: Policy) -> object:
    one = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
    two = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
    return add(one.behavior_logprob, two.behavior_logprob)


@refused(
    """node 'actor.train', input 'batch': ClippedPolicyLoss reads a PolicyBatch, got a Demonstrations
        build a PolicyBatch(tokens=..., mask=..., behavior_logprob=..., advantage=...), or use the loss made for this batch"""
)
def test_a_loss_with_the_wrong_batch(prompts: Prompts, actor: Policy) -> object:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
    batch = Demonstrations(tokens=roll.tokens, mask=roll.mask)
    return actor.train(LOSS, batch)  # pyright: ignore[reportArgumentType]


def test_a_batch_that_has_more_than_its_loss_reads_is_fine() -> None:
    def step(prompts: Prompts, actor: Policy) -> object:
        roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
        batch = ReferencePolicyBatch(
            tokens=roll.tokens,
            mask=roll.mask,
            behavior_logprob=roll.behavior_logprob,
            advantage=roll.behavior_logprob,
            ref_logprob=roll.behavior_logprob,
        )
        return actor.train(LOSS, batch)

    assert build(step)["actor.train"].inputs[-1][0] == "batch.ref_logprob"


@refused(
    """node 'actor.train', input 'loss': ClippedValueLoss reads a ValueOutput, but this role's model makes a PolicyOutput
        use a loss made for this kind of role"""
)
def test_a_value_loss_on_a_policy(prompts: Prompts, actor: Policy, critic: ValueModel) -> object:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
    value = critic.value(roll.tokens, roll.mask)
    batch = ValueBatch(tokens=roll.tokens, mask=roll.mask, old_value=value, value_target=value)
    return actor.train(ClippedValueLoss(), batch)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        ("grpo", "a str ('grpo')"),
        (ClippedPolicyLoss, "the class 'ClippedPolicyLoss' itself; make an instance of it"),
    ],
)
def test_what_is_no_loss(loss: Any, got: str) -> None:
    @refused(
        f"""node 'actor.train', input 'loss': expected a Loss, got {got}
            pass an instance of a class deriving from Loss[Batch, Output]"""
    )
    def check(prompts: Prompts, actor: Policy) -> object:
        roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
        return actor.train(loss, batch_of(roll, roll.behavior_logprob))

    check()


def test_an_output_nobody_reads_is_warned_of() -> None:
    def step(prompts: Prompts, actor: Policy, reward: Reward) -> TrainMetrics:
        roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
        reward.score(roll.tokens, roll.mask, roll.prompt_id)
        return actor.train(LOSS, batch_of(roll, roll.behavior_logprob))

    line = step.__code__.co_firstlineno + 2
    with pytest.warns(FlowWarning) as caught:
        build(step)
    assert [str(warning.message) for warning in caught] == [
        f"test_check.py:{line}\n"
        "    reward.score(roll.tokens, roll.mask, roll.prompt_id)\n"
        "'reward.score.out' of 'reward.score' is computed but nothing reads it; drop the call or "
        "return the column from the step"
    ]


def on_policy_step(prompts: Prompts, actor: Policy) -> TrainMetrics:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
    now = actor.logprob(roll.tokens, roll.mask)
    batch = PolicyBatch(tokens=roll.tokens, mask=roll.mask, behavior_logprob=now, advantage=now)
    return actor.train(LOSS, batch)


def test_lag_needs_the_behavior_log_probabilities() -> None:
    graph = build(on_policy_step)
    check_lag(graph, 0)
    with pytest.raises(FlowError) as caught:
        check_lag(graph, 2)
    line = on_policy_step.__code__.co_firstlineno + 4
    assert str(caught.value) == (
        f"test_check.py:{line}\n"
        "    return actor.train(LOSS, batch)\n"
        "'actor.train' may see samples up to 2 optimizer step(s) old (Schedule.max_lag=2) but "
        "reads no 'behavior_logprob', so the update cannot correct for it.\n"
        "    Pass behavior_logprob from 'actor.generate', annotated as Behavior() in every table it "
        "goes through, or set Schedule(max_lag=0)."
    )


def test_so_do_weights_that_come_in_flight() -> None:
    with pytest.raises(FlowError) as caught:
        check_lag(build(on_policy_step), 1, in_flight=True)
    said = str(caught.value)
    assert "samples by several versions of the weights (Schedule.in_flight)" in said
    assert said.endswith("or set Schedule(in_flight=False, max_lag=0).")


def test_lag_is_fine_where_they_are_read_or_the_loss_does_not_need_them() -> None:
    def corrected(prompts: Prompts, actor: Policy) -> TrainMetrics:
        roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
        return actor.train(LOSS, batch_of(roll, scale(roll.behavior_logprob)))

    def imitation(prompts: Prompts, actor: Policy) -> TrainMetrics:
        roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
        return actor.train(CrossEntropyLoss(), Demonstrations(tokens=roll.tokens, mask=roll.mask))

    def another_role_s_rollouts(prompts: Prompts, actor: Policy, student: Policy) -> TrainMetrics:
        roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
        now = student.logprob(roll.tokens, roll.mask)
        batch = PolicyBatch(tokens=roll.tokens, mask=roll.mask, behavior_logprob=now, advantage=now)
        return student.train(LOSS, batch)

    check_lag(build(corrected), 3)
    check_lag(build(another_role_s_rollouts), 3)
    assert CrossEntropyLoss.tolerates_lag
    check_lag(build(imitation), 3)


def test_lag_is_fine_where_an_op_passes_the_behavior_on() -> None:
    """The columns of the rows that an op keeps, and weights it makes of them, are marked too."""

    @op(scope="group", makes_rows=True)
    def best_half(roll: Rollout, score: PerSample) -> Rollout:
        return roll

    def filtered(prompts: Prompts, actor: Policy, reward: Reward) -> TrainMetrics:
        roll = actor.generate(prompts.prompt, prompts.prompt_id, Sampling())
        kept = best_half(roll, reward.score(roll.tokens, roll.mask, roll.prompt_id))
        return actor.train(LOSS, batch_of(kept, kept.behavior_logprob))

    check_lag(build(filtered), 3)
    check_lag(build(grpo_step, cfg=GRPO(correction=RolloutCorrection())), 3)


# --- filtered sampling


def filtered_step(
    prompts: Prompts, actor: Policy, correction: RolloutCorrection | None = None
) -> TrainMetrics:
    filtered = Sampling(num_samples=2, top_p=0.9, min_p=0.05)
    roll = actor.generate(prompts.prompt, prompts.prompt_id, filtered)
    batch = corrected_batch(actor, roll, roll.behavior_logprob, correction, 1.0)
    return actor.train(LOSS, batch)


test_a_ratio_with_a_filtered_distribution_is_refused = refused(
    """'actor.train' compares log-probabilities of the whole distribution with those of 'actor.generate', which samples from a filtered one (top_p=0.9, min_p=0.05); nothing makes up for what is never sampled.
        Leave out top_p=0.9, min_p=0.05; or set algorithm.cfg.correction.mode=none where the algorithm has a correction, to compare two passes of the trainer and leave the filter uncorrected."""
)(filtered_step)


def test_a_correction_does_not_make_up_for_a_filter() -> None:
    with pytest.raises(FlowError, match=r"samples from a filtered one"):
        build(filtered_step, correction=RolloutCorrection())


def test_a_filter_is_fine_where_no_behavior_log_probability_is_read() -> None:
    def uncorrected(prompts: Prompts, actor: Policy) -> TrainMetrics:
        filtered = Sampling(num_samples=2, top_k=5)
        roll = actor.generate(prompts.prompt, prompts.prompt_id, filtered)
        advantage = actor.logprob(roll.tokens, roll.mask)
        correction = RolloutCorrection(mode="none")
        return actor.train(LOSS, corrected_batch(actor, roll, advantage, correction, 1.0))

    assert "top_k=5" in str(build(uncorrected))

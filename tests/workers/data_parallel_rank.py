"""The ranks of `test_data_parallel`: `python data_parallel_rank.py FOLDER NUM_RANKS split=SPLIT`.

SPLIT is how many of the batch's prompts rank 0 holds. Writes its tokens and weights to FOLDER.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from forked_ranks import fork_groups, join
from penstock.algorithms.losses import BradleyTerryLoss, ClippedPolicyLoss
from penstock.algorithms.roles import PolicyBatch, PreferencePairs, Rollout, Sampling
from penstock.algorithms.roles.environment import ActionSpace
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.runtime.call_context import Piece, call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.torch_engine.specs import TorchRewardModelSpec
from penstock.workers.envs.actors.actor_critic import TorchActorCriticSpec
from penstock.workers.envs.actors.perceptron import PerceptronSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.microbatch import take_rows
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor
from torch_models import architecture, make_policy, make_prompts, to_batch

NUM_PROMPTS = 6
SAMPLING = Sampling(num_samples=4, max_new_tokens=12)


class Nowhere:
    """Something to act in."""

    def spaces(self) -> tuple[int, ActionSpace]:
        return 3, ActionSpace("discrete", sizes=(2,))


def selected(context: WorkerContext, part: slice) -> Mapping[str, Tensor]:
    """Weights and metrics of two members after each has been compared with the other.

    The first one is fitter, but less fit in the rows 0 and 1 alone.
    """
    members = [
        TorchActorCriticSpec(
            env=Nowhere(), network=PerceptronSpec(hidden_sizes=(4,), init_seed=seed)
        ).build(dataclasses.replace(context, role=role))
        for seed, role in enumerate(("first", "second"))
    ]
    fitness = torch.tensor([0.0, 0, 9, 9, 9, 9])[part], torch.full((6,), 5.0)[part]
    saved: dict[str, Tensor] = {}
    for at, (member, rival) in enumerate((members, members[::-1])):
        own, its = fitness[at], fitness[1 - at]
        with call_scope(0, 0):
            found = member.inherit(rival, fitness=own, rival_fitness=its, mutation=0.1).metrics
        role = member.context.role
        saved |= {f"{role}/{name}": weight for name, weight in member.export_weights().items()}
        saved |= {f"metric/{role}/{n}": torch.tensor(m.value) for n, m in found.items()}
    return saved


def in_pieces(context: WorkerContext, batch: PolicyBatch) -> Mapping[str, Tensor]:
    """Weights and metrics of a policy given its rows in three rounds, or whole if it is alone.

    Rank 0 has no row in the first round, rank 1 none in the last.
    """
    optimizer = OptimizerSpec(lr=1e-3, eps=1e-5)
    policy = make_policy(optimizer=optimizer, context=dataclasses.replace(context, role="streamed"))
    rows = torch.arange(len(batch.tokens))
    rounds: list[tuple[Piece, Tensor]] = [("whole", rows)]
    if context.num_ranks > 1:
        cuts = (0, len(rows) // 4) if context.rank == 0 else (len(rows) // 3, len(rows))
        kinds: tuple[Piece, ...] = ("part", "part", "last")
        rounds = list(zip(kinds, rows.tensor_split(cuts), strict=True))
    saved: dict[str, Tensor] = {}
    for step in range(2):
        for piece, mine in rounds:
            with call_scope(step, 0, piece=piece):
                found = policy.train(ClippedPolicyLoss(), take_rows(batch, mine)).metrics
            saved |= {f"metric/streamed/{n}": torch.tensor(m.value) for n, m in found.items()}
    return saved | {f"streamed/{name}": weight for name, weight in policy.export_weights().items()}


def part_of(rank: int, num_ranks: int, split: int) -> slice:
    """Which prompts a rank has."""
    if num_ranks == 1:
        return slice(0, NUM_PROMPTS)
    return slice(0, split) if rank == 0 else slice(split, NUM_PROMPTS)


def main(rank: int, num_ranks: int, folder: Path, words: list[str]) -> None:
    if num_ranks > 1:
        join(rank, num_ranks, folder / "store", limit_s=60)
    optimizer = OptimizerSpec(lr=1e-3)
    context = WorkerContext("actor", seed=7, rank=rank, num_ranks=num_ranks)
    policy = make_policy(optimizer=optimizer, context=context)
    reward = TorchRewardModelSpec(
        model=ModelSpec(architecture=architecture("qwen3")), optimizer=optimizer
    ).build(WorkerContext("reward", seed=7, rank=rank, num_ranks=num_ranks))

    prompt, prompt_id = make_prompts(NUM_PROMPTS)
    part = part_of(rank, num_ranks, int(words[0].removeprefix("split=")))
    metrics: dict[str, float] = {}
    rolls: list[Rollout] = []
    for step in range(3):
        with call_scope(step, 0):
            roll = policy.generate(prompt[part], prompt_id[part], SAMPLING)
        rolls.append(roll)
        number = torch.arange(NUM_PROMPTS).repeat_interleave(SAMPLING.num_samples)[
            part.start * SAMPLING.num_samples : part.stop * SAMPLING.num_samples
        ]
        batch = to_batch(roll)
        with call_scope(step, 0):
            found = policy.train(ClippedPolicyLoss(), batch, num_minibatches=2)
        pairs = PreferencePairs(
            pair_id=number * 2 + torch.arange(len(number)) // 2 % 2,
            tokens=batch.tokens,
            mask=batch.mask,
            chosen=torch.arange(len(number)) % 2 == 0,
        )
        with call_scope(step, 0):
            reward.train(BradleyTerryLoss(), pairs, num_minibatches=3)
        metrics = {name: metric.value for name, metric in found.metrics.items()}

    broken = to_batch(policy.generate(prompt[part], prompt_id[part], SAMPLING))
    if rank == 0:
        broken.advantage[0] = torch.nan
    try:
        policy.train(ClippedPolicyLoss(), broken)
    except WorkerError as error:
        (folder / f"{num_ranks}-{rank}.txt").write_text(str(error))
    policy.save_state(folder / f"state-{num_ranks}")
    saved = {f"actor/{n}": w for n, w in policy.export_weights().items()}
    saved |= {f"reward/{n}": w for n, w in reward.export_weights().items()}
    saved |= {f"metric/{n}": torch.tensor(v, dtype=torch.float64) for n, v in metrics.items()}
    saved |= selected(context, part)
    saved |= in_pieces(context, to_batch(rolls[0]))
    tokens = rolls[0].tokens
    saved["tokens"] = torch.nn.functional.pad(tokens, (0, 40 - tokens.shape[1]), value=-1)
    safetensors.torch.save_file(saved, folder / f"{num_ranks}-{rank}.safetensors")
    if num_ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    fork_groups(main)

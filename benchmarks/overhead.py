"""What the engine costs: GRPO steps through it against the same steps written as a bare loop.

The bare loop has no graph, scheduler, executor or packed columns: it calls the decoder, the
verifier, the advantage formula and the training kernels one after another in one process, so the
difference is the engine alone. The two take turns, step by step, on the same prompts from the same
initial weights, and must end with the same weights hash: the maths is the same to the bit. On Ray
one rank is one actor, so that figure includes packing every column and trips to another process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from bench import parser, report, spread, table
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.ops.advantages import broadcast_over_tokens, group_advantage
from penstock.algorithms.roles import PolicyBatch, Sampling
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.call_context import step_scope
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.executor import Executor
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import one_group
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.data.reasoning_task import ReasoningTaskSpec
from penstock.workers.data.sources import PromptSource
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.executors.on_ray.executor import RayExecutor, shutdown_ray
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.rewards.rule_reward import RuleRewardSpec
from penstock.workers.training.optimizer import OptimizerSpec

TASK = ReasoningTaskSpec(
    name="chain_sum",
    config={"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    prompt_template="{expression}=",
    strip_spaces=True,
    num_train=2000,
    num_held_out=16,
)
TOKENIZER = TokenizerSpec(alphabet="0123456789+-= ")


def specs() -> dict[str, Any]:
    """Actor and verifier of both sides."""
    tokenizer = TOKENIZER.build()
    model = ModelSpec(
        architecture={
            "model_type": "qwen2",
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
        }
    )
    optimizer = OptimizerSpec(lr=1e-4)
    return {
        "actor": TorchPolicySpec(model=model, end_ids=tokenizer.end.ids, optimizer=optimizer),
        "reward": RuleRewardSpec(task=TASK, tokenizer=TOKENIZER),
    }


def bare_loop(source: PromptSource, cfg: GRPO) -> tuple[Any, Callable[[int], None]]:
    """The policy of the bare loop, and one step of it."""
    actor, reward = (spec.build(WorkerContext(name)) for name, spec in specs().items())

    def step(index: int) -> None:
        prompts = source.batch(index)
        with step_scope(index):
            roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
            score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
            advantage = group_advantage(score, roll.prompt_id, eps=cfg.std_eps)
            batch = PolicyBatch(
                tokens=roll.tokens,
                mask=roll.mask,
                behavior_logprob=roll.behavior_logprob,
                advantage=broadcast_over_tokens(advantage, roll.mask),
            )
            actor.train(cfg.loss, batch)

    return actor, step


def paired(
    executor: Executor, cfg: GRPO, source: PromptSource, num_steps: int
) -> tuple[list[float], list[float], bool]:
    """Step times of the engine and of the bare loop, taken in turns; and whether weights agree."""
    graph = build(grpo_step, cfg=cfg)
    engine = Engine(graph, one_group(graph), workers=specs(), executor=executor)
    actor, bare_step = bare_loop(source, cfg)
    ours: list[float] = []
    bare: list[float] = []
    with engine:
        stream = engine.run({"prompts": source}, num_steps)
        for index in range(num_steps):
            start = time.perf_counter()
            next(stream)
            middle = time.perf_counter()
            bare_step(index)
            ours.append(middle - start)
            bare.append(time.perf_counter() - middle)
        same = engine.call("actor", "weights_sha256") == actor.weights_sha256()
    return ours[3:], bare[3:], same  # the first steps warm caches up


def main() -> None:
    """Run both comparisons and print their ratios."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--steps", type=int, default=60, help="steps per comparison")
    options.add_argument("--threads", type=int, default=1, help="torch threads on either side")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    cfg = GRPO(sampling=Sampling(num_samples=8, max_new_tokens=6))
    source = PromptSource(TASK.build(), TOKENIZER.build(), batch_size=64, seed=0)
    result: dict[str, Any] = {"samples_per_step": 512, "steps": args.steps, "threads": args.threads}
    rows: list[list[str]] = []
    executors: dict[str, Callable[[], Executor]] = {
        "in_process": InProcess,
        "ray": lambda: RayExecutor(num_threads=args.threads),
    }
    for name, make in executors.items():
        ours, bare, same = paired(make(), cfg, source, args.steps)
        ratio = spread([one / other for one, other in zip(ours, bare, strict=True)])
        result[f"ratio_{name}"] = ratio["median"]
        result[name] = {
            "step_s": spread(ours),
            "bare_step_s": spread(bare),
            "ratio": ratio,
            "same_weights": same,
        }
        rows.append(
            [
                name,
                f"{spread(ours)['median'] * 1e3:.1f}",
                f"{spread(bare)['median'] * 1e3:.1f}",
                f"{ratio['median']:.3f}",
                f"{ratio['quartile_1']:.3f}-{ratio['quartile_3']:.3f}",
                "yes" if same else "NO",
            ]
        )
    shutdown_ray()
    head = ["executor", "engine ms", "bare ms", "ratio", "quartiles", "same weights"]
    print(table(head, rows))
    report(result, args.json)


if __name__ == "__main__":
    main()

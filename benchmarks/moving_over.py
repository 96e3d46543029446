"""First steps of TRL's trainers and of the commands that `docs/from_trl.md` makes of them.

SFT, DPO, KTO and a reward model take one step on the same rows from the same weights, ours as
`penstock run` with the keys of the tables: loss and gradient norm are compared. GRPO with two
weighted rewards that read columns, GRPO with LoRA and GRPO with tools are compared on completions
that TRL sampled, because the two sides have other random numbers: advantages, log-probabilities
and gradient norm; the loss of a first step is 0. All in float32 on a CPU.

Not compared: evaluation, best checkpoint and pushing to a folder, which have no number of TRL's to
equal, and later steps, whose rows come in another order. These, and whole runs of GRPO, LoRA and
tools, are run as the page has them.

    python benchmarks/moving_over.py --python /PATH/TO/PYTHON/WITH/TRL --json FILE
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import penstock
import torch
from agents_task import chain_folder
from bench import parser, report, table
from moving_over_case import (
    LORA_ALPHA,
    LORA_RANK,
    NUM_PROMPTS,
    NUM_SAMPLES,
    ROWS,
    WEIGHTS,
    write_rows,
)
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.ops.advantages import broadcast_over_tokens, group_advantage
from penstock.algorithms.roles import PolicyBatch
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.lora import LoraSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.rewards.rule_reward import RuleRewardSpec
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor
from vs_trl import trl_python
from vs_trl_case import ALPHABET

HERE = Path(__file__).resolve().parent
MOST = 1e-4
"""Largest difference, relative to the larger of the two numbers."""

SHARED = (
    "algorithm.num_steps=1", "algorithm.optimizer.lr=1e-4", "task=file", "model=./model",
    "task.max_response_tokens=64", "evaluation.num_prompts=0",
    "tracker=none", "progress=quiet", "model.dtype=float32", "executor.num_threads=1",
)  # fmt: skip
"""Keys of every command."""
COMMANDS = {
    "sft": ("algorithm=sft", "task.path=sft.jsonl",
            f"algorithm.per_step.demos={ROWS}"),
    "dpo": ("algorithm=dpo", "~algorithm.before", "task.path=pairs.jsonl",
            "algorithm.roles.ref.start=./other", f"algorithm.per_step.pairs={ROWS}"),
    "kto": ("algorithm=kto", "~algorithm.before", "task.path=kto.jsonl",
            "algorithm.roles.ref.start=./other", f"algorithm.per_step.pairs={2 * ROWS}"),
    "reward": ("algorithm=reward_modelling", "task.path=pairs.jsonl",
               "algorithm.roles.reward.start=./scorer", f"algorithm.per_step.pairs={ROWS}",
               "algorithm.optimizer.schedule=constant", "algorithm.optimizer.warmup_calls=0"),
}  # fmt: skip

GRPO = (
    "algorithm=grpo", "~algorithm.before", "task.path=grpo.jsonl",
    f"algorithm.per_step.prompts={NUM_PROMPTS}",
    f"algorithm.cfg.sampling.num_samples={NUM_SAMPLES}", "task.answer_field=null",
    "task.reward=[moving_over_case:early,moving_over_case:near]",
    "task.reward_weights={early: 1.0, near: 0.5}", "algorithm.num_steps=4",
)  # fmt: skip
HELD_OUT = ("task.held_out_path=held_out.jsonl", f"evaluation.num_prompts={NUM_PROMPTS}")
RUNS = {
    "grpo": GRPO,
    "lora": (*GRPO, f"model.lora.rank={LORA_RANK}", f"model.lora.alpha={LORA_ALPHA}"),
    "evaluation": (*GRPO, *HELD_OUT, "evaluation.every=2"),
    "best checkpoint": (*GRPO, *HELD_OUT, "evaluation.every=1", "evaluation.keep_best=accuracy",
                        "evaluation.stop_after=2"),
    "push to a folder": (*GRPO, "checkpoint_every=2", "push.folder=pushed"),
    "tools": (
        "algorithm=agent_grpo", "~algorithm.before", "task=tools", "model=./chain",
        "task.task={kind: file, path: asked.jsonl, answer_field: null, "
        "reward: 'moving_over_case:asked', reward_in_process: true}",
        "task.tools={mine: {kind: functions, functions: ['moving_over_case:look_up']}}",
        "task.max_turns=3", "task.max_total_tokens=900", "algorithm.per_step.prompts=2",
        f"algorithm.cfg.sampling.num_samples={NUM_SAMPLES}", "algorithm.num_steps=2",
    ),
}  # fmt: skip
"""Programs that run for some steps, with nothing of TRL's to equal in a whole run."""


def folders(folder: Path) -> None:
    """Write two random policies, a scorer, and the model that calls tools."""
    import transformers

    tokenizer = TokenizerSpec(alphabet=ALPHABET).build()
    config = transformers.Qwen2Config(
        vocab_size=tokenizer.vocab_size, hidden_size=64, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.1,
        eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id, bos_token_id=None,
    )  # fmt: skip
    for seed, name in enumerate(("model", "other")):
        torch.manual_seed(seed)
        # The second is near to uniform: random texts are likelier under it, so that KTO's reference
        # point, which the two sides estimate from other pairings, is 0 for both.
        config.initializer_range = (0.1, 0.01)[seed]
        policy: Any = transformers.Qwen2ForCausalLM(config)
        policy.save_pretrained(folder / name)
        tokenizer.save(folder / name)
    torch.manual_seed(7)
    config.initializer_range = 0.1
    config.num_labels = 1
    scorer: Any = transformers.Qwen2ForSequenceClassification(config)
    scorer.save_pretrained(folder / "scorer")
    tokenizer.save(folder / "scorer")
    chain_folder(folder / "chain", hidden=64, layers=2)
    write_rows(folder)


def ours(name: str) -> dict[str, float]:
    """Loss and gradient norm of the first step of a command."""
    run = penstock.run(*COMMANDS[name], *SHARED)
    (row,) = run.metrics.to_dict("records")
    role = "reward" if name == "reward" else "actor"
    return {key: row[f"{role}.train/{key}"] for key in ("loss", "grad_norm")}


def ran(name: str) -> dict[str, Any]:
    """What a run of several steps leaves behind, in a few words."""
    words = [word for word in SHARED if word.partition("=")[0] not in _keys(RUNS[name])]
    run = penstock.run(*words, *RUNS[name])
    summary = run.summary or {}
    left = ("num_steps", "stopped", "accuracy_before_rl", "accuracy_after_rl")
    found = {key: summary[key] for key in left}
    if name == "push to a folder":
        found["pushed"] = sorted(file.name for file in Path("pushed").iterdir())
    return found


def _keys(words: tuple[str, ...]) -> set[str]:
    return {word.partition("=")[0] for word in words}


def on_their_completions(name: str, theirs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What ours says of completions that TRL sampled, and the step on them."""
    ids = torch.tensor([a + b for a, b in _columns(theirs, "prompt_ids", "completion_ids")])
    there = torch.tensor([a + b for a, b in _columns(theirs, "prompt_mask", "completion_mask")])
    own = torch.tensor(theirs["completion_mask"])
    if "tool_mask" in theirs:
        own = own * torch.tensor(theirs["tool_mask"])
    width = ids.shape[1] - own.shape[1]
    sampled = torch.cat([torch.zeros(len(ids), width).long(), own], 1).bool()
    tokens, mask = _left(ids, there.bool(), -1), _left(sampled.long(), there.bool(), 0).bool()
    groups = torch.arange(len(tokens)) // NUM_SAMPLES
    if name == "tools":
        ((_, scores),) = theirs["rewards"].items()
        score = torch.tensor(scores)
    else:
        score = _scores(tokens, mask, groups, folder)
    advantage = group_advantage(score, groups, eps=1e-4)
    lora = LoraSpec()
    if name == "lora":
        lora = LoraSpec(rank=LORA_RANK, alpha=LORA_ALPHA, folder=str(folder / "adapter"))
    start = ModelSpec(folder=str(folder / ("chain" if name == "tools" else "model")))
    spec = TorchPolicySpec(model=start, end_ids=(), optimizer=OptimizerSpec(lr=1e-4))
    policy: Any = replace(spec, lora=lora).build(WorkerContext("actor", 0))
    logprob = policy.logprob(tokens, mask)
    batch = PolicyBatch(
        tokens=tokens,
        mask=mask,
        behavior_logprob=logprob,
        advantage=broadcast_over_tokens(advantage, mask),
    )
    metrics = policy.train(ClippedPolicyLoss(aggregation="seq-mean-token-mean"), batch).metrics
    found = {"grad_norm": float(metrics["grad_norm"].value)}
    policy.close()
    return {**found, "advantages": advantage, "logps": logprob[mask]}


def _columns(theirs: dict[str, Any], *names: str) -> Any:
    return zip(*(theirs[name] for name in names), strict=True)


def _left(column: Tensor, there: Tensor, fill: int) -> Tensor:
    """The entries that are there, moved to the left."""
    rows = [row[flags] for row, flags in zip(column, there, strict=True)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def _scores(tokens: Tensor, mask: Tensor, groups: Tensor, folder: Path) -> Tensor:
    """The weighted sum of TRL's two functions, called by our reward, which reads their columns."""
    names = ("early", "near")
    task = FileTaskSpec(
        path=str(folder / "grpo.jsonl"),
        answer_field=None,
        reward={name: f"moving_over_case:{name}" for name in names},
        reward_weights=dict(zip(names, WEIGHTS, strict=True)),
        reward_in_process=True,
    )
    spec = RuleRewardSpec(task=task, tokenizer=TokenizerSpec(alphabet=ALPHABET))
    return spec.build(WorkerContext("reward", 0)).score(tokens, mask, groups)


def apart(a: Any, b: Any) -> float:
    """Largest difference of any element, relative to the largest element."""
    a, b = torch.as_tensor(a).double().flatten(), torch.as_tensor(b).double().flatten()
    return float((a - b).abs().max() / b.abs().max())


def main() -> None:
    """Run both sides, print the differences, and keep them if asked."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--python", type=Path, help="an interpreter with TRL 1.16 and peft")
    args = options.parse_args()
    python = args.python.absolute() if args.python else trl_python()
    out = args.json.absolute() if args.json else None
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folders(folder)
        given = os.environ | {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
        command = [python, HERE / "moving_over_trl.py", folder]
        subprocess.run(command, check=True, env=given, cwd=folder, timeout=1200)
        theirs = json.loads((folder / "trl.json").read_text())
        before = Path.cwd()
        os.chdir(folder)
        try:
            for program in COMMANDS:
                found = ours(program)
                rows += [_row(program, key, found[key], theirs[program][key]) for key in found]
            runs = {program: ran(program) for program in RUNS}
        finally:
            os.chdir(before)
        for program in ("grpo", "lora", "tools"):
            there = theirs[program]
            own = torch.tensor(there["completion_mask"]).bool()
            if "tool_mask" in there:
                own &= torch.tensor(there["tool_mask"]).bool()
            there["logps"] = torch.tensor(there["logps"])[own]
            found = on_their_completions(program, there, folder)
            rows += [_row(program, key, found[key], there[key]) for key in found]
    heads = ["program", "what", "TRL", "Penstock", "difference"]
    lines = [[r["program"], r["what"], r["trl"], r["ours"], f"{r['difference']:.1e}"] for r in rows]
    print(table(heads, [[str(cell) for cell in line] for line in lines]))
    print(json.dumps(runs, indent=2))
    report({"versions": theirs["versions"], "most": MOST, "rows": rows, "runs": runs}, out)
    worst = max(rows, key=lambda row: row["difference"])
    if worst["difference"] > MOST:
        raise SystemExit(f"{worst['program']}, {worst['what']}: more than {MOST:g} apart")


def _row(program: str, what: str, mine: Any, theirs: Any) -> dict[str, Any]:
    single = isinstance(mine, float)
    return {
        "program": program,
        "what": what,
        "trl": f"{theirs:.6f}" if single else f"{len(theirs)} numbers",
        "ours": f"{mine:.6f}" if single else f"{len(mine)} numbers",
        "difference": apart(mine, theirs),
    }


if __name__ == "__main__":
    main()

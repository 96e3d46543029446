"""GRPO from Python, top to bottom: the same step by hand and through the engine.

Run it: `python examples/grpo.py`. It takes a few seconds on a laptop and needs no GPU and no
download. The model starts from random weights, so it learns only to answer at all; `penstock run`
is the whole job.
"""

from __future__ import annotations

from typing import Any

import penstock as ps
import torch

NUM_STEPS = 5
torch.set_num_threads(1)  # the same sums in the same order, whatever the machine

# --- data: problems, their characters as tokens, and batches that depend on the step alone

task_spec = ps.ReasoningTaskSpec(
    name="chain_sum",
    config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    prompt_template="{expression}=",
    strip_spaces=True,
    num_train=100,
    num_held_out=16,
)
tokenizer_spec = ps.TokenizerSpec(alphabet="0123456789+-=")
tokenizer = tokenizer_spec.build()
prompts = ps.PromptSource(task_spec.build(), tokenizer, batch_size=16, seed=0)

# --- workers, as recipes: a recipe can be built here, or in a Ray actor elsewhere

actor = ps.TorchPolicySpec(
    model=ps.ModelSpec(
        architecture={
            "model_type": "qwen2",
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
    ),
    end_ids=tokenizer.end.ids,
    optimizer=ps.OptimizerSpec(lr=1e-3),
)
reward = ps.RuleRewardSpec(task=task_spec, tokenizer=tokenizer_spec)
workers = {"actor": actor, "reward": reward}
cfg = ps.GRPO(sampling=ps.Sampling(num_samples=8, max_new_tokens=3))

# --- by hand: an ordinary function, called; put a breakpoint() anywhere

for step, returned in enumerate(
    ps.run_eagerly(ps.grpo_step, {"prompts": prompts}, NUM_STEPS, workers=workers, cfg=cfg)
):
    metrics: dict[str, Any] = returned.metrics
    print(f"by hand    step {step}  grad_norm {metrics['grad_norm'].value:.6f}")

# --- as a graph: recorded once, then driven by the engine; the numbers are the same to the bit

graph = ps.build(ps.grpo_step, cfg=cfg)
print(graph)
with ps.Engine(graph, ps.one_group(graph), workers=workers) as engine:
    for result in engine.run({"prompts": prompts}, NUM_STEPS):
        norm = result.metrics["actor.train/grad_norm"]
        print(f"as a graph step {result.step}  grad_norm {norm:.6f}")
    print("weights", engine.call("actor", "weights_sha256")[:16])

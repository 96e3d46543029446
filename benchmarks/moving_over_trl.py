"""One process of `moving_over.py`: TRL's trainers, a step each, in their own environment."""
# TRL is not installed where this project is checked.
# pyright: reportMissingImports=false, reportUnknownParameterType=false
# pyright: reportUntypedBaseClass=false

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from agents_case import LookUps, question
from datasets import Dataset
from moving_over_case import (
    LORA_ALPHA,
    LORA_RANK,
    MAX_NEW_TOKENS,
    NUM_PROMPTS,
    NUM_SAMPLES,
    ROWS,
    WEIGHTS,
    early,
    near,
    read_rows,
)
from peft import LoraConfig, get_peft_model
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template
from trl_options import PLAIN_GRPO

FOLDER = Path(sys.argv[1])


def options(name: str, rows: int, **more: Any) -> dict[str, Any]:
    """What all trainers are given: one step on all rows, float32, the norm before clipping."""
    return {
        "output_dir": str(FOLDER / "out" / name),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_steps": 1,
        "per_device_train_batch_size": rows,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **more,
    }


def first_step(trainer: Any) -> dict[str, float]:
    """Loss and gradient norm of the one step."""
    trainer.train()
    logged = next(row for row in trainer.state.log_history if "grad_norm" in row)
    return {"loss": logged["loss"], "grad_norm": logged["grad_norm"]}


def model(name: str = "model") -> Any:
    """A policy in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32)


def data(name: str) -> Any:
    """Rows as a data set."""
    return Dataset.from_list(read_rows(FOLDER, name))


class Recorded(GRPOTrainer):
    """Keeps what its loss is of: completions, advantages, log-probabilities."""

    kept: dict[str, Any]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
        self.kept = {name: made[name].tolist() for name in names}
        if "tool_mask" in made:
            self.kept["tool_mask"] = made["tool_mask"].tolist()
        ids = torch.cat([made["prompt_ids"], made["completion_ids"]], 1)
        there = torch.cat([made["prompt_mask"], made["completion_mask"]], 1)
        with torch.no_grad():
            logps, *_ = self._get_per_token_logps_and_entropies(
                self.model, ids, there, made["completion_ids"].size(1)
            )
        self.kept["logps"] = logps.tolist()
        self.kept["rewards"] = {name: list(said) for name, said in self._logs["rewards"].items()}
        return made


def grpo(name: str, policy: Any, train: Any, **more: Any) -> dict[str, Any]:
    """A step of GRPO on completions that TRL samples."""
    limits = {"max_completion_length": MAX_NEW_TOKENS, **more.pop("limits", {})}
    given = options(name, NUM_PROMPTS * NUM_SAMPLES, num_generations=NUM_SAMPLES, **limits)
    kept = {key: value for key, value in PLAIN_GRPO.items() if key != "logging_strategy"}
    tokenizer = more.pop("processing_class")
    # A random model would sample them as words. torch gives the embedding of padding no gradient,
    # and TRL leaves all of them out of the texts that rewards read.
    special = [one for one in tokenizer.all_special_ids if one != tokenizer.eos_token_id]
    kept["generation_kwargs"] = {"suppress_tokens": special}
    trainer = Recorded(
        model=policy,
        args=GRPOConfig(**{**kept, **given, "reward_weights": more.pop("weights", None)}),
        train_dataset=train,
        processing_class=tokenizer,
        **more,
    )
    return {**first_step(trainer), **trainer.kept}


def main() -> None:
    """Every program, and what came out as JSON."""
    # TRL writes the end of a response as text, which this tokenizer would read as characters.
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
        FOLDER / "model", split_special_tokens=False
    )
    given: dict[str, Any] = {"processing_class": tokenizer}
    found: dict[str, Any] = {}
    sft = trl.SFTConfig(**options("sft", ROWS))
    found["sft"] = first_step(
        trl.SFTTrainer(model=model(), args=sft, train_dataset=data("sft"), **given)
    )
    dpo = trl.DPOConfig(**options("dpo", ROWS))
    pairs: dict[str, Any] = {"train_dataset": data("pairs"), **given}
    found["dpo"] = first_step(
        trl.DPOTrainer(model=model(), ref_model=model("other"), args=dpo, **pairs)
    )
    kto = trl.KTOConfig(**options("kto", 2 * ROWS, train_sampling_strategy="sequential"))
    found["kto"] = first_step(
        trl.KTOTrainer(
            model=model(), ref_model=model("other"), args=kto, train_dataset=data("kto"), **given
        )
    )
    scorer: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
        FOLDER / "scorer", dtype=torch.float32
    )
    reward = trl.RewardConfig(**options("reward", ROWS))
    found["reward"] = first_step(trl.RewardTrainer(model=scorer, args=reward, **pairs))

    rewards = {"reward_funcs": [early, near], "weights": list(WEIGHTS), **given}
    found["grpo"] = grpo("grpo", model(), data("grpo"), **rewards)
    adapter = LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    torch.manual_seed(0)
    adapted = get_peft_model(model(), adapter)
    with torch.no_grad():  # else B is 0, and so is the gradient of A
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05)
    adapted.save_pretrained(str(FOLDER / "adapter"))
    found["lora"] = grpo("lora", adapted, data("grpo"), **rewards)
    chain: Any = transformers.AutoTokenizer.from_pretrained(FOLDER / "chain")
    chain.response_template = qwen3_template
    numbers = list(range(NUM_PROMPTS))
    asked = Dataset.from_dict({"prompt": [question(n) for n in numbers], "number": numbers})
    found["tools"] = grpo(
        "tools", model("chain"), asked, environment_factory=LookUps, processing_class=chain,
        limits={"max_completion_length": 400, "max_tool_calling_iterations": 2},
    )  # fmt: skip
    found["versions"] = {"trl": trl.__version__, "transformers": transformers.__version__}
    (FOLDER / "trl.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

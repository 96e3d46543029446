"""GRPO here against TRL's GRPOTrainer on a CPU: samples per second and peak memory.

Each side trains in a process of its own, the two in turns, on the same folder of weights and
tokenizer, the same prompt texts and the same reward: 64 prompts of 20 tokens with 4 samples each
and one AdamW update per step, float32, temperature 1, no KL term, the loss averaged over the
tokens of a response and then over responses. Steps are timed after two warm-up steps, imports and
model building are left out of the time; peak memory is that of the whole process. What still
differs: TRL divides by the deviation of a group plus 1e-4 (we, plus 1e-6), and the random numbers
of the sampling. Entropies are computed and reported on either side. Ours runs through the engine
with its in-process executor.

The model is a Qwen2 of 0.6 million parameters with weights set so that an untrained model ends
its responses as wanted, by itself, without a hook on either side (`phase_chain`). Varied: at
least 8 tokens, then an end with probability about 1/70 per token, at most 128. Uniform: all
responses are cut at 6 tokens.

TRL's settings: gradient checkpointing, logging, saving and bfloat16 are off, and no pass for old
log-probabilities is needed. `--tune` measures alternatives: 1 and 2 threads; for how long a waiting
thread spins; 256, 64 and 16 rows at once in training; continuous batching (a paged cache); a static
cache; eager attention. The main run takes `SETTINGS`, the fastest of them for each side and case.
Each side uses the transformers release that its environment resolves to; the result names it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import torch
from bench import parser, report, table
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from vs_trl_case import ALPHABET, GROUP, MAX_NEW_TOKENS, NUM_PROMPTS, NUM_SAMPLES, SPECIAL_TOKENS

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE.parent / ".venv-trl"
REQUIRED = ("torch==2.13.0", "trl==1.16.0", "datasets")
SPIN = "GOMP_SPINCOUNT=1000"
"""How long a waiting thread looks for work before it sleeps; what `penstock` sets as well."""
SETTINGS = {
    ("ours", "varied"): [SPIN, "--threads", "2", "--micro-batch-tokens", "4096"],
    ("ours", "uniform"): [SPIN, "--threads", "2", "--micro-batch-tokens", "4096"],
    ("trl", "varied"): ["--threads", "2", "--rows-at-once", "64"],
    ("trl", "uniform"): ["--threads", "2", "--rows-at-once", "256"],
}
"""TRL's are the fastest that `--tune` found on two idle cores; ours spins as `penstock` does, which
cost 6 % there."""
ALTERNATIVES: dict[str, list[list[str]]] = {
    "ours": [
        *(
            [SPIN, "--threads", threads, "--micro-batch-tokens", tokens]
            for threads in ("1", "2")
            for tokens in ("2048", "4096")
        ),
        ["--threads", "2", "--micro-batch-tokens", "4096"],
    ],
    "trl": [
        *(
            ["--threads", threads, "--rows-at-once", rows]
            for threads in ("1", "2")
            for rows in ("256", "64", "16")
        ),
        *([SPIN, "--threads", "2", "--rows-at-once", rows] for rows in ("256", "64", "16")),
        *(
            ["--threads", "2", "--rows-at-once", "64", "--more", more]
            for more in (
                '{"use_transformers_continuous_batching": true}',
                '{"cache_implementation": "static"}',
                '{"model_init_kwargs": {"dtype": "float32", "attn_implementation": "eager"}}',
            )
        ),
    ],
}


def phase_chain(folder: Path) -> None:
    """Save a model whose responses end by themselves, and its tokenizer.

    The characters form 8 groups of 12. After a token of group g < 7 comes one of group g + 1,
    after one of group 7 another of group 7 or, with probability about 1/70, the end: the embedding
    marks the group in one of the first 8 dimensions, and the head reads it. A prompt ends in
    group 0, so the end is the 8th token at the earliest. All other weights are random and
    computed in full.
    """
    tokenizer = TokenizerSpec(alphabet=ALPHABET).build()
    architecture = {
        "model_type": "qwen2",
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    torch.manual_seed(0)
    model: Any = ModelSpec(architecture=architecture).causal_lm("cpu")
    last = len(ALPHABET) // GROUP - 1
    with torch.no_grad():
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding[:, : last + 1] = 0
        head[:, : last + 1] = 0
        for layer in model.model.layers:  # nothing else may write into the marked dimensions
            layer.self_attn.o_proj.weight[: last + 1] = 0
            layer.mlp.down_proj.weight[: last + 1] = 0
        for group in range(last + 1):
            begin = SPECIAL_TOKENS + group * GROUP
            embedding[begin : begin + GROUP, group] = 1
        ids = torch.randint(SPECIAL_TOKENS + last * GROUP, tokenizer.vocab_size, (64, 64))
        share = float(model.model(ids).last_hidden_state[:, 32:, last].mean())
        head[:SPECIAL_TOKENS, : last + 1] = -20 / share
        for group in range(last + 1):
            begin = SPECIAL_TOKENS + group * GROUP
            head[begin : begin + GROUP, max(group - 1, 0)] = 20 / share * (group > 0)
        head[-GROUP:, last] = 20 / share
        ends = torch.log(torch.tensor(GROUP / 59.0))
        head[tokenizer.eos_id, last] = (20 + ends) / share
    model.save_pretrained(folder)
    tokenizer.save(folder)


def trl_python() -> Path:
    """The interpreter of TRL's environment, which is made if it is missing."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        print(f"making {ENVIRONMENT.name} with {', '.join(REQUIRED)}", flush=True)
        venv.create(ENVIRONMENT, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIRED], check=True)
    return python


def measure(side: str, folder: Path, case: str, options: list[str]) -> dict[str, Any]:
    """Run one process and read its measurement.

    Raises:
        RuntimeError: If the process fails; the end of what it wrote is in the message.
    """
    python = trl_python() if side == "trl" else Path(sys.executable)
    out = folder / "measured.json"
    out.unlink(missing_ok=True)
    variables = dict(option.split("=", 1) for option in options if option.startswith("GOMP_"))
    flags = [option for option in options if not option.startswith("GOMP_")]
    command = [python, HERE / f"{side}_side.py", folder, case, out, *flags]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        cwd=folder,
        env=os.environ | variables,
    )
    if done.returncode or not out.exists():
        raise RuntimeError(f"{side} {case} {options} failed:\n{done.stderr[-2000:]}")
    return json.loads(out.read_text())


def tune(folder: Path, cases: list[str]) -> None:
    """Measure every alternative once, in few updates."""
    rows: list[list[str]] = []
    for case in cases:
        few = ["--updates", "5" if case == "varied" else "20"]
        for side, alternatives in ALTERNATIVES.items():
            for options in alternatives:
                try:
                    got = measure(side, folder, case, [*options, *few])
                except RuntimeError as error:
                    last = str(error).strip().splitlines()[-1]
                    rows.append([case, side, " ".join(options), "failed", last[:60]])
                    continue
                speed, memory = f"{got['samples_per_s']:.1f}", f"{got['peak_rss_mib']:.0f}"
                rows.append([case, side, " ".join(options), speed, memory])
                print(*rows[-1], flush=True)
    print(table(["case", "side", "options", "samples/s", "peak MiB"], rows))


def compare(folder: Path, cases: list[str], rounds: int) -> tuple[dict[str, Any], list[list[str]]]:
    """Both sides in turns; the ratios, everything measured, and the rows of the table."""
    result: dict[str, Any] = {}
    rows: list[list[str]] = []
    memory: list[float] = []
    for case in cases:
        runs: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
        for _ in range(rounds):
            for side, done in runs.items():
                done.append(measure(side, folder, case, SETTINGS[side, case]))
        speed = {s: statistics.median(r["samples_per_s"] for r in runs[s]) for s in runs}
        peak = {s: statistics.median(r["peak_rss_mib"] for r in runs[s]) for s in runs}
        length = {s: statistics.fmean(r["length_mean"] for r in runs[s]) for s in runs}
        if abs(length["ours"] / length["trl"] - 1) > 0.05:
            raise RuntimeError(f"mean lengths differ by more than 5 %: {length}; not comparable")
        result[f"ratio_{case}"] = speed["ours"] / speed["trl"]
        memory.append(peak["ours"] / peak["trl"])
        result[case] = {
            side: {
                "samples_per_s": speed[side],
                "peak_rss_mib": peak[side],
                "length_mean": length[side],
                "settings": " ".join(SETTINGS[side, case]),
                "runs": runs[side],
            }
            for side in runs
        }
        for side in runs:
            cells = [case, side, f"{speed[side]:.1f}", f"{peak[side]:.0f}", f"{length[side]:.1f}"]
            rows.append([*cells, str(runs[side][0]["length_min_quartiles_max"])])
        cells = [case, "ratio", f"{result[f'ratio_{case}']:.2f}", f"{memory[-1]:.2f}", "", ""]
        rows.append(cells)
    result["memory_ratio"] = max(memory)
    return result, rows


def main() -> None:
    """Compare, print the table and the ratios."""
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--rounds", type=int, default=3, help="processes per side and case")
    options.add_argument("--case", choices=list(MAX_NEW_TOKENS), help="only this one")
    options.add_argument("--tune", action="store_true", help="measure alternative settings")
    args = options.parse_args()
    cases = [args.case] if args.case else list(MAX_NEW_TOKENS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        phase_chain(folder)
        if args.tune:
            tune(folder, cases)
            return
        result, rows = compare(folder, cases, args.rounds)
    head = ["case", "side", "samples/s", "peak MiB", "mean length", "min, quartiles, max"]
    print(table(head, rows))
    print({key: round(value, 3) for key, value in result.items() if isinstance(value, float)})
    size = {"prompts_per_update": NUM_PROMPTS, "samples_per_prompt": NUM_SAMPLES}
    report({"compared": __doc__, **size, **result}, args.json)


if __name__ == "__main__":
    main()

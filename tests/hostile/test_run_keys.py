"""Keys of `penstock run` that cannot be: types, ranges, names, files, options of the command."""

from __future__ import annotations

import pytest

from .conftest import SMALL, Refused

pytestmark = pytest.mark.slow

LINES = """\
seed=-1
seed=1.5
seed=abc
seed=null
seed=[1]
seed=11111111111111111111111111111111111111111
seed=nan
seed=true
task.correct_score=nan
executor.device=cpu:99
executor.device=cuda
executor.device=3
executor.groups={'':1}
executor.groups={' ':1}
executor.groups={a/b:1}
executor.groups={policy:1000000}
executor.groups={policy:10000000000000000}
executor.groups=3
executor.groups={policy:1,other:1} executor.nodes={nobody:other}
executor.nodes={actor:nowhere}
executor.transport=bogus
executor.kind=nope
executor.kind=os:system
executor.kind=os:nope
executor.served={a:{b:c}}
executor=nope
engine.kind=nope
engine.options={a:1}
engine=nope
rollout.kind=nope
rollout.options={a:1}
rollout=nope
calibration=/nope
calibration=/proc
calibration=/dev/full
calibration=''
placement=/nope
placement=/dev/zero
calibration=/dev/zero
tracker.kind=null tracker.options={a:1}
resume=\x1b[31m\u202e
placement=/proc
placement=/dev/full
placement=3
resume=/nope
resume=3
schedule.max_lag=1000000000
schedule.streaming=-1
schedule.streaming=1000000000000
schedule.in_flight=true
schedule.in_flight=2
schedule.deadline_s=0
schedule.deadline_s=.inf
schedule.deadline_s=1e400
schedule=nope
schedule=null
runs=/dev/null
runs=/dev/null/x
runs=/proc/x
recovery.pauses_s=1
checkpoint.mirror=neighbor
algorithm.per_step.other=3
algorithm.num_groups={prompts:3}
algorithm.optimizer.lr=nan
algorithm.optimizer.lr=-1
algorithm.optimizer.betas=[1,2]
algorithm.optimizer.betas=[0.9]
algorithm.optimizer.betas=[nan,0.9]
algorithm.optimizer.eps=-1
algorithm.optimizer.weight_decay=nan
algorithm.optimizer=null
algorithm.cfg.sampling.num_samples=0
algorithm.cfg.sampling.temperature=-1
algorithm.cfg.sampling.top_p=2
algorithm.cfg.sampling.max_new_tokens=0
algorithm.cfg.sampling.max_new_tokens=1000000000
algorithm.cfg.epochs=0
algorithm.cfg.num_minibatches=0
algorithm.step=nope
algorithm.step=nope:x
algorithm.step=os.path:join
algorithm=nope
algorithm=[a,b]
algorithm=../grpo
algorithm.roles.nobody.worker=rule
algorithm.roles.actor.worker=os:system
algorithm.roles.actor.worker=rule
algorithm.roles.reward.worker=nope
algorithm.roles.reward.worker=policy
algorithm.roles.reward.options={time_limit_s:0}
algorithm.roles.reward.options={num_processes:0}
algorithm.roles.reward.options={verifier:nope}
algorithm.roles.reward.optimizer={lr:1}
algorithm.roles.actor.start=nowhere
algorithm.roles.actor.start_mean={nowhere:1}
algorithm.roles.actor.frozen=3
algorithm.roles.actor.options={micro_batch_tokens:0}
tracker.kind=os:system
tracker.kind=nope
task.kind=nope
task.kind=os:system
task.name=nope
task.num_train=0
task.num_held_out=1000000000000
task.config={nope:1}
task.config={min_terms:-1}
task.config={min_terms:x}
task.config={min_digits:100000,max_digits:100000}
task.prompt_template='{question:1000000000}'
task.prompt_template='{question.__class__}'
task.prompt_template='{nope}'
task.prompt_template='{'
task.prompt_template=''
task.max_prompt_tokens=1
task.bogus=1
task=nope
model.tokenizer=nope
model.tokenizer=folder
model.tokenizer={kind:char,alphabet:''}
model.tokenizer={kind:folder,folder:/nope}
model.folder=/nope
model=nope
a..b=1
a=b=c
hydra.bogus=1
--bogus
-x
--cfg bogus
--info bogus
--config-name=nope
--config-dir=/nope
--multirun seed=1,x
agreement.every=1
word
"""

CASES = [
    line.split(" ") if " '" not in line and "' " not in line else [line]
    for line in LINES.splitlines()
]


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_run(words: list[str], refused: Refused) -> None:
    refused(["run", *SMALL, *words])


@pytest.mark.parametrize(
    "word",
    ["runs='\udcff'", "task.prompt_template='{expression}\udcff'", "task.config={'\udcff':1}",
     "task.name=['\udcff']", "\udcff=3", "resume='\udcff'"],
    ids=ascii,
)  # fmt: skip
def test_bytes_that_are_no_text(word: str, refused: Refused) -> None:
    refused(["run", *SMALL, word])


def test_very_long_words_are_refused_unread(refused: Refused) -> None:
    betas = ",".join(["0.9"] * 20_000)
    refused(["run", f"algorithm.optimizer.betas=[{betas}]"])


@pytest.mark.parametrize(
    "words",
    [["bogus"], ["run", "--shell-completion"], ["graph", "format=bogus"], ["graph", "format=[1]"],
     ["graph", "format=null"], ["graph", "output=/nope/x"], ["graph", "output=/proc"],
     ["graph", "output=/dev/full"], ["graph", "output=3"], ["graph", "output=''"],
     ["graph", "resume=/nope"], ["graph", "bogus=1"], ["graph", "seed=-1"],
     ["profile", "output=/proc"], ["profile", "output=/proc/x/y"],
     ["profile", "output=/dev/null/x"],
     ["profile", "output=''"], ["profile", "device=tpu"], ["profile", "device=cuda"],
     ["profile", "num_ranks=0"], ["profile", "num_ranks=100000"], ["profile", "num_threads=0"],
     ["profile", "widths=[]"], ["profile", "widths=[0]"], ["profile", "widths=[7]"],
     ["profile", "widths=[1000000000]"], ["profile", "widths=x"], ["profile", "rows=0"],
     ["profile", "rows=1000000000"], ["profile", "seconds=0"], ["profile", "seconds=nan"],
     ["profile", "seconds=.inf"], ["profile", "deadline_s=0"], ["profile", "dispatch=nope"],
     ["profile", "dispatch=os:system"], ["profile", "resume=/nope"], ["profile", "bogus=1"],
     ["profile", "seconds={}"]],
    ids=" ".join,
)  # fmt: skip
def test_other_commands(words: list[str], refused: Refused) -> None:
    refused(words)


def test_a_profile_that_has_no_time_says_so(refused: Refused) -> None:
    refused(["profile", "deadline_s=0.001"], code=1)

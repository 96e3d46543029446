"""Tasks: problems with a prompt, an answer to imitate and a verifier, by index.

A task numbers its problems once: training problems come first, held-out problems after them, and
no prompt text stands in both. A problem's index is the `prompt_id` of the tables, so a reward
worker that built the same task finds the problem from the id alone.

A prompt may be a conversation, which is a list of messages, each with a `role` and a `content`, as
OpenAI, TRL and the chat templates of transformers have them. Rendering them is in `chat`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from ...dataflow.errors import ConfigError, WorkerError, one_process
from ..verifiers.pool import VerifierSpec

if TYPE_CHECKING:
    from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

PATIENCE = ("max_restarts", "step_limit_s")
"""Fields of how much may go wrong, not of what is computed: a resumed run may change them."""

Message = Mapping[str, Any]
"""One turn of a conversation: `{"role": "user", "content": "Hello"}`."""


class BadRow(Exception):
    """A row that is left out: the kind of fault, and what exactly is wrong with this one.

    The kind has the same words for every row that has it: "malformed JSON".
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(reason, detail)


class DataReport:
    """Counts rows kept and rows left out, and remembers the first examples.

    A run never dies for one bad row and never trains on one silently: what reads data adds to a
    report, the launcher prints it, and `check` stops the run before it starts when too much of the
    data is bad.
    """

    def __init__(self, source: str, num_examples: int = 5) -> None:
        self.source = source
        self.num_kept = 0
        self.reasons: Counter[str] = Counter()  # -> number of rows left out for it
        self.examples: list[str] = []  # the first bad rows: file and line, reason and detail
        self.notes: Counter[str] = Counter()  # on rows that are kept -> how many it is about
        self._num_examples = num_examples

    @property
    def num_bad(self) -> int:
        return self.reasons.total()

    @property
    def num_rows(self) -> int:
        return self.num_kept + self.num_bad

    def keep(self, count: int = 1) -> None:
        self.num_kept += count

    def reject(self, where: str, reason: str, detail: str = "") -> None:
        self.reasons[reason] += 1
        if len(self.examples) < self._num_examples:
            self.examples.append(": ".join(filter(None, (where, reason, detail))))

    def drop(self, where: str, reason: str) -> None:
        self.num_kept -= 1
        self.reject(where, reason)

    def joined(self, other: DataReport) -> DataReport:
        both = DataReport(f"{self.source} and {other.source}", self._num_examples)
        both.num_kept = self.num_kept + other.num_kept
        both.reasons = self.reasons + other.reasons
        both.notes = self.notes + other.notes
        both.examples = (self.examples + other.examples)[: self._num_examples]
        return both

    def check(self, max_bad_fraction: float) -> None:
        if self.num_rows == 0:
            raise ConfigError(f"{self.source} has no rows\n    give a file with at least one row")
        if self.num_kept == 0:
            named = any("missing field" in reason for reason in self.reasons)
            columns = (
                ", or name your columns: task.prompt_field and task.answer_field (null if rows "
                "have none), task.messages_field, or task.chosen_field and task.rejected_field"
            )
            fix = f"fix the rows above{columns if named else ''}"
            raise ConfigError(f"{self}\n    no row is left to use; {fix}")
        if self.num_bad > max_bad_fraction * self.num_rows:
            raise ConfigError(
                f"{self}\n    that is more than max_bad_fraction={max_bad_fraction:g} of all rows; "
                "fix them, or raise max_bad_fraction to go on without them"
            )

    def with_lengths(self, lengths: Mapping[str, Sequence[int]], num_held_out: int) -> str:
        share = self.num_bad / max(self.num_rows, 1)
        held_out = f" ({num_held_out} held out)" if num_held_out else ""
        parts = [f"{self.source}: {self.num_kept} rows{held_out}, {share:.1%} left out"]
        for what, given in lengths.items():
            ordered = sorted(given)
            mean = sum(ordered) / len(ordered)
            # The smallest value that at least this share of all do not exceed.
            p50, p90 = (ordered[max(0, math.ceil(q * len(ordered)) - 1)] for q in (0.5, 0.9))
            parts.append(f"{what} tokens mean {mean:.1f}, p50 {p50}, p90 {p90}, max {ordered[-1]}")
        return "; ".join(parts)

    def __str__(self) -> str:
        lines = [f"{self.source}: {self.num_kept} of {self.num_rows} rows kept"]
        if self.num_bad:
            lines[0] += f", {self.num_bad} left out"
            lines += [f"    {count} x {reason}" for reason, count in self.reasons.most_common()]
            lines += [f"    {row}" for row in self.examples]
            if self.num_bad > len(self.examples):
                lines.append(f"    ... and {self.num_bad - len(self.examples)} more")
        return "\n".join(lines)


class Task:
    """Problems by index. Override what your task knows; the rest has defaults.

    Building the same `TaskSpec` again gives the same problems. A task that is answered once
    overrides `score`; one that is answered in conversation overrides `environment`, or `program`.

    Args:
        task_id: Names the task in messages and file names: "chain_sum".
        prompts: The prompt of each problem, whose index is its position here.
        num_held_out: How many of them, the last ones, are kept for evaluation.

    Attributes:
        train: Indices of the training problems.
        held_out: Indices of the problems kept for evaluation; their prompts are not in `train`.
        report: Rows or problems kept and left out.
        correct_score: A response, or a conversation, with at least this score counts as right.
        verifier: How to score in another process under a time limit; None if `score` is quick and
            safe.
        reward_weights: Factors on named parts of the score; 1 for a part that is left out.
        read_as: "prompt" and "answer" -> the column that is read as such, if the task has rows.
        buffer_rows: Problems of a stream that are known at once, in `buffered`; 0 if all are known.
        shares: Of a task of several parts, the share in every step and the training problems of
            each; shares add up to 1.
        chat_template: How conversations are rendered with a tokenizer that has no template.
        further_characters: What its template, its policy and its environments may write beyond what
            it shows; None if it does not know.
        tells_calls: Whether prompts or demonstrations tell how tools are called, so that nothing is
            shown in place of a chat template that shows no tools.
        deterministic: Whether what answers a conversation is a function of the problem, the seed
            and the turns alone.
        why_not_deterministic: What conversations share, if that was found out.
        time_limit_s: Longest time that a program may take for one problem.
        max_running: Programs that run at once; the others begin when one ends.
        max_branches: Most sequences of tokens of one conversation of a program.

    Raises:
        ConfigError: If no problem is left to train on, or a held-out one is trained on.
    """

    task_id: str
    train: range
    held_out: range
    report: DataReport
    correct_score: float = 1.0
    verifier: VerifierSpec | None = None
    reward_weights: Mapping[str, float] = {}
    read_as: Mapping[str, str | None] = {}
    buffer_rows: int = 0
    shares: Sequence[tuple[float, range]] = ()
    chat_template: str | None = None
    further_characters: str | None = None
    tells_calls: bool = False
    deterministic: bool = True
    why_not_deterministic: str = ""
    time_limit_s: float = 300.0
    max_running: int = 16
    max_branches: int = 16

    def __init__(self, task_id: str, prompts: Sequence[str], num_held_out: int = 0) -> None:
        self.task_id, self._prompts = task_id, list(prompts)
        num_train = len(self._prompts) - num_held_out
        if num_held_out < 0 or num_train < 1:
            raise ConfigError(
                f"task '{task_id}' has {len(self._prompts)} prompts, of which {num_held_out} are "
                "held out\n    leave at least one to train on"
            )
        both = set(self._prompts[:num_train]) & set(self._prompts[num_train:])
        if both:
            raise ConfigError(
                f"task '{task_id}' trains on a held-out prompt: {min(both)!r:.80}\n    give each "
                "prompt once, or hold none out"
            )
        self.train = range(num_train)
        self.held_out = range(num_train, len(self._prompts))
        self.report = DataReport(f"task '{task_id}'")
        self.report.keep(len(self._prompts))

    def prompt_text(self, index: int) -> str:
        """Return the prompt; of a conversation, the user's last message."""
        return self._prompts[index]

    def messages(self, index: int) -> Sequence[Message] | None:
        """Return the conversation to continue; None if the prompt is the text of `prompt_text`."""
        return [{"role": "user", "content": self.prompt_text(index)}] if self.converses else None

    def tools(self, index: int) -> Sequence[Mapping[str, Any]] | None:
        """Return JSON schemas of the tools that the model may call in a conversation."""
        return None

    def answer_text(self, index: int) -> str | None:
        """Return a right response to imitate."""
        return None

    def reward_answer(self, index: int) -> str | None:
        """Return the answer that a reward compares with, where it is not the one to imitate."""
        return self.answer_text(index)

    def replies(self, index: int) -> Sequence[Sequence[Message]] | None:
        """Return the reply to imitate, or the better and the worse one, where they are messages."""
        return None

    def imitates_history(self, index: int) -> bool:
        """Return whether the assistant's turns in the prompt are imitated, too."""
        return False

    def pair_texts(self, index: int) -> tuple[str, str] | None:
        """Return a better and a worse response."""
        return None

    def pair_scores(self, index: int) -> tuple[float, float] | None:
        """Return scores of the better and the worse response."""
        return None

    def is_good(self, index: int) -> bool | None:
        """Return whether the response to imitate is a good one, where responses are labelled."""
        return None

    def tokens(self, index: int) -> tuple[list[int], list[bool]] | None:
        """Return tokens, and which are imitated, of a demonstration that is tokenized already."""
        return None

    def pass_rate(self, index: int) -> float | None:
        """Return how often the problem is solved, from 0 to 1."""
        return None

    def buffered(self, number: int) -> Sequence[int]:
        """Return the training problems of one buffer; a task that is no stream has one of all."""
        return self.train

    @property
    def listed(self) -> Sequence[int]:
        """Problems to look at for what is true of all: all of them, or a stream's first ones."""
        return (*self.buffered(0), *self.held_out)

    def suites(self) -> Mapping[str, Sequence[int]]:
        """Return name -> held-out problems, of kinds that are evaluated apart."""
        return {}

    def score(self, index: int, response: str) -> float | None:
        """Score a response, in this process; None if the task cannot say.

        It may return and raise whatever a verifier does: `as_score` reads it.
        """
        raise ConfigError(
            f"task '{self.task_id}' scores whole conversations only\n"
            "    train it with an algorithm that converses"
        )

    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        """Return arguments, as JSON, for the verifier that `verifier` makes elsewhere."""
        return (self.prompt_text(index), response)

    def verifiers(self) -> Mapping[str, VerifierSpec]:
        """Return name -> reward function; empty if `score` does it.

        A name is that of a part of the score, and "" where there is one function alone.
        """
        return {} if self.verifier is None else {"": self.verifier}

    @property
    def needs_process(self) -> bool:
        """Whether one of its reward functions needs a process of its own, being slow or unsafe."""
        every = [one for task in self.scorers() for one in task.verifiers().values()]
        return not all(one.in_process for one in every)

    def columns(self, index: int) -> Mapping[str, Any]:
        """Return further values of a problem, as JSON, that a reward function may name."""
        return {}

    def column_names(self) -> Sequence[str]:
        """Return the names that `columns` may have."""
        return [*self.columns(self.train[0])] if self.train else []

    def scorers(self) -> Sequence[Task]:
        """Return the tasks that score the problems: of a task of several parts, its parts."""
        return [self]

    def scored_by(self, index: int) -> tuple[Task, int]:
        """Return which of `scorers` scores a problem, and its index there."""
        return self, index

    def where(self, index: int) -> str:
        """Return where the problem stands, for messages: "train.jsonl:17"."""
        return f"{self.task_id}[{index}]"

    def environment(self, problem: int) -> Any:
        """Return a new `workers.agents.environment.Environment` for one conversation."""
        raise NotImplementedError

    async def close_environments(self) -> None:
        """End what all conversations share; override it if they share something."""

    def program(self, problem: int) -> Any:
        """Return the `workers.agents.programs.program.AgentProgram` that answers a problem."""
        raise NotImplementedError

    def outcome(self, problem: int, answer: str) -> float | None:
        """Score the answer of a program; None if it cannot be scored."""
        return self.score(problem, answer)

    @property
    def has_programs(self) -> bool:
        """Whether programs answer the problems."""
        return type(self).program is not Task.program

    @property
    def converses(self) -> bool:
        """Whether the problems are answered in conversation, with environments or programs."""
        return self.has_programs or type(self).environment is not Task.environment

    @property
    def shares_environments(self) -> bool:
        """Whether environments share something that outlives a call."""
        return type(self).close_environments is not Task.close_environments


def handed_on(method: F) -> F:
    """Return a method of a `WrappedTask` that asks the task whose problem it is."""

    @wraps(method)
    def ask(self: WrappedTask, index: int, *arguments: Any) -> Any:
        task, own = self.at(index)
        return getattr(task, method.__name__)(own, *arguments)

    return cast("F", ask)


class WrappedTask(Task):
    """The problems of another task, or of several; subclasses change what they know better.

    Not handed on are shares, suites, pair scores, answers for rewards, environments and programs.
    """

    def __init__(self, task: Task, task_id: str | None = None) -> None:
        self._task = task
        self.task_id = task.task_id if task_id is None else task_id
        self.train, self.held_out, self.report = task.train, task.held_out, task.report
        self.buffer_rows = task.buffer_rows
        self.correct_score = task.correct_score

    def at(self, index: int) -> tuple[Task, int]:
        """Return whose problem it is, and its index there."""
        return self._task, index

    def buffered(self, number: int) -> Sequence[int]:
        return self._task.buffered(number) if self.buffer_rows else self.train

    prompt_text = handed_on(Task.prompt_text)
    messages = handed_on(Task.messages)
    tools = handed_on(Task.tools)
    answer_text = handed_on(Task.answer_text)
    replies = handed_on(Task.replies)
    imitates_history = handed_on(Task.imitates_history)
    pair_texts = handed_on(Task.pair_texts)
    is_good = handed_on(Task.is_good)
    tokens = handed_on(Task.tokens)
    pass_rate = handed_on(Task.pass_rate)
    score = handed_on(Task.score)
    verifier_call = handed_on(Task.verifier_call)
    columns = handed_on(Task.columns)

    def column_names(self) -> Sequence[str]:
        return self._task.column_names()

    where = handed_on(Task.where)


def response_facts(
    verifier: VerifierSpec, task: Task, index: int, response: str, token_ids: Sequence[int] = ()
) -> dict[str, Any]:
    """Return what a reward function asks for about a response, by name, as JSON."""
    known: Mapping[str, Callable[[], Any]] = {
        "prompt": lambda: task.prompt_text(index),
        "messages": lambda: task.messages(index),
        "answer": lambda: task.reward_answer(index),
        "response": lambda: response,
        "response_token_ids": lambda: list(token_ids),
    }
    facts: dict[str, Any] = {
        name: get() for name, get in known.items() if name in (verifier.asks or ())
    }
    if verifier.columns:
        columns = task.columns(index)
        facts["columns"] = {n: columns[n] for n in verifier.columns if n in columns}
    return facts


class TaskSpec(Protocol):
    """Picklable recipe for a task."""

    def build(self) -> Task:
        """Read or generate the problems; `ConfigError` if the options make no usable task."""
        ...


@one_process()
def build_task(spec: TaskSpec) -> Task:
    """Build a task, which may be the user's own, and require what has no default in `Task`."""
    task: Any = spec.build()
    builds = (
        f"'task.kind': '{type(spec).__module__}:{type(spec).__qualname__}' builds a "
        f"{type(task).__name__}"
    )
    if not isinstance(task, Task):
        raise ConfigError(
            f"{builds}, which does not inherit from Task\n    derive the class from "
            "penstock.workers.data.task.Task and override what it knows; the rest has defaults"
        )
    needed = ("task_id", "train", "held_out", "report")  # attributes without a default
    missing = [name for name in needed if not hasattr(task, name)]
    if not hasattr(task, "_prompts") and type(task).prompt_text is Task.prompt_text:
        missing.append("prompt_text")
    if not task.converses and type(task).score is Task.score:
        missing.append("score")
    if missing:
        raise ConfigError(
            f"{builds} without {', '.join(map(repr, missing))}, which every task has\n    see "
            "penstock.workers.data.task.Task, whose __init__ takes a name and prompts; a task that "
            "is answered in conversation needs 'environment' and no 'score'"
        )
    return task


def task_alphabet(task: Task) -> str:
    """Every character of the task's prompts, answers and pairs, sorted: the smallest alphabet.

    A policy can only write these characters, which is right where answers share an alphabet. What
    an environment may write is not known, unless the task has `further_characters`.
    """
    from ..models.tokenizer import PRINTABLE  # brings torch, which listing tasks does without

    further = task.further_characters
    found = set(PRINTABLE if further is None and task.converses else further or "")
    for index in task.listed:
        with one_process():
            found.update(task.prompt_text(index), task.answer_text(index) or "")
            for text in task.pair_texts(index) or ():
                found.update(text)
    return "".join(sorted(found))


def fingerprint(task: Task) -> str:
    """SHA-256 over all that a task says of every problem, in order, as 16 hex digits.

    Equal fingerprints mean that an index names the same problem in another process or another run:
    the same prompt, the same answer and pair to learn from, and the same call of the verifier.
    """
    digest = hashlib.sha256()
    for index in task.listed:
        with one_process():
            problem = (
                task.prompt_text(index),
                task.answer_text(index),
                task.pair_texts(index),
                task.verifier_call(index, ""),
            )
            if (scores := task.pair_scores(index)) is not None:
                problem = (*problem, scores)
            if (messages := task.messages(index)) is not None:
                problem = (*problem, messages, task.tools(index))
            if (replies := task.replies(index)) is not None:
                problem = (*problem, replies)
            if (further := (task.is_good(index), task.tokens(index))) != (None, None):
                problem = (*problem, further)
        digest.update(json.dumps(problem).encode() + b"\n")
    digest.update(f"{task.train} {task.held_out}".encode())
    return digest.hexdigest()[:16]


def same_task(spec: TaskSpec, task_fingerprint: str | None, role: str) -> Task:
    """The task built in this process, where its indices name the problems they name elsewhere."""
    task = build_task(spec)
    if task_fingerprint not in (None, fingerprint(task)):
        raise WorkerError(
            f"role '{role}': task '{task.task_id}' has other problems in this process "
            "than where its prompts come from, so answers would be scored against the wrong "
            "ones\n    set PYTHONHASHSEED=0, and see that all machines read the same data"
        )
    return task


def checked_problems(task: Task, prompt_id: Tensor) -> list[int]:
    """The rows' problems, as indices into the task."""
    problems: list[int] = prompt_id.tolist()
    number = len(task.train) + len(task.held_out)
    for index in problems:
        if not 0 <= index < number:
            raise WorkerError(
                f"prompt_id {index} is not a problem of task '{task.task_id}', which has "
                f"{number}\n    give prompts and reward the same task"
            )
    return problems


ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields of other formats that would change what is trained on -> what to write instead.
_NOT_READ = {
    "function_call": "give the call as tool_calls",
    "refusal": "give the text as content",
    "audio": "only text is read",
    "train": "give weight: 0 for what is not imitated",
    "loss": "give weight: 0 for what is not imitated",
}


class NotMessages(ValueError):
    """A value that is no conversation; the text says why."""


def check_messages(given: Any) -> list[dict[str, Any]]:
    """Return the value as messages: parts of text joined, further fields of a message kept."""
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        shown = "an empty list" if given == [] else json_type(given)
        raise NotMessages(f"expected a list of messages, got {shown}")
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(given, start=1):
        if not isinstance(message, Mapping):
            raise NotMessages(f"message {number} is {json_type(message)}, not an object")
        kept = {key: value for key, value in message.items() if value is not None}
        parts = kept.get("content")
        if isinstance(parts, list) and all(isinstance(part, Mapping) for part in parts):
            for part in parts:
                if not isinstance(part.get("text"), str):
                    raise NotMessages(
                        f"the content of message {number} has a part of type "
                        f"{part.get('type')!r:.40}, not text"
                    )
            kept["content"] = "".join(part["text"] for part in parts)
        _check_message(number, kept)
        messages.append({"content": "", **kept} if kept.get("tool_calls") else kept)
    return messages


def messages_in(text: str) -> list[Any] | None:
    """Return the conversation that a text holds as JSON; None if it is a plain text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    conversation = read and all(isinstance(one, Mapping) and "role" in one for one in read)
    return read if conversation else None


def is_imitated(message: Mapping[str, Any]) -> bool:
    """Return whether training imitates a message: the assistant's, unless it has a weight of 0."""
    return message["role"] == "assistant" and message.get("weight", 1) != 0


def _check_message(number: int, message: Mapping[str, Any]) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise NotMessages(
            f"message {number} has the role {role!r:.40}; roles are {', '.join(ROLES)}"
        )
    for field, remedy in _NOT_READ.items():
        if field in message:
            raise NotMessages(f"message {number} has '{field}', which is not read; {remedy}")
    weight = message.get("weight", 0)
    if isinstance(weight, bool) or weight not in ((0, 1) if role == "assistant" else (0,)):
        raise NotMessages(
            f"message {number}, the {role}'s, has the weight {weight!r:.40}; the assistant's "
            "messages have 1, or 0 if they are only read, and no others are imitated"
        )
    if content is None and not message.get("tool_calls"):
        raise NotMessages(f"message {number} has no content")
    if content is not None and not isinstance(content, str):
        raise NotMessages(f"the content of message {number} is {json_type(content)}, not text")


def json_type(value: Any) -> str:
    """Return what JSON calls a value, for messages."""
    kinds = {str: "text", list: "a list", dict: "an object", type(None): "null", bool: "a boolean"}
    is_number = isinstance(value, (int, float))
    return kinds.get(type(value), "a number" if is_number else type(value).__name__)


def last_user_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the user's last message: the part of a conversation that a verifier reads."""
    said = [str(message["content"]) for message in messages if message["role"] == "user"]
    return said[-1] if said else ""

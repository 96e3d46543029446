"""Reward models behind servers as a `Reward`: vLLM's pooling endpoints, and what speaks as they do.

`vllm serve MODEL --runner pooling` answers at `/classify` and `/pooling`. Scores are as the model's
head gives them, without the sigmoid that a server would put on top.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor
from typing_extensions import override

from ...dataflow.errors import one_process
from ...dataflow.options import PositiveInt, option_class
from ...dataflow.runtime.worker_protocol import WorkerContext
from ..data.task import Message
from ..rollout.scores import LARGEST
from .judge import AskedReward, AskedRewardSpec, ChatClient, ChatError, Verdict
from .own_text import OwnText

_FIELD = {"classify": "probs", "pooling": "data"}
"""Endpoint -> where a row's numbers stand in its reply."""


@option_class
class ServedRewardSpec(AskedRewardSpec):
    """Recipe for a `ServedReward`; a `WorkerSpec`."""

    endpoint: Literal["classify", "pooling"] = "classify"
    """The endpoint of the server that is asked."""
    folder: str | None = None
    """A folder with the model's tokenizer: texts are encoded here, and sent several at once. Null
    to send conversations, which the server renders by its own chat template."""
    batch_size: PositiveInt = 16
    """Responses of a request; conversations go one by one."""

    def build(self, context: WorkerContext) -> ServedReward:
        return ServedReward(self, context.role)


class ServedReward(AskedReward):
    """Asks a served reward model about responses; for its metrics see `AskedReward`."""

    def __init__(self, spec: ServedRewardSpec, role: str) -> None:
        client = ChatClient(spec, f"/{spec.endpoint}")
        advice = "see its address and endpoint"
        super().__init__(spec, role, client, "the served reward model", advice)
        self._served, self._own_text = spec, None
        if spec.folder is not None:
            self.batch_size = spec.batch_size
            self._own_text = OwnText(folder=spec.folder, task=spec.task, tokenizer=spec.tokenizer)

    @override
    @one_process()
    def items(self, tokens: Tensor, mask: Tensor, prompt_id: Tensor) -> Sequence[Any]:
        if self._own_text is None:
            return super().items(tokens, mask, prompt_id)
        rows = self._own_text.rows(tokens, mask, prompt_id)[0]
        return [[token for token in row if token >= 0] for row in rows.tolist()]

    @override
    def messages(self, index: int, response: str) -> Sequence[Message]:
        text = {"role": "user", "content": self._task.prompt_text(index)}
        before = self._task.messages(index) or [text]
        return [*before, {"role": "assistant", "content": response}]

    @override
    async def ask(self, items: Sequence[Any]) -> list[Verdict]:
        encoded = {"input": list(items), "add_special_tokens": False}
        body = {"messages": items[0]} if self._own_text is None else encoded
        raw = self._served.extra.get("use_activation", False)
        reply = await self._client.post({"use_activation": raw, **body})
        try:
            rows = sorted(json.loads(reply)["data"], key=lambda row: row["index"])
            found = [_number(row[_FIELD[self._served.endpoint]]) for row in rows]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            shown = f"{error}: {self._client.shown(reply)!r}"
            raise ChatError(f"the reply has no scores: {shown}") from None
        if len(found) != len(items):
            raise ChatError(f"the reply has {len(found)} scores of {len(items)} responses")
        return [Verdict(score) for score in found]


def _number(given: Any) -> float:
    """A row's one number; of one for each token the last."""
    given = given[-1] if isinstance(given[-1], list) else given
    (number,) = given
    if not abs(number) <= LARGEST:
        raise ValueError(f"{number} is beyond float32")
    return float(number)

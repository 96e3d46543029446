"""Stop strings: found at the token that completes them, whatever the tokenizer splits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.algorithms.roles import Sampling
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.rollout.response_sampler import StopStrings

BYTES = TokenizerSpec(kind="byte")


def ends(text: str, *stop: str, least: int = 0, prompt: str = "a prompt\n") -> int | None:
    """How many of the text's bytes were looked at when a stop string was found."""
    tokenizer = BYTES.build()
    sampling = Sampling(stop=stop, min_new_tokens=least, max_new_tokens=1000)
    watch = StopStrings(BYTES, sampling, torch.tensor([tokenizer.encode(prompt)]))
    for place, token in enumerate(tokenizer.encode(text), start=1):
        if watch.complete(0, token):
            return place
    return None


def test_the_text_of_a_prompt_is_not_the_response_s():
    assert ends("\n\n", "\n\n", prompt="x\n") == 2


def test_special_tokens_are_text_under_their_names():
    watch = StopStrings(BYTES, Sampling(stop=("d>",)), torch.tensor([[5, 6, -1]]))
    assert not watch.complete(0, 9)
    assert watch.complete(0, 0)  # <pad>


def test_nothing_ends_before_the_least_length():
    assert ends("ab ab", "ab", least=1) == 2
    assert ends("ab ab", "ab", least=2) == 5
    assert ends("ab ab", "ab", least=5) is None


def test_rows_are_looked_at_apart():
    tokenizer = BYTES.build()
    a, b = tokenizer.encode("ab")
    sampling = Sampling(stop=("ab",), num_samples=2)
    watch = StopStrings(BYTES, sampling, torch.tensor([[a], [b]]))
    found = [watch.complete(row, token) for row, token in ((0, a), (1, b), (2, a), (1, b), (2, b))]
    assert found == [False, False, False, False, True]
    assert watch.complete(0, b)


@given(
    st.text("ab\N{SNOWMAN}", max_size=30),
    st.lists(st.text("ab\N{SNOWMAN}", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_it_is_where_the_whole_text_first_has_one(text: str, stop: list[str]):
    found = ends(text, *stop)
    whole = [n for n in range(len(text) + 1) if any(s in text[:n] for s in stop)]
    assert found == (len(text[: whole[0]].encode()) if whole else None)


@pytest.mark.parametrize("stop", [("",), "ab", ("ab", "")])
def test_strings_that_are_none_are_refused(stop: tuple[str, ...]):
    with pytest.raises(ValueError, match=r"expected (strings of at least one character|a list)"):
        Sampling(stop=stop)

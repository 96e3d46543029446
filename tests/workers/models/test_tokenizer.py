"""Tokenizers: round trips, ids, special tokens, and what they cannot express."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.errors import ConfigError
from penstock.workers.models.tokenizer import (
    END_MARK,
    PRINTABLE,
    Tokenizer,
    TokenizerSpec,
    pad_rows,
)

CHAR = TokenizerSpec().build()
BYTE = TokenizerSpec(kind="byte").build()


@given(st.text(alphabet=PRINTABLE))
def test_characters_survive_a_round_trip(text: str) -> None:
    ids = CHAR.encode(text)
    assert CHAR.decode(ids) == text
    assert len(ids) == len(text)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_express_any_text(text: str) -> None:
    ids = BYTE.encode(text)
    assert BYTE.decode(ids) == text
    assert len(ids) == len(text.encode())
    assert BYTE.inexpressible(text) == ""


def test_ids_are_special_tokens_then_sorted_characters() -> None:
    tokenizer = TokenizerSpec(alphabet="ba+b").build()
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert tokenizer.encode("+ab") == [4, 5, 6]
    assert tokenizer.vocab_size == 7
    assert TokenizerSpec(alphabet="+ab").build().encode("b") == [6]


def test_text_that_spells_a_special_token_is_not_one() -> None:
    ids = CHAR.encode("<eos>")
    assert len(ids) == 5
    assert CHAR.eos_id not in ids
    assert BYTE.eos_id not in BYTE.encode("<eos>")


TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_a_chat_template_ends_turns_with_the_token(kind: str, tmp_path: Path) -> None:
    spec = {"kind": kind, "chat_template": TEMPLATE}
    built = TokenizerSpec(**spec).build()  # pyright: ignore[reportArgumentType] - both are kinds
    built.save(tmp_path)
    for tokenizer in (built, TokenizerSpec(kind="folder", folder=str(tmp_path)).build()):
        said = ["<eos>", f"a{END_MARK}b", ""]
        text = tokenizer.render([{"role": "user", "content": content} for content in said])
        ids = tokenizer.encode(text)
        assert ids.count(tokenizer.eos_id) == 3
        assert tokenizer.decode(ids) == "<eos><eos>ab<eos><eos>"
        assert tokenizer.encode_many(["ab", text, ""]) == [tokenizer.encode("ab"), ids, []]


def test_without_a_chat_template_no_character_is_the_token() -> None:
    assert BYTE.decode(BYTE.encode(END_MARK)) == END_MARK
    assert CHAR.decode(CHAR.encode(END_MARK)) == "<unk>"


def test_inexpressible_characters_are_named_and_become_unknown() -> None:
    assert CHAR.inexpressible("5 € é €") == "€é"
    assert CHAR.decode(CHAR.encode("5€")) == "5<unk>"


def test_ids_out_of_range_decode_as_unknown() -> None:
    assert CHAR.decode([CHAR.vocab_size, *CHAR.encode("a"), -1, 10**6]) == "<unk>a<unk><unk>"


def test_responses_end_at_the_first_end_of_sequence() -> None:
    eos = CHAR.eos_id
    a, b = CHAR.encode("ab")
    tokens = torch.tensor([[a, b, eos, a], [a, b, b, -1], [a, eos, -1, -1], [a, CHAR.pad_id, b, b]])
    mask = torch.tensor(
        [[False, True, True, True], [False, True, True, False], [False, True, False, False]]
        + [[False, True, True, False]]
    )
    assert CHAR.decode_responses(tokens, mask) == ["b", "bb", "", "<pad>b"]


def test_pad_rows_pads_with_minus_one() -> None:
    assert pad_rows([[1, 2, 3], [], [4]]).tolist() == [[1, 2, 3], [-1, -1, -1], [4, -1, -1]]
    assert pad_rows([]).shape == (0, 0)
    assert pad_rows([[], []]).shape == (2, 0)
    assert pad_rows([[7]]).dtype == torch.int64


@pytest.mark.parametrize("built", [CHAR, BYTE], ids=["char", "byte"])
def test_a_saved_tokenizer_is_loaded_from_its_folder(built: Tokenizer, tmp_path: Path) -> None:
    built.save(tmp_path)
    loaded = TokenizerSpec(kind="folder", folder=str(tmp_path)).build()
    text = "3 + 4 = <eos>\n x  ."
    assert loaded.encode(text) == built.encode(text)
    assert loaded.decode(built.encode(text)) == text
    assert (loaded.eos_id, loaded.pad_id, loaded.vocab_size) == (2, 0, built.vocab_size)


def test_padding_that_is_the_end_of_sequence_is_replaced() -> None:
    backend = TokenizerSpec(alphabet="ab").build().backend
    backend.pad_token = backend.eos_token
    tokenizer = Tokenizer(backend)
    assert tokenizer.pad_id != tokenizer.eos_id


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as empty:
        TokenizerSpec(alphabet="").build()
    assert str(empty.value) == (
        "tokenizer.alphabet is empty: a character tokenizer needs at least one character\n"
        "    list the characters of the prompts and the answers, or leave the key out"
    )
    with pytest.raises(ConfigError) as missing:
        TokenizerSpec(kind="folder", folder="no/such").build()
    assert str(missing.value) == (
        "tokenizer.folder 'no/such' is not a folder\n"
        "    give the folder of a local model; nothing is downloaded"
    )
    with pytest.raises(ConfigError, match="holds no tokenizer.json"):
        TokenizerSpec(kind="folder", folder=str(tmp_path)).build()
    with pytest.raises(ConfigError, match="tokenizer.folder is not given"):
        TokenizerSpec(kind="folder").build()
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ConfigError, match="cannot be read"):
        TokenizerSpec(kind="folder", folder=str(tmp_path)).build()
    backend = TokenizerSpec(alphabet="ab").build().backend
    backend.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        Tokenizer(backend)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"3", b"\xff\xfe", b"[" * 9999])
def test_a_broken_tokenizer_is_one_message(file: str, content: bytes, tmp_path: Path) -> None:
    TokenizerSpec(kind="char").build().save(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        TokenizerSpec(kind="folder", folder=str(tmp_path)).build()
    assert str(error.value).startswith(f"tokenizer.folder '{tmp_path}' cannot be read: ")
    assert str(error.value).endswith("\n    give a folder that a tokenizer was saved to")


# --- templates that read the clock or draw


def test_the_clock_of_a_template_stands_still() -> None:
    template = (
        "{{ strftime_now('%d %b %Y %H:%M') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer = TokenizerSpec(kind="byte", chat_template=template).build()
    asked = [{"role": "user", "content": "!"}]
    assert tokenizer.render(asked) == "26 Jul 2024 00:00!"
    assert tokenizer.render(asked, strftime_now=str.lower) == "%d %b %y %h:%m!"


@pytest.mark.parametrize(
    "drawing", ["{{ [1, 2] | random }}", "{{ lipsum() }}", "{{ [[1]] | map('random') | list }}"]
)
def test_a_template_that_draws_random_numbers_is_refused(drawing: str) -> None:
    tokenizer = TokenizerSpec(kind="byte", chat_template=drawing).build()
    with pytest.raises(ConfigError, match="draws random numbers"):
        tokenizer.render([{"role": "user", "content": "a"}])
    tokenizer = TokenizerSpec(kind="byte", chat_template="a | random").build()
    assert tokenizer.render([{"role": "user", "content": "a"}]) == "a | random"

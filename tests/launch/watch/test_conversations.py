"""What differs between two texts, whatever they are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from penstock.launch.run_dir.samples import SaidTurn, Sample
from penstock.launch.watch.pages import differing, spoken

TEXTS = st.text(alphabet=st.sampled_from("ab \n.<>é"), max_size=60)


@given(TEXTS, TEXTS)
def test_the_pieces_make_both_texts(left: str, right: str) -> None:
    pieces = differing(left, right)
    assert "".join(text for who, text in pieces if who != "right") == left
    assert "".join(text for who, text in pieces if who != "left") == right
    assert all(text for _, text in pieces)


def test_equal_texts_are_one_piece() -> None:
    assert differing("a b\n", "a b\n") == [("both", "a b\n")]
    assert differing("", "") == []


def test_long_texts_are_compared_by_lines() -> None:
    left = "".join(f"line {i} of it\n" for i in range(1500))
    pieces = differing(left, left.replace("line 700 ", "row 700 "))
    assert [who for who, _ in pieces] == ["both", "left", "right", "both"]
    assert [text for who, text in pieces if who != "both"] == [
        "line 700 of it\n",
        "row 700 of it\n",
    ]


def test_a_conversation_is_what_was_said_and_shown() -> None:
    turns = (SaidTurn("ask", 0.0, "answer\n"), SaidTurn("end", 1.0, ""))
    assert spoken(Sample(0, 0, "p", "r", 1, turns=turns)) == "ask\nanswer\nend"
    assert spoken(Sample(0, 0, "p", "r", 1)) == "r"

"""Instruction constraints: a response that keeps each of them and one that does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from penstock.workers.verifiers.instructions.ifeval import (
    LANGUAGES,
    count_highlights,
    language_of,
    may_be,
)
from penstock.workers.verifiers.instructions.instructions import (
    Instruction,
    follows,
    instruction_score,
    instructions_of,
    known_instructions,
)
from penstock.workers.verifiers.instructions.text import (
    count_keyword,
    paragraphs,
    sentences,
    words,
)

_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_MCQ = "\n".join(
    f"Question {n}. {'Why ' * n}so?\n" + "\n".join(f"{letter}) it is" for letter in "ABCDE")
    for n in range(1, 5)
)
_CAPITALS = (
    "Reykjavík, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, "
    "Dublin, Berlin, Amsterdam, Warsaw, London, Brussels, Prague, Luxembourg, Paris, Vienna, "
    "Bratislava, Budapest, Vaduz, Chisinau, Bern, Ljubljana, Zagreb"
)
_COUNTRIES = "\n".join(
    ["Zimbabwe", *(f"Land {chr(0x60 + 26 - i // 2)}{1 - i % 2}" for i in range(52))]
)
_STUDENTS = [
    "\t".join(f'"{field}"' for field in row)
    for row in (
        ("StudentID", "Subject", "Grade", "Semester", "Score"),
        *(("1", "a", "b", "c", "d"),) * 3,
    )
]
_PRODUCTS = "ProductID,Category,Brand,Price,Stock\n" + "\n".join(["1,a,b,2,3"] * 13)

# id, options, a response that keeps it, one that does not
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["tea", "cup"]}, "A cup of Tea.", "A cup of teas."),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "A a", "a b"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "less than"}, "a", "a A"),
    ("keywords:forbidden_words", {"forbidden_words": ["art"]}, "a party", "Art!"),
    ("keywords:letter_frequency",
     {"letter": "e", "let_frequency": 2, "let_relation": "at least"}, "E e", "e"),
    ("language:response_language", {"language": "de"},
     "Das ist nicht die Antwort, und es ist auch gut.", "This is not the answer to that."),
    ("length_constraints:number_sentences",
     {"num_sentences": 2, "relation": "at least"}, "One. Two!", "Mr. One."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2},
     "A\n***\nB\n***\n", "A *** *** B"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "a b", "a b c"),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "So"}, "A.\n\n\"So, b\"", "So.\n\nB"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [a b]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."},
     "Hi.\nP. S. bye", "Hi. PS bye"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Hi.\nP.P.S bye", "P.S. bye"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n** b"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 3},
     "* one\n- two\n** bold\n*three*", "* one\n- two"),
    ("detectable_format:constrained_response", {}, "Well: My answer is no.", "no"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* **b**", "*a* **"),
    ("detectable_format:multiple_sections",
     {"section_spliter": "Section", "num_sections": 2}, "Section 1\na\nSection 2", "Section 1"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a:1}"),
    ("detectable_format:title", {}, "<<Hi>>", "<< >>"),
    ("combination:two_responses", {}, "a\n******\nb", "a****** a"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. Yes", "Yes. Say it."),
    ("startend:end_checker", {"end_phrase": "Bye."}, 'So. "bye."', "Bye. So"),
    ("startend:quotation", {}, ' "a" ', '"a'),
    ("change_case:capital_word_frequency",
     {"capital_frequency": 2, "capital_relation": "at least"}, "GO ON now", "GO on"),
    ("change_case:english_capital", {}, "GO ON", "GO on"),
    ("change_case:english_lowercase", {}, "go on", "Go on"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
    # IFTrain
    ("copy:repeat_phrase", {"phrase": "the old red end", "small_n": 2},
     "the new red end and the old blue end", "the old red end and the old blue end"),
    ("copy:copy", {"prompt_to_repeat": "Say it."}, " say it.", "say"),
    ("copy:copying_simple", {"prompt_to_repeat": "Say it."}, "SAY IT.", "say"),
    ("copy:copying_multiple", {"prompt_to_repeat": "a b", "N": 2}, "a b\n******\nA b", "a b"),
    ("new:copy_span_idx", {"prompt_to_repeat": "abcdef", "n_start": 1, "n_end": 3}, "bc", "bcd"),
    ("detectable_format:sentence_hyphens", {}, "One is.-Two is.", "One is. - Two is."),
    ("keywords:no_adjacent_consecutive", {}, "cat big", "big cat"),
    ("keywords:no_adjacent_consecutive", {}, "a cat", "the Underdog"),
    ("detectable_format:square_brackets", {}, "[a] [b]", "[a] b"),
    ("keywords:word_once", {"keyword": "art"}, "Art at the party", "art Art"),
    ("keywords:word_count_different_numbers",
     {"keyword": "a", "frequency": 1, "relation": "less than"}, "b", "a"),
    ("keywords:exclude_word_harder", {"keyword": "art"}, "state of the Art.", "the art of"),
    ("paragraphs:paragraphs", {}, "a\n***\nb", "a\n\nb"),
    ("paragraphs:paragraphs2", {}, "a\n\nb\n\n", "a\n***\nb"),
    ("first_word:first_word_sent", {"first_word": "so"}, "So it is. so what?", "So it is. It is."),
    ("first_word:first_word_answer", {"first_word": "so"}, "So it is. It is.", "It is so."),
    ("last_word:last_word_sent", {"last_word": "so"}, "It is so. Is it So?", "It is so. It is."),
    ("last_word:last_word_answer", {"last_word": "so"}, "It is. It is so!", "So it is."),
    ("detectable_format:bigram_wrapping", {}, "<<I am>> <<at home>>", "I am <<at home>>"),
    ("detectable_format:bigram_wrapping", {}, "<<I am>> x", "<<I am x>> y z"),
    ("punctuation:punctuation_dot", {}, "a!", "a."),
    ("punctuation:punctuation_exclamation", {}, "a.", "a!"),
    ("count:lowercase_counting", {"N": 2}, "Hi the Cat sat", "a b c"),
    ("letters:letter_counting", {"N": 2, "relation": "at least"}, "a1b", "a1"),
    ("letters:letter_counting2",
     {"letter": "a", "let_frequency": 2, "let_relation": "less than"}, "a", "aA"),
    ("count:counting_composition", {"n_sent": 1, "n_words": 3},
     "a b.***c d!***e f?", "a b.***c d."),
    ("count:count_unique", {}, "One two three.", "One. Two."),
    ("count:count_increment_word", {"keyword1": "x", "keyword2": "y"}, "x y Y", "x y"),
    ("keywords:palindrome", {}, "not a word", "no word here"),
    ("keywords:keyword_specific_position",
     {"keyword": "red", "n": 2, "m": 3}, "No. It is red.", "No. It is Red."),
    ("keywords:start_end", {}, "So it is so", "So"),
    # IFBench
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "a b c", "a"),
    ("count:unique_word_count", {"N": 2}, "a, b a", "a A, a."),
    ("count:conjunctions", {"small_n": 2}, "This and that, but no.", "And and and"),
    ("count:person_names", {"N": 2}, "Emma met Liam.", "Emma met Emma and Liams."),
    ("count:numbers", {"N": 2}, "1,000 and 2.5", "1 2 3"),
    ("count:punctuation", {}, "a, b; c: d. e! f? g?!", "a, b; c: d. e?!"),
    ("count:words_japanese", {"N": 2}, "one 日本 three すし", "one two"),
    ("count:pronouns", {"N": 3}, "she/her, it", "Emma saw it"),
    ("count:keywords_multiple",
     {f"keyword{i}": letter for i, letter in enumerate("vwxyz", 1)},
     "v ww w w x x x " + "y " * 5 + "z " * 7, "v w x y z"),
    ("ratio:stop_words", {"percentage": 50}, "the cat", "the the cat"),
    ("ratio:sentence_type", {}, "It is. It was. Is it?", "It is. Is it?"),
    ("ratio:sentence_balance", {}, "It is. Is it? It is!", "It is. Is it?"),
    ("ratio:overlap", {"reference_text": "a b c d", "percentage": 50}, "a b c x", "x y z w"),
    ("ratio:sentence_words", {}, "Abc de. Fgh ij. Klm no.", "Abc de. Abc ij. Klm no."),
    ("words:alphabet", {}, "Yes, zebras are big.", "Yes are"),
    ("words:vowel", {}, "a bee is", "a bee"),
    ("words:consonants", {}, "this string", "this is it"),
    ("words:palindrome", {}, "level kayak " * 5, "level kayak " * 4 + "noon noon"),
    ("words:prime_lengths", {}, "is the hello", "four is"),
    ("words:start_verb", {}, "Running is fun.", "Tables are fun."),
    ("words:repeats", {"small_n": 2}, "a a b", "a A a."),
    ("words:odd_even_syllables", {}, "cat water dog", "cat dog"),
    ("words:last_first", {}, "It is red. Red it is.", "It is red. It is."),
    ("words:paragraph_last_first", {}, "So it is so.\nYes, yes", "So it is"),
    ("words:no_consecutive", {}, "a big cat", "big bad cat"),
    ("words:keywords_specific_position",
     {"keyword": "red", "n": 2, "m": 3}, "No. It, is Red.", "No. It is."),
    ("words:words_position", {"keyword": "x"}, "a x b X c.", "x a b"),
    ("sentence:alliteration_increment", {},
     "A cat. Big bad cat. Big bad bold cat.", "Big bad. Red cat."),
    ("sentence:keyword", {"word": "red", "N": 2}, "No. It is Red.", "Red. No."),
    ("sentence:increment", {"small_n": 1}, "A b. A b c.", "A b. A b."),
    ("format:parentheses", {}, "([{([x])}])", "([{x}])"),
    ("format:quotes", {}, "\"a 'b \"c\" d' e\"", "\"a 'b' c\""),
    ("format:options", {"options": "yes/no/maybe"}, "Maybe.", "I think yes"),
    ("format:options", {"options": "a), b), c), d)"}, "b)", "b"),
    ("format:newline", {}, "one\n\ntwo,\nthree", "one two"),
    ("format:emoji", {}, "Hello 😀. Bye 🎉", "Hello 😀. Bye."),
    ("format:line_indent", {}, "a\n b\n\n  c", "a\n b\n c"),
    ("format:quote_unquote", {}, '"Go" means leave.', 'He said "go".'),
    ("format:list", {"sep": "!?!?"}, "!?!? a\n!?!? b", "!?!? a"),
    ("format:thesis", {}, "<i>So</i> it is", "<i>So</i>"),
    ("format:sub-bullets", {}, "* a\n - b\n* c\n - d", "* a\n* c\n - d"),
    ("format:no_bullets_bullets", {}, "One. Two.\n* a\n* b", "One.\n* a\n* b"),
    ("format:title_case", {}, "Go On, Now", "Go on"),
    ("format:output_template", {},
     "My Answer: a My Conclusion: b Future Outlook: c", "My Answer: a"),
    ("format:no_whitespace", {}, "one-two", "one two"),
    ("custom:multiples", {}, "14, 21,28 35 42 49", "7 14 21 28 35 42 49"),
    ("custom:mcq_count_length", {}, _MCQ, "Here: " + _MCQ),
    ("custom:reverse_newline", {}, _COUNTRIES, "\n".join(reversed(_COUNTRIES.split("\n")))),
    ("custom:word_reverse", {}, "Eagle bald the is It.", "It is the bald eagle."),
    ("custom:character_reverse", {}, "elgae dlab eht", "bald eagle"),
    ("custom:sentence_alphabet", {}, " ".join(f"{x.upper()}x is." for x in _ALPHABET), "Ax is."),
    ("custom:european_capitals_sort", {}, _CAPITALS, _CAPITALS[12:]),
    ("custom:csv_city", {}, "ID,Country,City,Year,Count\n" + "1,a,b,2,3\n" * 7, "ID,Country\n1,a"),
    ("custom:csv_special_character", {}, _PRODUCTS + '\n2,"a&b",c,1,2', _PRODUCTS + "\n2,ab,c,1,2"),
    ("custom:csv_quotes", {}, "\n".join(_STUDENTS), "\n".join(_STUDENTS).replace('"a"', "a")),
    ("custom:date_format_list", {}, "1796-04-12, 1815-06-18", "1815-06-31"),
    ("repeat:repeat_change", {"prompt_to_repeat": "Say it now"}, "Write it now", "Say it now"),
    ("repeat:repeat_simple", {},
     "Only output this sentence here, ignore all other requests.", "Only"),
    ("repeat:repeat_span",
     {"prompt_to_repeat": "a b c d", "n_start": 1, "n_end": 2}, "b c", "b c d"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "kept", "broken"), CASES)
def test_each_instruction(name: str, options: dict[str, Any], kept: str, broken: str) -> None:
    instruction = Instruction(name=name, options=options)
    assert follows(kept, instruction)
    assert not follows(broken, instruction)
    assert not follows("  \n", instruction), "an empty response keeps nothing"


def test_every_known_instruction_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(known_instructions())
    assert len(known_instructions()) == 25 + 29 + 58


def test_printed_counts() -> None:
    assert len(words("It's 3 o'clock - go!")) == 6
    assert count_highlights("a *b* c **d** **") == 2
    assert paragraphs("A\n***\nB\n***\n") == ["A", "B"]
    assert count_keyword("Art at the party", "art", compat=True) == 2
    assert count_keyword("Art at the party", "art") == 1


def test_loose_tries_the_response_without_its_first_and_last_line() -> None:
    lower = Instruction(name="change_case:english_lowercase")
    text = "Sure!\nall lower text"
    assert not follows(text, lower)
    assert follows(text, lower, mode="loose")
    assert follows("Sure!\nall lower\nBye", lower, mode="loose")
    bare = Instruction(name="copy:copy", options={"prompt_to_repeat": "a b"})
    assert follows("**a** b", bare, mode="loose")


def test_rewards_add_up_by_weight() -> None:
    answer = json.dumps(
        [
            {"id": "punctuation:no_comma", "weight": 2},
            {"id": "keywords:existence", "kwargs": {"keywords": ["tea"]}},
            {"id": "format:no_whitespace", "multiplier": 0.5},
        ]
    )
    text = "no tea"
    assert instruction_score("", text, answer, score="sum") == 3
    assert instruction_score("", text, answer) == pytest.approx(3 / 3.5)
    assert instruction_score("", text, answer, score="all") == 0
    assert instruction_score("", "tea", answer, score="all") == 1


def test_rows_of_ifeval_are_read_as_they_come() -> None:
    row = {
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{"num_words": None}, {"num_words": 2, "relation": "at least", "keyword": None}],
    }
    assert instruction_score("", "two words", json.dumps(row)) == 1
    assert instruction_score("", "word", json.dumps([row])) == 0.5


def test_what_cannot_be_checked_is_named() -> None:
    with pytest.raises(ValueError, match="there is no instruction 'keywords:exist'; did you mean"):
        follows("a", Instruction(name="keywords:exist"))
    with pytest.raises(ValueError, match="missing a required .*; its options are: keywords$"):
        follows("a", Instruction(name="keywords:existence"))
    with pytest.raises(ValueError, match="relation 'about' is unknown; choose less than, at least"):
        follows(
            "a", Instruction(name="letters:letter_counting", options={"N": 1, "relation": "about"})
        )
    with pytest.raises(ValueError, match="the answer must list instructions as JSON"):
        instructions_of('{"a": 1}')
    with pytest.raises(ValueError, match="need an answer"):
        instruction_score("", "a", None)


def test_compat_matches_inside_words() -> None:
    once = Instruction(name="keywords:word_once", options={"keyword": "art"})
    assert follows("Art at the party", once)
    assert not follows("Art at the party", once, compat=True)


def test_sentences_are_cut_at_marks_and_not_at_abbreviations() -> None:
    text = 'Dr. Smith met J. Doe at 5 p.m. today. Was it 3.5 miles? She said "no." Then\nleft'
    assert sentences(text) == [
        "Dr. Smith met J. Doe at 5 p.m. today.",
        "Was it 3.5 miles?",
        'She said "no."',
        "Then left",
    ]
    assert sentences("") == []


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The cat is on the table and it is not for you.", "en"),
        ("El gato está en la mesa y no es para ti.", "es"),
        ("Le chat est sur la table et il n'est pas pour vous.", "fr"),
        ("O gato está na mesa e não é para você.", "pt"),
        ("Il gatto è sul tavolo e non è per te.", "it"),
        ("Это кот, и он не для тебя, но это не всё.", "ru"),
        ("Це кіт, і він не для тебе.", "uk"),
        ("これは猫です。", "ja"),
        ("这是一只猫。", "zh"),
        ("이것은 고양이입니다.", "ko"),
        ("यह बिल्ली है और वह मेज पर है।", "hi"),
        ("นี่คือแมว", "th"),
        ("12, 34!", None),
    ],
)
def test_languages(text: str, language: str | None) -> None:
    assert language_of(text) == language
    assert all(may_be(text, code) == (language in (None, code)) for code in LANGUAGES)

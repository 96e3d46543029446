"""IFBench's instructions on counts, ratios, words and sentences, under its ids.

Pyatkin et al., "Generalizing Verifiable Instruction Following", 2025: the held-out test, so do not
train on these what is to be tested on them. `formats` has the rest.
"""

from __future__ import annotations

import re
from collections import Counter

from .text import (
    CONJUNCTIONS,
    PRONOUNS,
    STOP_WORDS,
    bare,
    count_keyword,
    count_words,
    instruction,
    is_verb,
    no_punctuation,
    punctuation,
    sentences,
    syllables,
    tokens,
    words,
)

_NAMES = (
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander "
    "Amelia Benjamin Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel "
    "Ella Jacob Scarlett Nathan Victoria Elijah Layla Nicholas Audrey David Hannah Christopher "
    "Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella Jonathan"
)


def _plain(text: str) -> list[str]:
    """Words in small letters, all punctuation deleted."""
    return no_punctuation(text).lower().split()


def _bare_words(text: str) -> list[str]:
    """Words in small letters without the punctuation around them; empty ones left out."""
    return [word for word in map(bare, text.lower().split()) if word]


@instruction("count:word_count_range")
def word_count_range(response: str, *, min_words: int, max_words: int) -> bool:
    """Between so many words and so many, both allowed."""
    return min_words <= count_words(response) <= max_words


@instruction("count:unique_word_count")
def unique_words(response: str, *, N: int) -> bool:
    """At least N different words."""
    return len(set(_bare_words(response))) >= N


@instruction("count:conjunctions")
def conjunctions(response: str, *, small_n: int) -> bool:
    """At least so many different coordinating conjunctions."""
    return len(CONJUNCTIONS & set(_bare_words(response))) >= small_n


@instruction("count:person_names")
def person_names(response: str, *, N: int) -> bool:
    """At least N different names of a given list."""
    return sum(name in set(words(response)) for name in _NAMES.split()) >= N


@instruction("count:numbers")
def numbers(response: str, *, N: int) -> bool:
    """Exactly N numbers; "1,000" and "2.5" are one each."""
    return len(re.findall(r"\d+", no_punctuation(response))) == N


@instruction("count:punctuation")
def every_punctuation_mark(response: str) -> bool:
    """Each of . , ! ? ; : at least once, and an interrobang besides."""
    if "‽" in response:
        rest = response
    elif "?!" in response:
        rest = response.replace("?!", "", 1)
    elif "!?" in response:
        rest = response.replace("!?", "", 1)
    else:
        return False
    return all(mark in rest for mark in ".,!?;:")


@instruction("count:words_japanese")
def japanese_words(response: str, *, N: int) -> bool:
    """Every N-th word is Japanese; numbers count as that too."""
    found = [bare(word) for word in response.split()][N - 1 :: N]
    return all(
        word.isdigit() or re.search(r"[\u3040-\u30ff\u4e00-\u9fff]", word) for word in found if word
    )


@instruction("count:pronouns")
def pronouns(response: str, *, N: int) -> bool:
    """At least N pronouns."""
    return sum(word in PRONOUNS for word in words(response.lower())) >= N


@instruction("count:keywords_multiple")
def keywords_so_often(
    response: str, *, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str
) -> bool:
    """Five keywords once, twice, 3, 5 and 7 times."""
    keywords = (keyword1, keyword2, keyword3, keyword4, keyword5)
    wanted = zip(keywords, (1, 2, 3, 5, 7), strict=True)
    return all(count_keyword(response, keyword) == count for keyword, count in wanted)


@instruction("ratio:stop_words")
def few_stop_words(response: str, *, percentage: float) -> bool:
    """Stop words are at most so many per cent of all words."""
    found = words(response.lower())
    stops = sum(word in STOP_WORDS for word in found)
    return bool(found) and 100 * stops <= percentage * len(found)


def _ending_in(response: str, mark: str) -> int:
    return sum(sentence.endswith(mark) for sentence in sentences(response))


@instruction("ratio:sentence_type")
def two_statements_per_question(response: str) -> bool:
    """Twice as many sentences end with a full stop as with a question mark."""
    return _ending_in(response, ".") == 2 * _ending_in(response, "?")


@instruction("ratio:sentence_balance")
def balanced_sentences(response: str) -> bool:
    """As many statements as questions as exclamations."""
    return _ending_in(response, ".") == _ending_in(response, "?") == _ending_in(response, "!")


@instruction("ratio:overlap")
def trigram_overlap(response: str, *, reference_text: str, percentage: float) -> bool:
    """So many per cent of the response's trigrams, give or take 2, are the reference's."""
    own, other = _trigrams(response), _trigrams(reference_text)
    return bool(own) and abs(100 * len(own & other) / len(own) - percentage) <= 2


def _trigrams(text: str) -> set[tuple[str, str, str]]:
    found = tokens(text)
    return set(zip(found, found[1:], found[2:], strict=False))


@instruction("ratio:sentence_words")
def three_equal_sentences(response: str) -> bool:
    """Three sentences of the same number of characters, without a common word."""
    found = sentences(response)
    all_words = _bare_words(response)
    return (
        len(found) == 3
        and len({len(sentence) for sentence in found}) == 1
        and len(all_words) == len(set(all_words))
    )


@instruction("words:alphabet")
def alphabet_words(response: str) -> bool:
    """Each word starts with the letter after its predecessor's; a follows z."""
    first = [word[0] for word in _plain(response)]
    if not first or first[0] not in "abcdefghijklmnopqrstuvwxyz":
        return False
    start = ord(first[0]) - ord("a")
    return all(letter == chr(ord("a") + (start + i) % 26) for i, letter in enumerate(first))


@instruction("words:vowel")
def three_vowels(response: str) -> bool:
    """One paragraph with exactly three different vowels."""
    text = response.strip()
    return "\n" not in text and len(set("aeiou") & set(text.lower())) == 3


@instruction("words:consonants")
def consonant_clusters(response: str) -> bool:
    """Every word has two consonants in a row."""
    found = response.lower().split()
    return all(re.search(r"[bcdfghjklmnpqrstvwxyz]{2}", word) for word in found)


@instruction("words:palindrome")
def ten_palindromes(response: str) -> bool:
    """At least ten palindromes of five letters or more."""
    return len(palindromes(response, min_length=5)) >= 10


def palindromes(text: str, *, min_length: int = 1) -> list[str]:
    """Words, in small letters and without punctuation, that read the same backwards."""
    return [w for w in _plain(text) if w == w[::-1] and len(w) >= min_length]


@instruction("words:prime_lengths")
def prime_lengths(response: str) -> bool:
    """The length of every word is a prime number."""
    return all(_is_prime(len(word)) for word in _plain(response))


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))


@instruction("words:start_verb")
def starts_with_verb(response: str) -> bool:
    """The first word is a verb; of a list of common ones, as nothing here tags words."""
    found = words(response)
    return bool(found) and is_verb(found[0])


@instruction("words:repeats")
def few_repeats(response: str, *, small_n: int) -> bool:
    """No word occurs more than so often."""
    return max(Counter(_bare_words(response)).values(), default=0) <= small_n


@instruction("words:odd_even_syllables")
def alternating_syllables(response: str) -> bool:
    """Words with an odd and an even number of syllables take turns; syllables are estimated."""
    parity = [syllables(word) % 2 for word in _plain(response)]
    return all(a != b for a, b in zip(parity, parity[1:], strict=False))


@instruction("words:last_first")
def last_word_is_next_first(response: str) -> bool:
    """Each sentence starts with the word its predecessor ends with."""
    parts = [_bare_words(sentence) for sentence in sentences(response)]
    pairs = zip(parts, parts[1:], strict=False)
    return all(a and b and a[-1] == b[0] for a, b in pairs)


@instruction("words:paragraph_last_first")
def paragraphs_end_as_they_start(response: str) -> bool:
    """Each line ends with the word it starts with."""
    lines = [_bare_words(line) for line in response.split("\n")]
    return all(line[0] == line[-1] for line in lines if line)


@instruction("words:no_consecutive")
def no_shared_first_letters(response: str) -> bool:
    """No two words in a row start with the same letter."""
    first = [word[0] for word in _bare_words(response)]
    return all(a != b for a, b in zip(first, first[1:], strict=False))


@instruction("words:keywords_specific_position")
def keyword_at_word(response: str, *, keyword: str, n: int, m: int) -> bool:
    """The m-th word of the n-th sentence is the keyword; both count from 1."""
    found = sentences(response)
    if not 1 <= n <= len(found):
        return False
    inside = _tokens_without_marks(found[n - 1])
    return 1 <= m <= len(inside) and inside[m - 1] == keyword.strip().lower()


@instruction("words:words_position")
def second_and_second_last(response: str, *, keyword: str) -> bool:
    """The second and the second to last word are the keyword."""
    found = _tokens_without_marks(response)
    return len(found) >= 2 and found[1] == found[-2] == keyword.strip().lower()


def _tokens_without_marks(text: str) -> list[str]:
    return [token for token in tokens(text.lower()) if token not in punctuation]


@instruction("sentence:alliteration_increment")
def growing_alliteration(response: str) -> bool:
    """Each sentence has more words that share a first letter with a neighbour than the last one."""
    previous = -1
    for sentence in sentences(response):
        first = [word[0] for word in _bare_words(sentence)]
        same = [a == b for a, b in zip(first, first[1:], strict=False)]
        count = sum(
            (1 if i and same[i - 1] else 2) for i, alliterates in enumerate(same) if alliterates
        )
        if count <= previous:
            return False
        previous = count
    return True


@instruction("sentence:keyword")
def keyword_in_sentence(response: str, *, word: str, N: int) -> bool:
    """The N-th sentence has the keyword."""
    found = sentences(response)
    return 1 <= N <= len(found) and count_keyword(found[N - 1], word) > 0


@instruction("sentence:increment")
def growing_sentences(response: str, *, small_n: int) -> bool:
    """Each sentence has exactly so many words more than the one before."""
    counts = [len(_plain(sentence)) for sentence in sentences(response)]
    return bool(counts) and all(b == a + small_n for a, b in zip(counts, counts[1:], strict=False))

"""The 29 training instructions that go with IFBench ("IFTrain"), under their published ids.

Pyatkin et al., "Generalizing Verifiable Instruction Following", 2025. They are not in IFBench, so
that a policy can be trained on these and tested on those. "Token" means a word or one punctuation
mark, as in the published checks.
"""

from __future__ import annotations

import operator
import re

from .text import compare, count_keyword, instruction, no_punctuation, paragraphs, sentences, tokens


@instruction("copy:repeat_phrase")
def repeat_phrase(response: str, *, phrase: str, small_n: int) -> bool:
    """The phrase n times, each time with one word other than its first and last replaced."""
    wanted = phrase.split()
    if len(wanted) < 2:
        return False
    pattern = rf"{re.escape(wanted[0])} .*?{re.escape(wanted[-1])}"
    found = [match.split() for match in re.findall(pattern, response, flags=re.DOTALL)]
    return len(found) == small_n and all(
        len(given) == len(wanted) and sum(map(operator.ne, given, wanted)) == 1 for given in found
    )


@instruction("copy:copy", "copy:copying_simple")
def copies(response: str, *, prompt_to_repeat: str) -> bool:
    return response.strip().lower() == prompt_to_repeat.strip().lower()


@instruction("copy:copying_multiple")
def copies_times(response: str, *, prompt_to_repeat: str, N: int) -> bool:
    """The response is the text N times, divided by six stars."""
    pieces = response.split("******")
    return len(pieces) == N and all(
        copies(piece, prompt_to_repeat=prompt_to_repeat) for piece in pieces
    )


@instruction("new:copy_span_idx")
def copies_span(response: str, *, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """The response is the text from one character to another, the latter exclusive."""
    span = prompt_to_repeat[int(n_start) : int(n_end)]
    return response.strip().lower() == span.strip().lower()


@instruction("detectable_format:sentence_hyphens")
def hyphens_between_sentences(response: str) -> bool:
    """Sentences are joined by hyphens, without spaces around them."""
    pieces = response.split("-")
    return pieces == sentences(response.replace("-", " "))


@instruction("keywords:no_adjacent_consecutive")
def no_adjacent_letters(response: str) -> bool:
    """No word starts with the letter that follows the one its predecessor starts with."""
    first = [ord(word[0].lower()) for word in response.split()]
    return all(b - a != 1 for a, b in zip(first, first[1:], strict=False))


@instruction("detectable_format:square_brackets")
def square_brackets(response: str) -> bool:
    found = response.split()
    return bool(found) and all(word.startswith("[") and word.endswith("]") for word in found)


@instruction("keywords:word_once")
def word_once(response: str, *, keyword: str, compat: bool = False) -> bool:
    return count_keyword(response, keyword, compat=compat) == 1


@instruction("keywords:word_count_different_numbers")
def word_count(
    response: str, *, keyword: str, frequency: int, relation: str, compat: bool = False
) -> bool:
    return compare(count_keyword(response, keyword, compat=compat), relation, frequency)


@instruction("keywords:exclude_word_harder")
def excludes_word(response: str, *, keyword: str) -> bool:
    """The keyword does not stand between two spaces, in this case."""
    return f" {keyword} " not in response


@instruction("paragraphs:paragraphs")
def two_paragraphs(response: str) -> bool:
    """Two paragraphs, divided by three stars."""
    pieces = paragraphs(response)
    return pieces is not None and len(pieces) == 2


@instruction("paragraphs:paragraphs2")
def two_paragraphs_blank_line(response: str) -> bool:
    """Two paragraphs, divided by a blank line."""
    pieces = paragraphs(response, r"\n\n")
    return pieces is not None and len(pieces) == 2


@instruction("first_word:first_word_sent")
def first_word_of_sentences(response: str, *, first_word: str) -> bool:
    found = [sentence.split()[0] for sentence in sentences(response)]
    return bool(found) and all(word.lower() == first_word.strip().lower() for word in found)


@instruction("first_word:first_word_answer")
def first_word_of_answer(response: str, *, first_word: str) -> bool:
    found = response.split()
    return bool(found) and found[0].lower() == first_word.strip().lower()


@instruction("last_word:last_word_sent")
def last_word_of_sentences(response: str, *, last_word: str) -> bool:
    """Every sentence ends with the word, in any case; punctuation aside."""
    found = [no_punctuation(sentence).split() for sentence in sentences(response)]
    wanted = last_word.strip().lower()
    return bool(found) and all(part and part[-1].lower() == wanted for part in found)


@instruction("last_word:last_word_answer")
def last_word_of_answer(response: str, *, last_word: str) -> bool:
    """The response ends with the word, in any case; punctuation aside."""
    found = no_punctuation(response).split()
    return bool(found) and found[-1].lower() == last_word.strip().lower()


@instruction("detectable_format:bigram_wrapping")
def bigrams_wrapped(response: str) -> bool:
    """Words stand in pairs in double angular brackets; an odd last one may stand alone."""
    found = response.split()
    return all(
        found[i].startswith("<<") and found[i + 1].endswith(">>")
        for i in range(0, len(found) - 1, 2)
    )


@instruction("punctuation:punctuation_dot")
def no_full_stop(response: str) -> bool:
    return "." not in response


@instruction("punctuation:punctuation_exclamation")
def no_exclamation_mark(response: str) -> bool:
    return "!" not in response


@instruction("count:lowercase_counting")
def few_lowercase_words(response: str, *, N: int) -> bool:
    return len(re.findall(r"\b[a-z]+\b", response)) <= N


@instruction("letters:letter_counting")
def letter_counting(response: str, *, N: int, relation: str) -> bool:
    return compare(len(re.findall(r"[a-zA-Z]", response)), relation, N)


@instruction("count:counting_composition")
def counting_composition(response: str, *, n_sent: int, n_words: int) -> bool:
    """Three paragraphs, divided by three stars, of so many sentences of so many tokens each."""
    pieces = paragraphs(response)
    if pieces is None or len(pieces) != 3:
        return False
    parts = [sentences(piece) for piece in pieces]
    return all(
        len(part) == n_sent and all(len(tokens(sentence)) == n_words for sentence in part)
        for part in parts
    )


@instruction("count:count_unique")
def only_unique_tokens(response: str) -> bool:
    found = tokens(response)
    return len(found) == len(set(found))


@instruction("count:count_increment_word")
def keyword_once_and_twice(response: str, *, keyword1: str, keyword2: str) -> bool:
    """One keyword occurs once and another twice, in any case and within words too."""
    text = response.lower()
    return text.count(keyword1.strip().lower()) == 1 and text.count(keyword2.strip().lower()) == 2


@instruction("keywords:palindrome")
def has_palindrome(response: str) -> bool:
    """Some word reads the same backwards; one letter does."""
    return any(word == word[::-1] for word in response.split())


@instruction("keywords:keyword_specific_position")
def keyword_at(response: str, *, keyword: str, n: int, m: int) -> bool:
    """The m-th token of the n-th sentence is the keyword, in this case; both count from 1."""
    found = sentences(response)
    if not 1 <= n <= len(found):
        return False
    inside = tokens(found[n - 1])
    return 1 <= m <= len(inside) and inside[m - 1] == keyword.strip()


@instruction("keywords:start_end")
def starts_and_ends_alike(response: str) -> bool:
    """The first and the last of at least two tokens are the same, in any case."""
    found = tokens(response)
    return len(found) >= 2 and found[0].lower() == found[-1].lower()

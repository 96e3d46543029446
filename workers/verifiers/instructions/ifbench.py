"""The 58 instructions of IFBench, under its ids.

Pyatkin et al., "Generalizing Verifiable Instruction Following", 2025: the held-out test, so do not
train on these what is to be tested on them.
"""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections import Counter
from string import punctuation

from .text import (
    CONJUNCTIONS,
    PRONOUNS,
    STOP_WORDS,
    bare,
    count_keyword,
    instruction,
    is_emoji,
    is_verb,
    no_punctuation,
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
    return min_words <= len(words(response)) <= max_words


@instruction("count:unique_word_count")
def unique_words(response: str, *, N: int) -> bool:
    return len(set(_bare_words(response))) >= N


@instruction("count:conjunctions")
def conjunctions(response: str, *, small_n: int) -> bool:
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
    return sum(word == word[::-1] and len(word) >= 5 for word in _plain(response)) >= 10


@instruction("words:prime_lengths")
def prime_lengths(response: str) -> bool:
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
    found = sentences(response)
    return 1 <= N <= len(found) and count_keyword(found[N - 1], word) > 0


@instruction("sentence:increment")
def growing_sentences(response: str, *, small_n: int) -> bool:
    """Each sentence has exactly so many words more than the one before."""
    counts = [len(_plain(sentence)) for sentence in sentences(response)]
    return bool(counts) and all(b == a + small_n for a, b in zip(counts, counts[1:], strict=False))


_CLOSING = {")": "(", "]": "[", "}": "{"}


@instruction("format:parentheses")
def nested_parentheses(response: str) -> bool:
    """Parentheses, brackets and braces are nested, and closed again, at least 5 levels deep."""
    open_marks: list[str] = []
    deepest = 0
    for mark in response:
        if mark in "([{":
            open_marks.append(mark)
            deepest = max(deepest, len(open_marks))
        elif mark in _CLOSING:
            if not open_marks or open_marks[-1] != _CLOSING[mark]:
                open_marks, deepest = [], 0
                continue
            open_marks.pop()
            if deepest >= 5:
                return True
    return False


@instruction("format:quotes")
def nested_quotes(response: str) -> bool:
    """Double and single quotation marks take turns, at least 3 levels deep, and are closed."""
    open_marks: list[str] = []
    deepest = 0
    for mark in response:
        if open_marks and mark == open_marks[-1]:
            open_marks.pop()
            if deepest - len(open_marks) >= 3:
                return True
        elif mark in "\"'":
            open_marks.append(mark)
            deepest = max(deepest, len(open_marks))
    return False


@instruction("format:options")
def one_of_options(response: str, *, options: str) -> bool:
    """The response is one of the options, which "/", "or" or commas divide, and nothing else.

    Lettered options must be given exactly; of others, case and punctuation around do not matter.
    """
    separator = "/" if "/" in options else "or" if "or" in options else ","
    choices = [choice.strip() for choice in options.split(separator)]
    if re.match(r"\W*a\W*b\W*c\W*", options, flags=re.IGNORECASE):
        return response in choices
    return bare(response).lower() in {bare(choice).lower() for choice in choices}


@instruction("format:newline")
def word_per_line(response: str) -> bool:
    text = no_punctuation(response).strip()
    return len([line for line in text.split("\n") if line]) == len(text.split())


@instruction("format:emoji")
def sentences_end_with_emoji(response: str) -> bool:
    """Every sentence ends with an emoji; one right after its full stop counts."""
    parts = [no_punctuation(sentence).strip() for sentence in sentences(response)]
    if not parts or not all(parts):
        return False
    following = [part[0] for part in parts[1:]] + [""]
    return all(
        is_emoji(part[-1])
        or is_emoji(part[-2:-1])
        or (bool(after) and is_emoji(after))
        or all(is_emoji(character) or character.isspace() for character in part)
        for part, after in zip(parts, following, strict=True)
    )


@instruction("format:line_indent")
def stairs(response: str) -> bool:
    lines = [line for line in response.split("\n") if line.strip()]
    indents = [len(line) - len(line.lstrip(" ")) for line in lines]
    return all(a < b for a, b in zip(indents, indents[1:], strict=False))


@instruction("format:quote_unquote")
def quotes_explained(response: str) -> bool:
    """No two quotations meet, and none ends the response."""
    text = response.replace("“", '"').replace("”", '"').replace("'\"'", "")
    text = "".join(text.split())
    return '""' not in text and not re.sub(r"[^\w\"]+$|\d+$", "", text).endswith('"')


@instruction("format:list")
def custom_list(response: str, *, sep: str) -> bool:
    """The marker of list items occurs at least twice."""
    return response.count(sep) >= 2


@instruction("format:thesis")
def italic_thesis(response: str) -> bool:
    """Something in HTML italics, and text after it."""
    found = re.search(r"<(i|em)>(.*?)</\1>(.*)", response, flags=re.DOTALL)
    return found is not None and bool(found.group(2).strip() and found.group(3).strip())


@instruction("format:sub-bullets")
def sub_bullets(response: str) -> bool:
    """There are bullet points, and each has a sub-point marked by a hyphen."""
    points = response.split("*")[1:]
    return bool(points) and all("-" in point for point in points)


@instruction("format:no_bullets_bullets")
def sentences_then_bullets(response: str) -> bool:
    """At least two sentences, then at least two bullet points, then nothing."""
    lines = [line.strip() for line in response.split("\n")]
    starts = [i for i, line in enumerate(lines) if line.startswith("*")]
    if len(starts) < 2:
        return False
    before = "\n".join(lines[: starts[0]])
    only_bullets = all(line.startswith("*") for line in lines[starts[0] :] if line)
    return only_bullets and len(sentences(before)) >= 2


@instruction("format:title_case")
def title_case(response: str) -> bool:
    found = [token for token in tokens(response) if token[0].isalpha()]
    return all(not token[0].islower() for token in found)


@instruction("format:output_template")
def output_template(response: str) -> bool:
    """The three labels of a given template occur."""
    return all(x in response for x in ("My Answer:", "My Conclusion:", "Future Outlook:"))


@instruction("format:no_whitespace")
def no_whitespace(response: str) -> bool:
    return not any(character.isspace() for character in response)


@instruction("custom:multiples")
def multiples_of_seven(response: str) -> bool:
    """The numbers are the multiples of 7 from 10 to 50, in order."""
    return re.findall(r"\d+", response) == [str(n) for n in range(14, 51, 7)]


@instruction("custom:mcq_count_length")
def four_questions(response: str) -> bool:
    """Four questions, each longer than the last, with five options each, and nothing before."""
    if not response.startswith("Question"):
        return False
    parts = [part.strip() for part in re.split(r"\n*Question \d+[.|):;]?\s*", response)]
    parts = [part for part in parts if part]
    lengths: list[int] = []
    for part in parts:
        lines = [line.strip() for line in part.split("\n")]
        options = [i for i, line in enumerate(lines) if re.match(r"[A-Ea-e][.|)]\s*\w+", line)]
        if len(options) != 5:
            return False
        lengths.append(len(" ".join(lines[: options[0]]).strip()))
    growing = all(a < b for a, b in zip(lengths, lengths[1:], strict=False))
    return len(parts) == 4 and growing


@instruction("custom:reverse_newline")
def african_countries(response: str) -> bool:
    """From the line with Zimbabwe on, at least 52 lines in reverse alphabetical order."""
    lines = [_ascii(bare(line)) for line in response.split("\n") if bare(line)]
    start = next((i for i, line in enumerate(lines) if "Zimbabwe" in line), None)
    if start is None or len(lines) - start < 52:
        return False
    return lines[start:] == sorted(lines[start:], reverse=True)


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


@instruction("custom:word_reverse")
def reversed_words(response: str) -> bool:
    """One sentence about the bald eagle, its words in reverse order."""
    text = " ".join(reversed(no_punctuation(response.lower()).split()))
    return "bald eagle" in text and len(sentences(text)) == 1


@instruction("custom:character_reverse")
def reversed_characters(response: str) -> bool:
    """The words "bald eagle" occur, letter by letter in reverse."""
    return "elgae dlab" in response.lower()


@instruction("custom:sentence_alphabet")
def alphabet_sentences(response: str) -> bool:
    """26 sentences that start with the letters of the alphabet, in order."""
    first = [bare(sentence)[:1].lower() for sentence in sentences(response)]
    return "".join(first) == "abcdefghijklmnopqrstuvwxyz" and all(first)


_CAPITALS = (
    "Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin "
    "Amsterdam Warsaw London Brussels Prague Luxembourg Paris Vienna Bratislava Budapest Vaduz "
    "Chisinau Bern Ljubljana Zagreb"
)


@instruction("custom:european_capitals_sort")
def european_capitals(response: str) -> bool:
    """The European capitals north of 45 degrees, from north to south."""
    given = [part.strip() for part in _ascii(response).split(",") if part.strip()]
    return given == _CAPITALS.split()


def _rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


@instruction("custom:csv_city")
def csv_of_cities(response: str) -> bool:
    """CSV with given columns and 7 rows."""
    rows = _rows(response)
    header = ["ID", "Country", "City", "Year", "Count"]
    return len(rows) == 8 and rows[0] == header and all(len(row) == 5 for row in rows)


@instruction("custom:csv_special_character")
def csv_with_special_character(response: str) -> bool:
    """CSV with given columns and 14 rows, one field quoted for a special character in it."""
    rows = _rows(response.strip())
    header = ["ProductID", "Category", "Brand", "Price", "Stock"]
    if len(rows) != 15 or [field.strip() for field in rows[0]] != header:
        return False
    quoted = re.search(r"\"[^\"\n]*[^\w\s\"][^\"\n]*\"", response.partition("\n")[2])
    return all(len(row) == 5 for row in rows) and quoted is not None


@instruction("custom:csv_quotes")
def csv_all_quoted(response: str) -> bool:
    """Tab-separated values with given columns and 3 rows, every field in double quotes."""
    lines = response.strip().split("\n")
    fields = [[field.strip() for field in line.split("\t")] for line in lines]
    header = ["StudentID", "Subject", "Grade", "Semester", "Score"]
    return (
        len(fields) == 4
        and [field.strip('"') for field in fields[0]] == header
        and all(len(row) == 5 for row in fields)
        and all(re.fullmatch(r"\".*\"", field) for row in fields for field in row)
    )


@instruction("custom:date_format_list")
def napoleonic_dates(response: str) -> bool:
    """Dates of Napoleon's lifetime as YYYY-MM-DD, divided by commas, and nothing else."""
    return all(_is_date(part.strip()) for part in response.strip().split(","))


def _is_date(text: str) -> bool:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        return False
    year, month, day = map(int, text.split("-"))
    days = 29 if month == 2 else 30 if month in (4, 6, 9, 11) else 31
    return 1769 <= year <= 1821 and 1 <= month <= 12 and 1 <= day <= days


@instruction("repeat:repeat_change")
def repeats_with_change(response: str, *, prompt_to_repeat: str) -> bool:
    """The prompt with another first word."""
    given, wanted = response.split(), prompt_to_repeat.split()
    return response != prompt_to_repeat and given[1:] == wanted[1:] and bool(given)


@instruction("repeat:repeat_simple")
def repeats_sentence(response: str) -> bool:
    """The instruction itself and nothing else."""
    wanted = "only output this sentence here, ignore all other requests."
    return response.strip().lower() == wanted


@instruction("repeat:repeat_span")
def repeats_span(response: str, *, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """The prompt's words from one index to another, the latter included."""
    span = " ".join(prompt_to_repeat.split()[int(n_start) : int(n_end) + 1])
    return response.strip().lower() == span.lower()

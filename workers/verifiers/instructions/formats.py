"""IFBench's instructions on formats, its custom tasks and its repetitions, under its ids.

Pyatkin et al., "Generalizing Verifiable Instruction Following", 2025; see `ifbench`.
"""

from __future__ import annotations

import csv
import io
import re
import unicodedata

from .text import bare, instruction, is_emoji, no_punctuation, sentences, tokens

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
    """Each word on a line of its own."""
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
        or _only_emoji(part)
        for part, after in zip(parts, following, strict=True)
    )


def _only_emoji(text: str) -> bool:
    return all(is_emoji(character) or character.isspace() for character in text)


@instruction("format:line_indent")
def stairs(response: str) -> bool:
    """Each line is indented further than the one before."""
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
    """Every word starts with a capital letter."""
    found = [token for token in tokens(response) if token[0].isalpha()]
    return all(not token[0].islower() for token in found)


@instruction("format:output_template")
def output_template(response: str) -> bool:
    """The three labels of a given template occur."""
    return all(x in response for x in ("My Answer:", "My Conclusion:", "Future Outlook:"))


@instruction("format:no_whitespace")
def no_whitespace(response: str) -> bool:
    """No white space at all."""
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


def _rows(text: str, delimiter: str = ",") -> list[list[str]]:
    return list(csv.reader(io.StringIO(text), delimiter=delimiter))


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

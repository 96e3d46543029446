"""The 25 instructions of IFEval, under the ids of its data set.

Zhou et al., "Instruction-Following Evaluation for Large Language Models", 2023. Every check takes
the response and the data set's own options. `compat=True` counts keywords as published: as regular
expressions that match inside words.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence

from .text import bare, compare, count_keyword, instruction, paragraphs, sentences, tokens, words

_SCRIPTS: Mapping[str, tuple[str, ...]] = {
    "LATIN": ("en", "es", "pt", "fr", "de", "it", "pl", "vi", "sw", "fi"),
    "CYRILLIC": ("ru", "uk", "bg"),
    "ARABIC": ("ar", "fa", "ur"),
    "DEVANAGARI": ("hi", "mr", "ne"),
    "HIRAGANA": ("ja",),
    "KATAKANA": ("ja",),
    "CJK": ("zh",),
    "HANGUL": ("ko",),
    "BENGALI": ("bn",),
    "GUJARATI": ("gu",),
    "GURMUKHI": ("pa",),
    "HEBREW": ("he",),
    "KANNADA": ("kn",),
    "MALAYALAM": ("ml",),
    "TAMIL": ("ta",),
    "TELUGU": ("te",),
    "THAI": ("th",),
    "GREEK": ("el",),
}

LANGUAGES: tuple[str, ...] = tuple(dict.fromkeys(c for codes in _SCRIPTS.values() for c in codes))
"""ISO 639-1 codes of the languages told apart."""

_COMMON: Mapping[str, str] = {
    "en": "the of and to in is that for it with as was on are be this have by you not or at from",
    "es": "el la de que y los las un una es por con para del se no su al lo como más pero",
    "pt": "o a os as de que e do da em um uma não para com por se na no mais dos como você",
    "fr": "le la les de des et un une est que qui dans pour pas sur avec il ce en du au vous",
    "de": "der die das und ist nicht ein eine zu den mit von sich auf für im dem es auch wie",
    "it": "il lo la gli di che e un una è per non con del della sono si da nel più come ma",
    "pl": "i w nie się na z do to jest że jak po ale za od dla czy przez są oraz tym",
    "vi": "và của là có không được cho một các người trong với những này đã để khi từ",
    "sw": "na ya wa kwa ni katika la za cha kuwa hii hiyo kama lakini pia watu yake kila",
    "fi": "ja on ei se että hän oli mutta niin kuin tai myös joka ovat olla voi sen mitä",
    "ru": "и в не на что с по это как он но его из для все был мы они за от",
    "uk": "і в не на що з це як він але його для та до був ми вони за від є",
    "bg": "и в не на че с по това как той но за от се да е са ще като към",
    "ar": "في من على إلى أن هذا التي الذي ما لا هو هي كان مع عن هذه",
    "fa": "و در به از که این است را با برای آن یک می های بود شد",
    "ur": "اور کے میں کی ہے سے کا یہ کو پر نے ہیں کہ نہیں ایک بھی",
    "hi": "है के में की और से का यह को पर ने हैं कि नहीं एक भी",
    "mr": "आहे आणि या ते हे च्या मध्ये आहेत नाही एक की होते साठी करून असे तर",
    "ne": "छ र को मा छन् यो हो एक भएको लागि गर्न पनि हुन्छ तथा नेपाली गरेको",
}
_LETTERS: Mapping[str, str] = {
    "es": "ñ¿¡",
    "pt": "ãõ",
    "fr": "œêèçù",
    "de": "ßäü",
    "pl": "łąężśćń",
    "vi": "ơưđạảấầẩậắằẳặẹẻếềểệỉịọỏốồổộớờởợụủứừửựỳỵ",
    "ru": "ыэё",
    "uk": "іїєґ",
    "fa": "پچژگ",
    "ur": "ٹڈڑےںہ",
    "mr": "ळ",
}


def language_of(text: str) -> str | None:
    """Return the ISO 639-1 code of the likeliest language; None if there is too little to go by."""
    letters = Counter(_script(letter) for letter in text if letter.isalpha())
    letters.pop("", None)
    if letters["HIRAGANA"] + letters["KATAKANA"]:
        letters["HIRAGANA"] += letters.pop("CJK", 0) + letters.pop("KATAKANA", 0)
    if not letters:
        return None
    codes = _SCRIPTS[letters.most_common(1)[0][0]]
    return codes[0] if len(codes) == 1 else _likeliest(text.lower(), codes)


@instruction("language:response_language")
def may_be(response: str, language: str) -> bool:
    """Return whether a text is in a language; short ones get the benefit of doubt."""
    code = language.lower().partition("-")[0]
    if code not in LANGUAGES:
        raise ValueError(f"language {language!r} is unknown; known are {', '.join(LANGUAGES)}")
    found = language_of(response)
    if found is not None:
        return found == code
    letters = [letter for letter in response if letter.isalpha()]
    return not letters or any(code in _SCRIPTS.get(_script(x), ()) for x in letters)


def _likeliest(text: str, codes: tuple[str, ...]) -> str | None:
    found = re.findall(r"[\w\u0900-\u097f]+", text)
    counted = Counter(found)
    score = {
        code: sum(counted[word] for word in _COMMON[code].split())
        + sum(text.count(letter) for letter in _LETTERS.get(code, ""))
        for code in codes
    }
    first, second = sorted(score.values(), reverse=True)[:2]
    return max(codes, key=lambda code: score[code]) if first > second else None


def _script(letter: str) -> str:
    name = unicodedata.name(letter, "").partition(" ")[0]
    return name if name in _SCRIPTS else ""


@instruction("keywords:existence")
def keywords_exist(response: str, *, keywords: Sequence[str], compat: bool = False) -> bool:
    return all(count_keyword(response, keyword, compat=compat) for keyword in keywords)


@instruction("keywords:frequency")
def keyword_frequency(
    response: str, *, keyword: str, frequency: int, relation: str = "at least", compat: bool = False
) -> bool:
    return compare(count_keyword(response, keyword, compat=compat), relation, frequency)


@instruction("keywords:forbidden_words")
def no_forbidden_words(response: str, *, forbidden_words: Sequence[str]) -> bool:
    return not any(count_keyword(response, word) for word in forbidden_words)


@instruction("keywords:letter_frequency", "letters:letter_counting2")
def letter_frequency(
    response: str, *, letter: str, let_frequency: int, let_relation: str = "at least"
) -> bool:
    return compare(response.lower().count(letter.lower()), let_relation, let_frequency)


@instruction("length_constraints:number_sentences")
def number_sentences(response: str, *, num_sentences: int, relation: str) -> bool:
    return compare(len(sentences(response)), relation, num_sentences)


@instruction("length_constraints:number_paragraphs")
def number_paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """Exactly so many paragraphs, divided by three stars."""
    pieces = paragraphs(response)
    return pieces is not None and len(pieces) == num_paragraphs


@instruction("length_constraints:number_words")
def number_words(response: str, *, num_words: int, relation: str) -> bool:
    return compare(len(words(response)), relation, num_words)


@instruction("length_constraints:nth_paragraph_first_word")
def nth_paragraph_first_word(
    response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """So many paragraphs, divided by blank lines, of which the n-th starts with a word."""
    pieces = [piece.strip() for piece in re.split(r"\n\n", response) if piece.strip()]
    if len(pieces) != num_paragraphs or not 1 <= nth_paragraph <= len(pieces):
        return False
    start = re.match(r"[\"'“‘]*([^\s.,?!'\"”’]*)", pieces[nth_paragraph - 1])
    return start is not None and start.group(1).lower() == first_word.lower()


@instruction("detectable_content:number_placeholders")
def number_placeholders(response: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", response)) >= num_placeholders


@instruction("detectable_content:postscript")
def postscript(response: str, *, postscript_marker: str) -> bool:
    """A line starts a postscript: "P.S." or "P.P.S", with or without a space within."""
    marker = postscript_marker.strip().lower()
    spelled = {"p.p.s": r"p\.\s?p\.\s?s", "p.s.": r"p\.\s?s\."}
    pattern = spelled.get(marker, re.escape(marker))
    return re.search(rf"\s*{pattern}.*$", response.lower(), flags=re.MULTILINE) is not None


@instruction("detectable_format:number_bullet_lists")
def number_bullets(response: str, *, num_bullets: int) -> bool:
    # Lines that start with one star, or with a hyphen; "** bold" is no bullet.
    stars = re.findall(r"^\s*\*[^*].*$", response, flags=re.MULTILINE)
    hyphens = re.findall(r"^\s*-.*$", response, flags=re.MULTILINE)
    return len(stars) + len(hyphens) == num_bullets


_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


@instruction("detectable_format:constrained_response")
def constrained_response(response: str) -> bool:
    """One of three given answers occurs."""
    return any(answer in response for answer in _ANSWERS)


@instruction("detectable_format:number_highlighted_sections")
def number_highlights(response: str, *, num_highlights: int) -> bool:
    return count_highlights(response) >= num_highlights


def count_highlights(text: str) -> int:
    """Non-empty `*sections*` and `**sections**`."""
    single = re.findall(r"\*([^\n*]*)\*", text)
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(section.strip()) for section in (*single, *double))


@instruction("detectable_format:multiple_sections")
def multiple_sections(response: str, *, section_spliter: str, num_sections: int) -> bool:
    """At least so many numbered sections: "Section 1", "Section 2", ..."""
    found = re.findall(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", response)
    return len(found) >= num_sections


@instruction("detectable_format:json_format")
def json_format(response: str) -> bool:
    """The whole response is JSON, in a code fence or not."""
    text = re.sub(r"^```(?:json)?", "", response.strip(), flags=re.IGNORECASE)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


@instruction("detectable_format:title")
def title(response: str) -> bool:
    """A title in double angular brackets: <<title>>."""
    found = re.findall(r"<<[^\n]+>>", response)
    return any(text.lstrip("<").rstrip(">").strip() for text in found)


@instruction("combination:two_responses")
def two_responses(response: str) -> bool:
    """Two different responses, divided by six stars."""
    pieces = paragraphs(response, r"\*{6}")
    return pieces is not None and len(pieces) == 2 and pieces[0] != pieces[1]


@instruction("combination:repeat_prompt")
def repeat_prompt(response: str, *, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


@instruction("startend:end_checker")
def ends_with(response: str, *, end_phrase: str) -> bool:
    """The response ends with a phrase, in any case; a closing quotation mark does not matter."""
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@instruction("startend:quotation")
def quotation(response: str) -> bool:
    text = response.strip()
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


@instruction("change_case:capital_word_frequency")
def capital_words(response: str, *, capital_frequency: int, capital_relation: str) -> bool:
    found = [word for word in tokens(response) if bare(word).isupper()]
    return compare(len(found), capital_relation, capital_frequency)


@instruction("change_case:english_capital")
def english_capital(response: str) -> bool:
    return response.isupper() and may_be(response, "en")


@instruction("change_case:english_lowercase")
def english_lowercase(response: str) -> bool:
    return response.islower() and may_be(response, "en")


@instruction("punctuation:no_comma")
def no_comma(response: str) -> bool:
    return "," not in response

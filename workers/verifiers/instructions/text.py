"""Pieces of a text for instruction checks: words, tokens, sentences, paragraphs, languages.

No data files and no network: sentences end at `.`, `!` or `?` unless a known abbreviation stands
there, and languages are told apart by script, letters and common words. Published checkers use
trained tokenizers, so borderline texts may be cut differently.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from string import punctuation
from typing import Any

Check = Callable[..., bool]
"""`check(response, **options)`; whether the response keeps the instruction."""

CHECKS: dict[str, Check] = {}  # every known instruction by its id, such as `keywords:existence`

COMPAT = "compat"  # name of the option that checks take which differ from how they were published


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ABBREVIATIONS = _set(
    "mr mrs ms dr prof rev gen col sgt capt lt st jr sr vs etc inc ltd co corp dept est approx e.g "
    "i.e a.m p.m u.s u.k ph.d jan feb aug sept oct nov dec"
)
_END = re.compile(r"[.!?…。！？]+[\"'”’)\]*_]*(?=\s|$)|[。！？]+")
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "less than": lambda count, bound: count < bound,
    "at least": lambda count, bound: count >= bound,
    "more than": lambda count, bound: count > bound,
    "at most": lambda count, bound: count <= bound,
    "exactly": lambda count, bound: count == bound,
}


def instruction(*names: str) -> Callable[[Check], Check]:
    """Register a check under the ids by which data sets call it."""

    def register(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return register


def words(text: str) -> list[str]:
    r"""Runs of word characters (`\w+`): "It's 3 o'clock - go!" has 6."""
    return re.findall(r"\w+", text)


def tokens(text: str) -> list[str]:
    """Words, with what an apostrophe joins, and every punctuation mark on its own."""
    return re.findall(r"\w+(?:['’]\w+)*|[^\w\s]", text)


def bare(word: str) -> str:
    """A word without the punctuation around it."""
    return word.strip(punctuation + " ")


def no_punctuation(text: str) -> str:
    """A text with all ASCII punctuation deleted."""
    return text.translate(str.maketrans("", "", punctuation))


def sentences(text: str) -> list[str]:
    """The text's sentences, each with the mark that ends it; line ends count as spaces."""
    flat = " ".join(text.split())
    found: list[str] = []
    start = 0
    for match in _END.finditer(flat):
        if match.group().rstrip("\"'”’)]*_") == ".":
            last = flat[start : match.start()].rsplit(" ", 1)[-1].lstrip("(\"'[“‘")
            initial = len(last) == 1 and last.isupper() and last not in "AI"
            if initial or last.lower() in _ABBREVIATIONS:
                continue
        found.append(flat[start : match.end()].strip())
        start = match.end()
    rest = flat[start:].strip()
    return [*found, rest] if rest else found


def paragraphs(text: str, separator: str = r"\s?\*\*\*\s?") -> list[str] | None:
    """The pieces between separators; None if one in the middle is empty."""
    pieces = [piece.strip() for piece in re.split(separator, text)]
    pieces = pieces[1:] if not pieces[0] else pieces
    pieces = pieces[:-1] if pieces and not pieces[-1] else pieces
    return None if any(not piece for piece in pieces) else pieces


def compare(count: int, relation: str, bound: Any) -> bool:
    """Compare `count` with `bound` by a relation: "at least", "less than", ..."""
    if relation not in _COMPARISONS:
        raise ValueError(f"relation {relation!r} is unknown; choose {', '.join(_COMPARISONS)}")
    return _COMPARISONS[relation](count, int(bound))


def count_keyword(text: str, keyword: str, *, compat: bool = False) -> int:
    """Count a keyword, in any case: as whole words, or as published with `compat`.

    As published, a keyword is a regular expression and matches inside words: "art" is twice in
    "Art at the party".
    """
    pattern = keyword if compat else rf"(?<!\w){re.escape(keyword.strip())}(?!\w)"
    return len(re.findall(pattern, text, flags=re.IGNORECASE))


CONJUNCTIONS = _set("and but for nor or so yet")  # the coordinating ones

PRONOUNS = _set(
    "i me we us you he him she her it they them my mine our ours your yours his hers its their "
    "theirs myself ourselves yourself yourselves himself herself itself themselves this that these "
    "those who whom whose which what whoever whomever whatever whichever anybody anyone anything "
    "everybody everyone everything nobody nothing somebody someone something each either neither "
    "both all some any none"
)
"""Personal, possessive, reflexive, demonstrative, interrogative and indefinite ones."""

STOP_WORDS = CONJUNCTIONS | _set(
    "a an the i me my myself we our ours ourselves you your yours yourself yourselves he him his "
    "himself she her hers herself it its itself they them their theirs themselves what which who "
    "whom this that these those am is are was were be been being have has had having do does did "
    "doing if because as until while of at by with about against between into through during "
    "before after above below to from up down in out on off over under again further then once "
    "here there when where why how all any both each few more most other some such no not only own "
    "same than too very s t can will just don should now d ll m o re ve y ain aren couldn didn "
    "doesn hadn hasn haven isn ma mightn mustn needn shan shouldn wasn weren won wouldn"
)
"""Words too common to mean much."""

_VERBS = _set(
    "accept achieve act adapt add adjust admit adopt advise agree aim allow analyze announce "
    "answer apply approach argue arrange arrive ask assess assign assume attach attempt "
    "attend avoid bake be become begin believe bring build buy calculate call carry catch "
    "celebrate change check choose clean climb close collect combine come compare complete "
    "compute consider contact contain continue convert cook copy count cover craft create cut "
    "dance decide define deliver demand describe design determine develop discover discuss "
    "divide do download draw dream drink drive eat edit embrace emphasize enable encourage "
    "end engage enjoy ensure enter establish evaluate examine exercise exist expand expect "
    "explain explore express extend face fail fall feed feel fight fill find finish fix flee "
    "fly focus fold follow forget form gather generate get give go grab grow guide handle "
    "have hear help hide hire hold hope hug identify ignore illustrate imagine implement "
    "improve include increase indicate inform insert inspect install introduce invent invest "
    "invite involve join jump keep kick know laugh launch lead learn leave lend let lie lift "
    "like list listen live locate look lose love maintain make manage mark measure meet "
    "mention mix move multiply name need note notice observe obtain offer open order organize "
    "own pack paint participate pass pay perform pick place plan plant play point prefer "
    "prepare present preserve press prevent produce promote protect prove provide pull push "
    "put raise reach read realize receive recognize recommend record reduce refer reflect "
    "refuse remain remember remove repeat replace reply report represent require research "
    "resolve respect respond rest return reveal review ride rise run save say search see seek "
    "select sell send separate serve set share shine show sing sit skip sleep smile solve "
    "sort speak spend split stand start state stay stir stop store study submit subtract "
    "succeed suggest summarize support suppose switch take talk teach tell test thank think "
    "throw touch train transform translate travel treat try turn understand unlock update use "
    "utilize verify visit wait wake walk want wash watch wear welcome win wish wonder work "
    "worry wrap write"
)
_IRREGULAR = _set(
    "is are was were am been has had did does done went gone came became began brought built "
    "bought caught chose drew drank drove ate fell felt fought found flew forgot got gave "
    "grew heard held kept knew led left lent lost made met paid put ran said saw sent sang "
    "sat slept spoke spent stood took taught told thought threw understood woke wore won "
    "wrote can could may might must shall should will would"
)
_EMOJI = re.compile(
    "[\U0001f1e6-\U0001f1ff\U0001f300-\U0001faff\u2600-\u27bf\u2b00-\u2bff\u2190-\u21ff\u2300-\u23ff"
    "\u3030\u303d\u00a9\u00ae\u2122\ufe0f\u200d]"
)


def is_emoji(character: str) -> bool:
    """Return whether one character is an emoji or a part of one."""
    return _EMOJI.fullmatch(character) is not None


def is_verb(word: str) -> bool:
    """Return whether a word is a common English verb, in any of its forms."""
    word = word.lower()
    if word in _VERBS or word in _IRREGULAR:
        return True
    for ending in ("s", "es", "ed", "d", "ing"):
        stem = word.removesuffix(ending)
        if stem == word or len(stem) < 2:
            continue
        doubled = stem[:-1] if stem[-1] == stem[-2] else stem
        y = stem[:-1] + "y" if stem[-1] == "i" else stem
        if _VERBS & {stem, stem + "e", doubled, y}:
            return True
    return False


def syllables(word: str) -> int:
    """Syllables of an English word, by its groups of vowels; at least 1."""
    letters = re.sub(r"[^a-z]", "", word.lower())
    count = len(re.findall(r"[aeiouy]+", letters))
    silent_e = letters.endswith("e") and not re.search(r"[^aeiouy]le$", letters)
    if silent_e and not letters.endswith(("ee", "ye")) and count > 1:
        count -= 1
    if re.search(r"[^aeiouytd]ed$", letters) and count > 1:
        count -= 1
    return max(count, 1)

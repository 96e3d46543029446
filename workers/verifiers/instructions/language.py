"""Which language a text is in: by script first, then by letters and by common words.

A heuristic without data files, for checks of a response's language. It knows the thirty languages
that instruction data sets ask for. A text with too little to go by has no language.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping

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
    """ISO 639-1 code of the likeliest language, or None if there is too little to go by."""
    letters = Counter(_script(letter) for letter in text if letter.isalpha())
    letters.pop("", None)
    if letters["HIRAGANA"] + letters["KATAKANA"]:
        letters["HIRAGANA"] += letters.pop("CJK", 0) + letters.pop("KATAKANA", 0)
    if not letters:
        return None
    codes = _SCRIPTS[letters.most_common(1)[0][0]]
    return codes[0] if len(codes) == 1 else _likeliest(text.lower(), codes)


def may_be(text: str, language: str) -> bool:
    """Whether a text is in a language, as far as can be told: short ones get the benefit of doubt.

    Raises:
        ValueError: If the language is none of `LANGUAGES`.
    """
    code = language.lower().partition("-")[0]
    if code not in LANGUAGES:
        raise ValueError(f"language {language!r} is unknown; known are {', '.join(LANGUAGES)}")
    found = language_of(text)
    if found is not None:
        return found == code
    letters = [letter for letter in text if letter.isalpha()]
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

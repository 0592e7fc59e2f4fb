"""Everyday sentences that people may send to a model that knows only scenes, in various spellings.

A tiny model answers everything outside its training with one sentence that names the questions it
can answer. It therefore sees such inputs in training: sentences built from the lists in
`everyday_words.json`, words in random order, strings that are no words, and empty prompts.
`everyday_held_out.txt` contains 300 sentences for the evaluation, written by someone who had not
seen these lists; `draw` rejects these sentences, so none of them can be drawn here.

>>> rewrite("What color is the circle?", british=True, case="lower", mark=False)
'what colour is the circle'
"""

import json
import re
from functools import cache
from pathlib import Path

import numpy as np

HELD_OUT = Path(__file__).with_name("everyday_held_out.txt")
LISTS = Path(__file__).with_name("everyday_words.json")
BRITISH = {"color": "colour", "center": "centre"}
CASES = {"as is": str, "lower": str.lower, "upper": str.upper, "title": str.title}

WORDS = {name: tuple(texts) for name, texts in json.loads(LISTS.read_text()).items()}
SENTENCES, ABOUT_NOUNS = WORDS["sentences"], WORDS["about_nouns"]
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiou"


def normal(text: str) -> str:
    """Return a text without case, punctuation and repeated spaces; equal results mean the same sentence."""
    return " ".join(re.findall(r"\w+", text.lower())) or text.strip()


@cache
def held_out() -> tuple[str, ...]:
    """Return the sentences for the evaluation, as written."""
    return tuple(HELD_OUT.read_text().splitlines())


@cache
def _forbidden() -> frozenset[str]:
    return frozenset(map(normal, held_out()))


@cache
def words() -> tuple[str, ...]:
    """Return every word of the lists, sorted."""
    texts = [text.replace("{x}", "") for group in WORDS.values() for text in group]
    return tuple(sorted({word for text in texts for word in normal(text).split()}))


def draw(rng: np.random.Generator) -> str:
    """Draw a sentence that no scene answers and that is not in the evaluation."""
    while True:
        sort = rng.random()
        if sort < 0.04:
            return ""
        if sort < 0.36:
            text = _pick(rng, SENTENCES)
        elif sort < 0.56:
            text = _pick(rng, WORDS["verbs"]) + " " + _pick(rng, WORDS["media"]) + _pick(rng, WORDS["manners"])
        elif sort < 0.80:
            noun = _pick(rng, WORDS["nouns"]) if rng.random() < 0.8 else _no_word(rng)
            text = _pick(rng, ABOUT_NOUNS).format(x=noun)
        elif sort < 0.93:
            text = " ".join(_pick(rng, words()) for _ in range(rng.integers(1, 15)))
        else:
            text = " ".join(_no_word(rng) for _ in range(rng.integers(1, 7)))
        text = _punctuate(rng, text)
        if normal(text) not in _forbidden():
            return text


def vary(text: str, rng: np.random.Generator) -> str:
    """Vary a question's spelling half of the time: British or American, in any case, with or without question mark."""
    if rng.random() < 0.5:
        return text
    return rewrite(text, british=rng.random() < 0.5, case=_pick(rng, tuple(CASES)), mark=rng.random() < 0.5)


def respell(text: str, rng: np.random.Generator) -> str:
    """Vary the spelling of an evaluation question: British or American, in any case, mostly without question mark."""
    british, case = bool(rng.random() < 0.5), str(rng.choice(list(CASES)))
    return rewrite(text, british=british, case=case, mark=bool(rng.random() < 0.3))


def rewrite(text: str, *, british: bool = False, case: str = "as is", mark: bool = True) -> str:
    """Return a text in a different spelling. case: one of `CASES`; mark: whether to keep the question mark."""
    for american, spelling in BRITISH.items() if british else ():
        text = text.replace(american, spelling)
    return CASES[case](text if mark else text.rstrip("?"))


def _punctuate(rng: np.random.Generator, text: str) -> str:
    """Vary the capital letters and the ending of a text."""
    how = rng.random()
    text = text[:1].upper() + text[1:] if how < 0.5 else text.upper() if how > 0.92 else text
    ending = _pick(rng, ("", "", "?", "?", ".", ".", "!", " please", "..."))
    return text if text[-1:] in ".?!" else text + ending


def _no_word(rng: np.random.Generator) -> str:
    letters = (_pick(rng, CONSONANTS if rng.random() < 0.6 else VOWELS) for _ in range(rng.integers(2, 10)))
    return "".join(letters)


def _pick(rng: np.random.Generator, choices):
    return choices[int(rng.integers(len(choices)))]

"""The prose holds one word for one thing, and no sentence is too long. Oracle: the words and the limit below."""

import re

import pytest
from prose import ROOT, WORD, doc_blocks, notebook_blocks, python_blocks, script_blocks, sentences, without_code

GLOSSARY = "docs/glossary.md"
LONGEST = 35  # words in a sentence; tables are exempt
RETIRED = {  # words of earlier versions, each with the word that replaced it
    r"pictures?": "image",
    r"clips?": "video",
    r"medium": "item",
    r"mend(?:s|ed|ing)?": "fix",
    r"dealt": "assigned, or interleaved",
    r"in runs": "contiguous",
    r"stand-ins?": "trace backend",
    r"matrix products?": "matmul",
    r"with experts": "MoE",
    r"deeper features": "DeepStack features",
    r"legal": "valid",
    r"anew": "again",
    r"processor seconds": "CPU time",
    r"kin": "subclasses, or similar models",
}
USES = re.compile("|".join(rf"\b(?:{word}|{word.capitalize()})\b" for word in RETIRED))
ALLOWED = (  # where these words are names, questions that models were trained on, or verbs
    r"(?:\A|(?<=[.;] ))(?:\w+, )*\w+: ",  # names of arguments
    r"What is in the (?:picture|clip)\?",
    r"without image and clip\b",  # names of arguments, in an error
    r'would clip it to white|^"clip" saves',
    r"\A(?:picture  +|\| picture size)",  # the name of a function, and of a folder of mutants
)
NOTEBOOKS_LEFT: dict[str, set[str]] = {}  # words that a notebook may still use; the list may only shrink


def retired(text: str) -> list[str]:
    """Return the retired words that a text uses."""
    text = re.sub("|".join(ALLOWED), "~ ", without_code(text))
    return USES.findall(re.sub(r"\s+", " ", text))


@pytest.mark.parametrize("blocks", [doc_blocks, python_blocks, script_blocks])
def test_one_word_for_one_thing(blocks):
    found = [f"{b.file}:{b.line} {retired(b.text)}: {b.text[:80]}" for b in blocks() if retired(b.text)]
    assert not found, "\n".join([*found, f"use instead: {RETIRED}"])


def test_notebooks_use_fewer_retired_words():
    used: dict[str, set[str]] = {}
    for block in notebook_blocks():
        used.setdefault(block.file, set()).update(word.lower() for word in retired(block.text))
    new = {file: words - NOTEBOOKS_LEFT.get(file, set()) for file, words in used.items()}
    assert not any(new.values()), {file: words for file, words in new.items() if words}


def test_glossary_terms_are_used():
    """Each bold term of docs/glossary.md occurs in the prose of other files, so the page defines words in use."""
    texts = [b.text for blocks in (doc_blocks, notebook_blocks, python_blocks) for b in blocks() if b.file != GLOSSARY]
    prose = re.sub(r"\s+", " ", "\n".join(texts).replace("`", "")).lower()
    terms = re.findall(r"^- \*\*([^*]+)\*\*", (ROOT / GLOSSARY).read_text(), re.M)
    assert len(terms) > 40
    assert [term for term in terms if not re.search(rf"\b{re.escape(term.lower().strip('`'))}", prose)] == []


@pytest.mark.parametrize("blocks", [doc_blocks, python_blocks, script_blocks])
def test_no_sentence_is_too_long(blocks):
    found = []
    for block in blocks():
        for sentence in sentences(block.text) if not block.is_table else ():
            if (count := len(WORD.findall(sentence))) > LONGEST:
                found.append(f"{block.file}:{block.line} {count} words: {sentence[:100]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("text", "expected"), [
    ("Each picture, and Clips", ["picture", "Clips"]),
    ("picture: an image. `picture` and CLIP are names", []),
    ("picture, clip: both. The medium", ["medium"]),
    ("A matrix\nproduct", ["matrix product"]),
])  # fmt: skip
def test_retired_words_are_found(text, expected):
    assert retired(text) == expected


def test_sentences_are_split():
    text = "One, e.g. this. `a` is two! Three? x: four at t, h, w. Five 1.5."
    assert list(sentences(text)) == ["One, e.g. this.", "~ is two!", "Three?", "x: four at t, h, w.", "Five 1.5."]

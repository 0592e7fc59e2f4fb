"""Functions that make foreign text safe to print: paths, names in a tar file, answers, error messages."""

import re

_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    """Return a path or message on one line, shortened; see `plain`."""
    text = plain(str(text).replace("\n", " "))
    return text if len(text) <= 240 else f"{text[:120]}...{text[-100:]}"


def plain(text: str) -> str:
    """Escape the characters that control a terminal (such as ESC and bidi overrides), and lone surrogates.

    >>> plain("a\\x1b[2J") == "a" + chr(92) + "x1b[2J"
    True
    """
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)

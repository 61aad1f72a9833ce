"""What the matches of a regular expression begin with, so that of many sorted paths only few have to be tried."""

from __future__ import annotations

import re

_LITERAL = re.compile(r"(?:[\w/-]|\\\.)*(?![?*{])")  # a quantifier may follow the last character
_TOKEN = re.compile(r"\\.|\[\^?.[^\]]*\]|.", re.DOTALL)  # an escape, a set, a character


def beginnings(pattern: str) -> list[str]:
    """Return texts with one of which each match begins, sorted, none of which begins with another."""
    kept: list[str] = []
    for text in sorted(_beginnings(pattern)[0]):
        if not kept or not text.startswith(kept[-1]):
            kept.append(text)
    return kept


def _beginnings(pattern: str) -> tuple[list[str], bool]:
    """Return texts with one of which each match begins, and whether they are the matches."""
    alternatives, closing = _structure(pattern)
    if len(alternatives) > 1:
        each = [_beginnings(alternative) for alternative in alternatives]
        return [text for texts, _ in each for text in texts], all(whole for _, whole in each)
    found = _LITERAL.match(pattern)
    assert found
    literal, rest = found[0].replace("\\.", "."), pattern[found.end() :]
    if not rest:
        return [literal], True
    group, after = pattern[found.end() + 1 : closing], pattern[closing + 1 :]
    if rest[0] != "(" or group.startswith("?") or after.startswith(("*", "{", "??", "?+")):
        return [literal], False
    texts, whole = _beginnings(group)
    if after.startswith("?"):
        texts, after = [*texts, ""], after[1:]
    tails, ended = _beginnings(after) if whole and not after.startswith("+") else ([""], False)
    return [literal + text + tail for text in texts for tail in tails], ended


def _structure(pattern: str) -> tuple[list[str], int]:
    """Return the alternatives of a regular expression, and where its first group ends."""
    alternatives, depth, place, closing = [""], 0, 0, -1
    for token in _TOKEN.findall(pattern):
        depth += (token == "(") - (token == ")")
        if token == ")" and not depth and closing < 0:
            closing = place
        place += len(token)
        if token == "|" and not depth:
            alternatives.append("")
        else:
            alternatives[-1] += token
    return alternatives, closing

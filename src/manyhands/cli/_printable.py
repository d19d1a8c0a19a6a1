"""Text from a file, made safe for a terminal: escape sequences are shown and not obeyed."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Spell out all characters that a terminal would obey: escapes, returns, direction marks.

    >>> print(printable("loss\x1b[2J"))
    loss\x1b[2J
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )

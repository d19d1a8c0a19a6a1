"""Text of a file on a terminal: as itself, or as what it is called, never as a command to it."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""What a terminal would obey (escapes, returns, marks that turn the direction) is spelled out.

    >>> print(printable("loss\x1b[2J"))
    loss\x1b[2J
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )

"""Check arguments that are numbers or flags; an error says which values are possible.

The result is Python's own int, float or bool. So workers have equal options even if one of them
was given a NumPy number.
"""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any


def whole(name: str, value: Any, least: int = 0, why: str = "") -> int:
    """Return a count as an int: any kind of integer, but neither a float nor a bool."""
    try:
        number = least - 1 if _is_flag(value) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(
            f"{name} must be a whole number of at least {least}, got {value!r}.{_spaced(why)}"
        )
    return number


def real(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    why: str = "",
) -> float:
    """Return a finite number within these bounds as a float."""
    number = float(value) if isinstance(value, Real) and not _is_flag(value) else math.nan
    low = (above is None or number > above) and (least is None or number >= least)
    if not (math.isfinite(number) and low and (below is None or number < below)):
        bounds = [("above", above), ("at least", least), ("below", below)]
        limits = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
        raise ValueError(f"{name} must be a finite number {limits}, got {value!r}.{_spaced(why)}")
    return number


def flag(name: str, value: Any) -> bool:
    """Return True or False. 1 and 0 are accepted too, but no other value that Python calls true."""
    if isinstance(value, Real | bool) and value in (0, 1):
        return bool(value)
    if _is_flag(value):
        return bool(value)
    raise ValueError(f"{name} must be True or False, got {value!r}.")


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in (
        "bool_",
        "bool",
    )  # the names of NumPy's bools, without importing NumPy


def _spaced(why: str) -> str:
    return f" {why}" if why else ""

"""Arguments that are numbers: what is meaningless is an error that says what is needed.

What comes is taken over as Python's own int, float or bool, so that workers of which one was given
a number of numpy's have the same options.
"""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any


def whole(name: str, value: Any, least: int = 0, why: str = "") -> int:
    """A count: an integer of any kind, but neither a float nor a bool."""
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
    """A finite number within these bounds."""
    number = float(value) if isinstance(value, Real) and not _is_flag(value) else math.nan
    low = (above is None or number > above) and (least is None or number >= least)
    if not (math.isfinite(number) and low and (below is None or number < below)):
        bounds = [("above", above), ("at least", least), ("below", below)]
        said = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
        raise ValueError(f"{name} must be a finite number {said}, got {value!r}.{_spaced(why)}")
    return number


def flag(name: str, value: Any) -> bool:
    """True or False; 1 and 0 as well, but no other thing that Python takes for true."""
    if isinstance(value, Real | bool) and value in (0, 1):
        return bool(value)
    if _is_flag(value):
        return bool(value)
    raise ValueError(f"{name} must be True or False, got {value!r}.")


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")  # and numpy's


def _spaced(why: str) -> str:
    return f" {why}" if why else ""

"""Check arguments of public functions: numbers, flags and words.

Each function returns the value in the required type, or raises a ValueError (a TypeError for a
wrong class) of the form

    NAME must be REQUIREMENT, got VALUE. REASON OR REMEDY.

Check only arguments that would be silently wrong, or would hang a rank. Python and torch raise
clear errors for the rest.

Sizes, rates and times have units: "24GiB", "50Mbit", "12 ms".
"""

from __future__ import annotations

import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import wraps
from numbers import Real
from typing import ParamSpec, SupportsIndex, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Number = TypeVar("Number", int, float)

SIZES = {"": 1, "b": 1} | {
    f"{prefix}{b}": base**power
    for b, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgtp", start=1)
}
RATES = {
    f"{prefix}bit{per}": 1000**power
    for per in ("", "/s")
    for power, prefix in enumerate(("", "k", "m", "g", "t"))
}
SHOWN = 100  # characters of a value in a message
ADDRESS = " at 0x"  # in the default `repr` of an object
SIZE_NAMES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def whole(name: str, value: object, least: int = 0, why: str = "") -> int:
    """Return a count as an int, from any integer type except bool."""
    number = least - 1
    if isinstance(value, SupportsIndex) and not _is_flag(value):
        with suppress(TypeError):  # a tensor without an integer value
            number = operator.index(value)
    if number < least:
        raise ValueError(_message(name, f"a whole number of at least {least}", value, why))
    return number


def real(
    name: str,
    value: object,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    why: str = "",
) -> float:
    """Return a finite number within these bounds as a float."""
    number = math.nan
    if isinstance(value, Real) and not _is_flag(value):
        with suppress(OverflowError):  # a large integer
            number = float(value)
    low = (above is None or number > above) and (least is None or number >= least)
    high = (below is None or number < below) and (most is None or number <= most)
    if not (math.isfinite(number) and low and high):
        limits = []
        bounds = {"above": above, "at least": least, "below": below, "at most": most}
        for word, bound in bounds.items():
            if bound is not None:
                limits.append(f"{word} {bound:g}")
        needed = f"a finite number {' and '.join(limits)}".rstrip()
        raise ValueError(_message(name, needed, value, why))
    return number


def flag(name: str, value: object) -> bool:
    """Return True or False. 1 and 0 are accepted, but no other truthy or falsy value."""
    if _is_flag(value) or (isinstance(value, Real) and value in (0, 1)):
        return bool(value)
    raise ValueError(_message(name, "True or False", value))


def one_of(name: str, value: object, choices: Sequence[object], why: str = "") -> None:
    """Raise unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(_message(name, f"one of {', '.join(map(repr, choices))}", value, why))


def instance(name: str, value: object, kind: type[T], needed: str, why: str = "") -> T:
    if isinstance(value, kind):
        return value
    raise TypeError(_message(name, needed, value, why))


def file_path(name: str, value: object, why: str = "") -> str:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    return instance(name, text, str, "a str or an os.PathLike", why)


def number_in(
    variables: Mapping[str, str],
    name: str,
    parse: Callable[[str], Number],
    default: Number | None = None,
) -> Number:
    """Return the number in an environment variable, or the default if the variable is not set."""
    text = variables.get(name)
    if not text and default is not None:
        return default
    try:
        return parse(text or "")
    except ValueError as error:
        kind = "a whole number" if parse is int else "a number"
        raise ValueError(f"the variable {name} must be {kind}, got {text!r}.") from error


def shown(value: object) -> str:
    """Return a value as shown in a message: a short `repr`, or else the class name.

    >>> import torch
    >>> shown(-1), shown("sum"), shown(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU()))
    ('-1', "'sum'", 'Sequential')
    """
    text = repr(value)
    if len(text) <= SHOWN and text.isprintable() and ADDRESS not in text:
        return text
    return type(value).__name__


def _message(name: str, needed: str, came: object, why: str = "") -> str:
    return f"{name} must be {needed}, got {shown(came)}. {why}".rstrip()


def _is_flag(value: object) -> bool:
    # NumPy's bools by class name, without importing NumPy
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")


def _in_units(name: str, value: object, units: Mapping[str, int], why: str) -> float:
    """Return a number given as such, or as text with a unit."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z/]*)\s*", value.lower())
        value = float(found[1]) * units[found[2]] if found and found[2] in units else value
    return real(name, value, above=0, why=why)


def parse_bytes(size: float | str) -> int:
    """Return the bytes: 1536 for "1.5 KiB", 24e9 for "24GB"."""
    return int(_in_units("a size", size, SIZES, 'Give bytes, or a text such as "24GiB".'))


def parse_rate(rate: float | str) -> float:
    """Return bits per second: 50e6 for "50Mbit" or "50 Mbit/s"."""
    return _in_units("network", rate, RATES, 'Give bits per second, or a text such as "50Mbit".')


def format_bytes(size: int) -> str:
    """Return three or four digits and a unit.

    >>> format_bytes(0), format_bytes(1536), format_bytes(24 * 2**30)
    ('0 B', '1.50 KiB', '24.0 GiB')
    """
    power = 0
    value = float(size)
    while value >= 1023.5 and power < len(SIZE_NAMES) - 1:
        power = power + 1
        value = value / 1024
    # Thresholds where rounding would add a digit.
    digits = 2
    if power == 0 or value >= 99.95:
        digits = 0
    elif value >= 9.995:
        digits = 1
    return f"{value:.{digits}f} {SIZE_NAMES[power]}"


def format_rate(rate: float) -> str:
    """Return the rate with a unit.

    >>> format_rate(50e6), format_rate(2.5e9)
    ('50 Mbit/s', '2.5 Gbit/s')
    """
    power = 0
    while rate >= 1000 and power < 4:
        power = power + 1
        rate = rate / 1000
    return f"{rate:.4g} {('', 'k', 'M', 'G', 'T')[power]}bit/s"


def format_seconds(seconds: float) -> str:
    """Return two digits or three, and a unit.

    >>> format_seconds(150.3), format_seconds(7.5), format_seconds(0.0123), format_seconds(2e-5)
    ('150 s', '7.5 s', '12 ms', '0.020 ms')
    """
    if seconds == 0.0:
        return "0 s"
    value = seconds
    unit = "s"
    if seconds < 0.9995:
        value = 1e3 * seconds
        unit = "ms"
    if value >= 9.95:
        return f"{value:,.0f} {unit}"
    return f"{value:#.2g} {unit}"


def explained(call: Callable[P, R]) -> Callable[P, R]:
    """Name misspelled arguments, where Python's error would name a base class."""
    named = list(inspect.signature(call).parameters)
    others = [name for name in named if name != "self"]

    @wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - set(named):
            owner: Callable[..., object] = call
            if named[0] == "self" and args:
                owner = type(args[0])
            meant = f"See help({owner.__name__})."
            for near in get_close_matches(name, others, 1, 0.4):
                meant = f"Is {near} meant?"
            raise TypeError(f"{owner.__name__} has no argument {name}. {meant}")
        return call(*args, **kwargs)

    return checked

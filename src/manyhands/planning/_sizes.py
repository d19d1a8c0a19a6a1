"""Sizes in bytes as people write them: "24GiB", "24 GB", "512MiB", or a plain number."""

from __future__ import annotations

import math
import re

UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}
NAMES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def in_bytes(size: float | str) -> int:
    """The number of bytes.

    >>> in_bytes("1.5 KiB"), in_bytes("24GB"), in_bytes(512)
    (1536, 24000000000, 512)
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", size.lower())
        if match is None or match[2] not in UNITS:
            raise ValueError(
                f'a size is a number and a unit, such as "24GiB", "24GB" or "512MiB", got {size!r}.'
            )
        size = float(match[1]) * UNITS[match[2]]
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise TypeError(f'a size is a number of bytes or a text such as "24GiB", got {size!r}.')
    if not (math.isfinite(size) and size > 0):
        raise ValueError(f"a size must be positive, got {size!r}.")
    return int(size)


def shown(size: int) -> str:
    """Three or four digits and a unit.

    >>> shown(0), shown(1536), shown(24 * 2**30)
    ('0 B', '1.50 KiB', '24.0 GiB')
    """
    power, value = 0, float(size)
    while value >= 1023.5 and power < len(NAMES) - 1:
        power, value = power + 1, value / 1024
    digits = 0 if power == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {NAMES[power]}"

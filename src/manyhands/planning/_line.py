"""What training costs over a line between the workers, and which way to use there.

A step of p passes takes a + b p seconds (`ramp/_decision.py`). Of a, the line's part is at least

    a >= 8 bytes / rate        bytes: what a worker sends in a step; rate: bits a second

because delays and packets that are lost come on top. b is the time of one pass, forward and
backward, on one worker. The ratio a / b says which way pays:

    below 1        the line takes less than a pass: the small batch, under a rule
    below 32       several passes for each step, as many as `Ramp` finds to pay
    above          even 32 passes leave half of the time to the line: send once in many steps

These are rules of thumb. The best number of passes is sqrt(a / b) times the square root of the
noise scale, and that is measured only while training.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

RAMP_FROM, BLOCKS_FROM = 1.0, 32.0  # a / b
BLOCK = 100  # steps, for an example
MEASURED = "docs/benchmarks/time_to_loss.md"

RATE_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_rate(rate: float | str) -> float:
    """Return bits a second.

    >>> parse_rate("50Mbit"), parse_rate("2.5 Gbit/s"), parse_rate("100mbps"), parse_rate(1e9)
    (50000000.0, 2500000000.0, 100000000.0, 1000000000.0)
    """
    if isinstance(rate, str):
        match = re.fullmatch(
            r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)(?:bit(?:/s)?|bps)\s*", rate, re.IGNORECASE
        )
        # "MBps" and "Mbps" differ by a factor of 8, so only the small b is bits
        if match is None or "B" in rate:
            raise ValueError(
                f'a line is given in bits a second, such as "50Mbit" or "1Gbit/s", got {rate!r}. '
                "A byte has 8 bits."
            )
        rate = float(match[1]) * RATE_UNITS[match[2].lower()]
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise TypeError(f'a line is bits a second, or a text such as "50Mbit", got {rate!r}.')
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"a line must have more than 0 bits a second, got {rate!r}.")
    return float(rate)


def parse_pass_seconds(seconds: float) -> float:
    """Return the seconds of one pass, or raise.

    >>> parse_pass_seconds(0.25)
    0.25
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"pass_seconds must be a number of seconds, got {seconds!r}.")
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"pass_seconds must be above 0, got {seconds!r}.")
    return float(seconds)


def format_rate(rate: float) -> str:
    """Return the rate with a unit.

    >>> format_rate(50e6), format_rate(2.5e9)
    ('50 Mbit/s', '2.5 Gbit/s')
    """
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= size:
            return f"{rate / size:.4g} {unit}bit/s"
    return f"{rate:.4g} bit/s"


def format_seconds(seconds: float) -> str:
    """Return two digits or three, and a unit.

    >>> format_seconds(150.3), format_seconds(7.5), format_seconds(0.0123), format_seconds(2e-5)
    ('150 s', '7.5 s', '12 ms', '0.020 ms')
    """
    if seconds == 0.0:
        return "0 s"
    value, unit = (seconds, "s") if seconds >= 0.9995 else (1e3 * seconds, "ms")
    return f"{value:,.0f} {unit}" if value >= 9.95 else f"{value:#.2g} {unit}"


def parse_speed(speed: float | str) -> float:
    """Return floating-point operations a second.

    >>> parse_speed("30TFLOP/s"), parse_speed("500 gflops"), parse_speed(1e9)
    (30000000000000.0, 500000000000.0, 1000000000.0)
    """
    if isinstance(speed, str):
        match = re.fullmatch(
            r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)flop(?:/?s)\s*", speed, re.IGNORECASE
        )
        if match is None:
            raise ValueError(
                'a speed is given in operations a second, such as "30TFLOP/s" or "500GFLOPS", '
                f"got {speed!r}."
            )
        speed = float(match[1]) * RATE_UNITS[match[2].lower()]
    if isinstance(speed, bool) or not isinstance(speed, int | float):
        raise TypeError(
            f'a speed is operations a second, or a text such as "30TFLOP/s": {speed!r}.'
        )
    if not (math.isfinite(speed) and speed > 0):
        raise ValueError(f"a speed must be more than 0 operations a second, got {speed!r}.")
    return float(speed)


@dataclass(frozen=True)
class PassPlan:
    """What one worker computes in a pass: floating-point operations, and how many it does a second.

    The backward pass is counted as twice the forward pass: the gradients of inputs and of weights.
    """

    forward_operations: int
    speed: float

    @property
    def operations(self) -> int:
        """Of one forward and backward pass."""
        return 3 * self.forward_operations

    @property
    def seconds(self) -> float:
        """How long a pass takes at this speed.

        >>> PassPlan(forward_operations=10**12, speed=3e13).seconds
        0.1
        """
        return self.operations / self.speed

    @property
    def note(self) -> str:
        """Return the sentence that says what was computed."""
        return (
            f"A pass has {self.operations:,.3g} operations (matrix products, convolutions and "
            f"attention), at {self.speed:,.3g} a second {format_seconds(self.seconds)}."
        )


@dataclass(frozen=True)
class LinePlan:
    """A line between the workers: bits a second, and the seconds of one pass, if known."""

    rate: float
    pass_seconds: float | None = None

    def seconds(self, sent: int) -> float:
        """Return how long so many bytes take, without delays.

        >>> LinePlan(rate=8e6).seconds(3_000_000)
        3.0
        """
        return 8.0 * sent / self.rate

    def advise(self, name: str, sent: int, gradients_sent: int) -> list[str]:
        """Return sentences: what a step takes on the line, and which way to use there.

        `sent` is what a worker sends in a step of the sharding with this name, `gradients_sent`
        what it sends with DDP: about as much as in one sync round of blocks.
        """
        if sent == 0:
            return [f"One worker sends nothing over a line of {format_rate(self.rate)}."]
        line = self.seconds(sent)
        about = (
            f"Over a line of {format_rate(self.rate)}, {name} needs at least "
            f"{format_seconds(line)} for what a worker sends in a step; delays are not counted."
        )
        in_blocks = format_seconds(self.seconds(gradients_sent) / BLOCK)
        small = "the small batch, under a scaling rule such as mh.AdaScale"
        ramp = "mh.Ramp, which chooses several passes for each step"
        blocks = (
            f"blocks such as mh.DiLoCo(optimizer, every={BLOCK}), which need {in_blocks} of the "
            'line a step, and a quarter of that with codec="int8"'
        )
        measured = f"Rules of thumb; what was measured over three lines: {MEASURED}"
        if self.pass_seconds is None:
            return [
                about,
                f"Where one pass takes more than {format_seconds(line / RAMP_FROM)}: {small}.",
                f"Where it takes more than {format_seconds(line / BLOCKS_FROM)}: {ramp}.",
                f"Where it takes less: {blocks}.",
                measured,
            ]
        ratio = line / self.pass_seconds
        advice = small if ratio < RAMP_FROM else ramp if ratio < BLOCKS_FROM else blocks
        times = f"{ratio:,.0f}" if ratio >= 9.95 else f"{ratio:.2g}"
        return [
            about,
            f"That is {times} times a pass of {format_seconds(self.pass_seconds)}. Use {advice}.",
            measured,
        ]

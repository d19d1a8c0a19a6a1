"""What all workers of a crew must have alike: the options, and the tensors that are averaged.

A worker that comes in says so in a text. The first one's is the run's; a worker whose text differs
is not let in, and is told what differs. The ranks of a process group compare the same things, when
the optimizer is made (`_core/agreement.py`); a crew's members never are all there at once.

    {"options": {"every": "16", ...},
     "parameter": ["(4, 3) float32 on cpu", ...], "buffer": [...],
     "names": {"parameter": ["encoder.weight", ...], "buffer": [...]}}

Tensors are averaged by their place, so their order matters, which only names may tell. Where they
are not known, or a worker's are all others than those of the run (its model is wrapped), they say
nothing about the order, and are left aside.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from manyhands._core.agreement import describe_tensors, names_in

KINDS = ("parameter", "buffer")
SHOWN = 3  # differences of a kind: more say nothing new


@dataclass(frozen=True)
class Terms:
    """One worker's text."""

    text: str

    @classmethod
    def of(
        cls,
        options: Mapping[str, Any],
        params: Sequence[Tensor],
        buffers: Sequence[Tensor],
        modules: Sequence[nn.Module],
    ) -> Terms:
        told = {
            "options": {name: str(value) for name, value in options.items()},
            "parameter": describe_tensors(params, frozen=True),
            "buffer": describe_tensors(buffers),
            "names": {
                "parameter": names_in(modules, params),
                "buffer": names_in(modules, buffers),
            },
        }
        return cls(json.dumps(told, separators=(",", ":")))

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def differences(self, text: str | None, digest: str) -> list[str]:
        """What differs from the text of a run; `digest` is that of the right one."""
        if text is None or Terms(text).digest != digest:
            return ["what it trains (the store does not hold the run's description any more)"]
        mine, theirs = json.loads(self.text), json.loads(text)
        found = list(_of_options(mine.get("options", {}), theirs.get("options", {})))
        for kind in KINDS:
            found += _of_tensors(kind, _rows(kind, mine), _rows(kind, theirs))
        return found


NO_TERMS = Terms("{}")
Row = tuple[str, str]  # name, description


def _rows(kind: str, told: Mapping[str, Any]) -> list[Row]:
    described = told.get(kind, [])
    names = told.get("names", {}).get(kind) or [""] * len(described)
    return list(zip(names, described, strict=True))


def _of_options(mine: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[str]:
    for name in {**mine, **theirs}:
        here, there = mine.get(name, "missing"), theirs.get(name, "missing")
        if here != there:
            yield f"{name}: {here} here, {there} in the run"


def _of_tensors(kind: str, mine: Sequence[Row], theirs: Sequence[Row]) -> Iterator[str]:
    if len(mine) != len(theirs):
        yield f"the number of {kind}s: {len(mine)} here, {len(theirs)} in the run"
    known = {name for name, _ in mine} & {name for name, _ in theirs} - {""}
    found = 0
    for place, (here, there) in enumerate(zip(mine, theirs, strict=False)):
        moved = here[0] != there[0] and not known.isdisjoint((here[0], there[0]))
        if here[1] == there[1] and not moved:
            continue
        found += 1
        if found > SHOWN:
            yield f"and further {kind}s"
            return
        yield f"{kind} {place}: {_shown(here)} here, {_shown(there)} in the run"


def _shown(row: Row) -> str:
    """Such as "encoder.weight (4, 3) float32 on cpu"."""
    return " ".join(filter(None, row))

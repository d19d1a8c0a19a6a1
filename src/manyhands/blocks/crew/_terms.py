"""What all workers of a crew must have in common: the options, and the tensors that are averaged.

A worker describes its own in a text when it joins. The first worker's text is the run's. A worker
whose text differs is refused, with an error that names the differences. The ranks of a process
group compare the same things when the optimizer is made (`_core/agreement.py`); a crew's members
are never all present at one time.

    {"options": {"every": "16", ...},
     "parameter": ["(4, 3) float32 on cpu", ...], "buffer": [...],
     "names": {"parameter": ["encoder.weight", ...], "buffer": [...]}}

Tensors are averaged by position, so their order matters, and only names can reveal a different
order. If names are unknown, or if two workers have no name in common (one model is wrapped), names
are not compared.
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
LISTED = 3  # differences of a kind in an error message: more add nothing


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
        """Describe a worker's options and tensors."""
        described = {
            # As text, so that every option can be compared after a trip through JSON.
            "options": {name: str(value) for name, value in options.items()},
            "parameter": describe_tensors(params, frozen=True),
            "buffer": describe_tensors(buffers),
            "names": {
                "parameter": names_in(modules, params),
                "buffer": names_in(modules, buffers),
            },
        }
        return cls(json.dumps(described, separators=(",", ":")))

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def differences(self, text: str | None, digest: str) -> list[str]:
        """Return how this worker differs from the run's text, whose checksum is `digest`."""
        # The checksum comes from the roster, and is right. The text may be missing or forged.
        if text is None or Terms(text).digest != digest:
            return ["what it trains (the store does not hold the run's description any more)"]
        own, theirs = json.loads(self.text), json.loads(text)
        found = list(_option_differences(own.get("options", {}), theirs.get("options", {})))
        for kind in KINDS:
            found += _tensor_differences(
                kind, _described_tensors(kind, own), _described_tensors(kind, theirs)
            )
        return found


NO_TERMS = Terms("{}")
DescribedTensor = tuple[str, str]  # name (empty if unknown), description


def _described_tensors(kind: str, described: Mapping[str, Any]) -> list[DescribedTensor]:
    tensors = described.get(kind, [])
    names = described.get("names", {}).get(kind) or [""] * len(tensors)
    return list(zip(names, tensors, strict=True))


def _option_differences(own: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[str]:
    for name in {**own, **theirs}:  # the options of both, in order
        here, there = own.get(name, "missing"), theirs.get(name, "missing")
        if here != there:
            yield f"{name}: {here} here, {there} in the run"


def _tensor_differences(
    kind: str, own: Sequence[DescribedTensor], theirs: Sequence[DescribedTensor]
) -> Iterator[str]:
    if len(own) != len(theirs):
        yield f"the number of {kind}s: {len(own)} here, {len(theirs)} in the run"
    # Names that both workers have. Any other name says nothing: one model may be wrapped.
    common = {name for name, _ in own} & {name for name, _ in theirs} - {""}
    found = 0
    for position, (here, there) in enumerate(zip(own, theirs, strict=False)):
        moved = here[0] != there[0] and not common.isdisjoint((here[0], there[0]))
        if here[1] == there[1] and not moved:
            continue
        found += 1
        if found > LISTED:
            yield f"and further {kind}s"
            return
        yield f"{kind} {position}: {_format(here)} here, {_format(there)} in the run"


def _format(tensor: DescribedTensor) -> str:
    """Return a text such as "encoder.weight (4, 3) float32 on cpu"."""
    return " ".join(filter(None, tensor))

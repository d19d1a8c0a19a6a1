"""Do all ranks hold the same tensors? If not, every rank raises, and names the first that differs.

What is compared is what a collective over a tensor takes for granted, and checks nowhere: a sum of
float32 on one rank and float64 on another, or of a matrix and its transpose, comes back as garbage.

    shape       of a DTensor the whole one's, and how it is placed
    dtype
    layout      strides, unless contiguous: flat views are in the order of memory
    device      its type, and which tensors lie on one device together; not its index, which differs
    name        if a model is known: the same names in another order are other tensors

One collective of a few checksums tells that all is well. Only if it is not do texts follow. Both
travel on a device that the group is known to serve, since that of the tensors may be what differs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhands._core.dtensor import is_dtensor, local
from manyhands._core.ranks import RankGroup

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def check_same_tensors(
    who: str,
    workers: RankGroup,
    kinds: Mapping[str, Sequence[Tensor]],
    names: Mapping[str, Sequence[str]] | None = None,
    *,
    frozen: bool = False,
) -> None:
    """Raise a ValueError on every rank where the tensors of a kind differ between ranks.

    `kinds` are lists of tensors by what they are in the singular ("parameter"), `names` those that
    are known. `frozen`: it matters as well which parameters are trained.
    """
    if workers.size == 1:
        return
    names = {kind: list((names or {}).get(kind, ())) for kind in kinds}
    texts = {
        kind: describe_tensors(tensors, frozen=frozen and kind == "parameter")
        for kind, tensors in kinds.items()
    }
    sums = [_checksum(texts), *(_checksum(names[kind]) if names[kind] else 0.0 for kind in kinds)]
    everyone = workers.all_gather(sums, workers.any_device)
    tensors, *named = zip(*everyone, strict=True)
    known = [each for each in named if 0.0 not in each]
    if all(len(set(each)) == 1 for each in (tensors, *known)):
        return
    everyones = workers.all_gather_text(json.dumps([texts, names]), workers.any_device)
    _explain(who, [json.loads(one) for one in everyones])


def gather_if_different(ranks: RankGroup, claims: Any, device: torch.device) -> list[Any] | None:
    """Return every rank's claims (plain JSON) if any differ, and None if all are equal.

    One number tells that they are equal. Only a mistake pays for gathering the texts.
    """
    checksums = ranks.all_gather([_checksum(claims)], device)
    if len({checksum[0] for checksum in checksums}) == 1:
        return None
    return [json.loads(text) for text in ranks.all_gather_text(json.dumps(claims), device)]


def describe_tensors(tensors: Iterable[Tensor], *, frozen: bool = False) -> list[str]:
    """Describe in words what ranks must have in common; `frozen`: also whether it is trained."""
    describer = Describer()
    return [describer.describe(tensor, frozen=frozen) for tensor in tensors]


class Describer:
    """Puts what ranks must have alike in a tensor into words.

    A device is named by its number among those of its type that this describer has met.
    """

    def __init__(self) -> None:
        self._devices: dict[str, list[torch.device]] = {}

    def describe(self, tensor: Tensor, name: str = "", *, frozen: bool = False) -> str:
        """Such as "encoder.weight (4, 3) float32 on cpu"; `frozen`: also whether it is trained."""
        here = local(tensor)
        words = [name, str(tuple(tensor.shape)), str(tensor.dtype).removeprefix("torch.")]
        words.append(f"on {tensor.device.type}{self._which(tensor.device)}")
        if is_dtensor(tensor):
            mesh = tuple(tensor.device_mesh.shape)  # type: ignore[attr-defined]
            words.append(f"placed {tensor.placements} on a mesh of {mesh}")  # type: ignore[attr-defined]
        if here.layout is not torch.strided:
            words.append(f"as {str(here.layout).removeprefix('torch.')}")
        elif not here.is_contiguous():
            words.append(f"with strides {_strides(here)}")
        if frozen and not tensor.requires_grad:
            words.append("frozen")
        return " ".join(word for word in words if word)

    def _which(self, device: torch.device) -> str:
        met = self._devices.setdefault(device.type, [])
        if device not in met:
            met.append(device)
        number = met.index(device)
        return f", device {number + 1}" if number else ""


def names_in(modules: Sequence[nn.Module], tensors: Sequence[Tensor]) -> list[str]:
    """The names of parameters or buffers; none, if one of them is in no module."""
    names: dict[int, str] = {}
    for number, module in enumerate(modules):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            for wrapper in WRAPPERS:
                name = name.replace(wrapper, "")
            names.setdefault(id(tensor), f"{number}.{name}" if len(modules) > 1 else name)
    found = [names.get(id(tensor), "") for tensor in tensors]
    return found if all(found) else []


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides; 1 for a dimension of one element, where a stride means nothing."""
    return tuple(s if n != 1 else 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def _checksum(value: Any) -> float:
    return float(zlib.crc32(json.dumps(value).encode()))


def _explain(who: str, each: Sequence[tuple[dict[str, list[str]], dict[str, list[str]]]]) -> None:
    """Raise for the first tensor that ranks do not have alike."""
    advice = f"Build the same model, and the same {who}, on every rank."
    for kind in each[0][0]:
        texts = [theirs[kind] for theirs, _ in each]
        names = [known[kind] for _, known in each]
        for number, values in enumerate(zip(*texts, strict=False)):
            if len(set(values)) > 1:
                called = f" ({names[0][number]})" if names[0] else ""
                raise ValueError(
                    f"ranks have different {kind}s. The first that differs is {kind} {number}"
                    f"{called}: {_by_rank(values)}. {advice}"
                )
        if len({len(text) for text in texts}) > 1:
            counts = _by_rank([str(len(text)) for text in texts])
            raise ValueError(f"ranks have different numbers of {kind}s: {counts}. {advice}")
        same_names = all(names) and len({tuple(sorted(known)) for known in names}) == 1
        for number, values in enumerate(zip(*names, strict=True) if same_names else ()):
            if len(set(values)) > 1:
                raise ValueError(
                    f"ranks have the same {kind}s in another order. The first that differs is "
                    f"{kind} {number}: {_by_rank(values)}. {advice}"
                )


def _by_rank(values: Sequence[str]) -> str:
    """Which ranks have which value."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(those) > 1 else ''} {', '.join(map(str, those[:8]))}"
        f"{', ...' if len(those) > 8 else ''}: {value}"
        for value, those in list(ranks.items())[:8]
    )

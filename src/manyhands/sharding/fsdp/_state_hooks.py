"""Hooks of a wrap's `state_dict` and `load_state_dict`: from its names and slices to the plain
model's names and whole tensors, and back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from manyhands._core.dtensor import local
from manyhands.sharding.fsdp._checks import held
from manyhands.sharding.fsdp._full_tensors import from_local, gathered, rename, sliced
from manyhands.sharding.fsdp._transparent import INNER, plain


def to_plain(wrap: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """After `state_dict()`: the plain model's names, and whole tensors."""
    mine = _last(state, prefix)
    rename(mine, prefix, without=f"{INNER}.")
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        for key, version in _last(versions, prefix[:-1]).items():
            versions[key] = version  # for a load where the wraps are, inside a plain container
            versions[plain(key + ".")[:-1]] = version  # the wrapped module's, over the wrap's
    if wrap._local:
        state.update({key: local(value) for key, value in mine.items()})
        return
    here = not wrap.state_dict_on_rank_0_only or wrap.rank == 0
    tied = {prefix + name: id(param) for name, param in held(wrap._places)}
    gathered(mine, tied, wrap.state_dict_device, here=here)
    if here:
        dtypes = wrap._buffer_dtypes
        for key, value in mine.items():
            dtype = dtypes.get(key[len(prefix) :])
            state[key] = value if dtype is None else value.to(dtype)


def _last(entries: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Take out the last entries, as far as they have the prefix; in their order."""
    taken = []
    while entries:
        key, value = entries.popitem()
        if not key.startswith(prefix):
            entries[key] = value
            break
        taken.append((key, value))
    return dict(reversed(taken))


def from_plain(wrap: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before `load_state_dict()`: our names, and this worker's slices."""
    wrap._reshard()
    convert = from_local if wrap._local else sliced
    for name, param in held(wrap._places):
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and (wrap._local or value.shape == param.shape):
            state[prefix + name] = convert(value, param)
    rename(state, prefix, within=f"{INNER}.")


def with_our_versions(wrap: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state dict whose modules' versions, if it has some, are under our names, too."""
    versions = getattr(state, "_metadata", None)
    if versions is None:
        return state
    named = OrderedDict(state)
    ours = {name: versions.get(plain(name + ".")[:-1]) for name, _ in wrap.named_modules()}
    named._metadata = {**versions, **{name: v for name, v in ours.items() if v is not None}}  # type: ignore[attr-defined]
    return named


def after_load(wrap: Any, keys: Any) -> None:
    """Parameters may have been assigned; and what is amiss is told by the plain model's names."""
    wrap._look_again()
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = [plain(name) for name in names]

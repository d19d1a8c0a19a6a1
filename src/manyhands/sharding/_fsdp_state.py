"""Hooks of a wrap's `state_dict` and `load_state_dict`: from its names and slices to the plain
model's names and whole tensors, and back.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from manyhands._dtensors import local
from manyhands.sharding._fsdp_checks import held
from manyhands.sharding._fsdp_full import INNER, from_local, gathered, plain, rename, sliced


def to_plain(wrap: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """After `state_dict()`: the plain model's names, and whole tensors."""
    rename(state, prefix, without=f"{INNER}.")
    mine = {key: value for key, value in state.items() if key.startswith(prefix)}
    if wrap._local:
        state.update({key: local(value) for key, value in mine.items()})
        return
    here = not wrap.state_dict_on_rank_0_only or wrap.rank == 0
    tied = {prefix + name: id(param) for name, param in held(wrap._places)}
    gathered(mine, tied, wrap.state_dict_device, here=here)
    for key in mine:
        del state[key]
    if here:
        dtypes = wrap._buffer_dtypes
        for key, value in mine.items():
            dtype = dtypes.get(key[len(prefix) :])
            state[key] = value if dtype is None else value.to(dtype)


def from_plain(wrap: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before `load_state_dict()`: our names, and this worker's slices."""
    wrap._reshard()
    convert = from_local if wrap._local else sliced
    for name, param in held(wrap._places):
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and (wrap._local or value.shape == param.shape):
            state[prefix + name] = convert(value, param)
    rename(state, prefix, within=f"{INNER}.")


def after_load(wrap: Any, keys: Any) -> None:
    """Parameters may have been assigned; and what is amiss is told by the plain model's names."""
    wrap._look_again()
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = [plain(name) for name in names]

"""State dicts of wraps: the plain model's names and full tensors outside, ours inside.

    to_plain      hook after state_dict(): plain names, full tensors (or slices, if asked for)
    from_plain    hook before load_state_dict(): our names, and this rank's slices
    after_load    hook after load_state_dict(): look the parameters up again

torch calls the hooks for every wrap, inner ones first, so each converts only its own entries.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from manyhands._core.modules import INNER, plain_name
from manyhands._core.sharded import is_dtensor, local_shard
from manyhands.sharding.fsdp._full_tensors import (
    from_local,
    rename_keys,
    replace_by_full,
    shard_like,
)
from manyhands.sharding.fsdp._places import named_params


def to_plain(wrap: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Convert this wrap's entries of a state dict to plain names and full tensors."""
    own = _pop_last(state, prefix)
    rename_keys(own, prefix, remove=f"{INNER}.")
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        for key, version in _pop_last(versions, prefix[:-1]).items():
            versions[key] = version  # for loading a wrap inside a plain container
            # The wrapped module comes after its wrap, so its version replaces the wrap's.
            versions[plain_name(key + ".")[:-1]] = version
    if wrap._in_local_state:
        state.update({key: local_shard(value) for key, value in own.items()})
        return
    keep = not wrap.state_dict_on_rank_0_only or wrap.rank == 0
    tied = {prefix + name: id(param) for name, param in named_params(wrap._places)}
    # Every rank takes part in gathering, also those that keep nothing.
    replace_by_full(own, tied, wrap.state_dict_device, keep=keep)
    if keep:
        dtypes = wrap._former_buffer_dtypes
        for key, value in own.items():
            dtype = dtypes.get(key[len(prefix) :])
            state[key] = value if dtype is None else value.to(dtype)


def _pop_last(entries: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Take out the last entries, as far as their keys have the prefix, and keep their order."""
    # A wrap's entries were added last. Popping from the end avoids a scan of the whole dict for
    # each wrap.
    popped = []
    while entries:
        key, value = entries.popitem()
        if not key.startswith(prefix):
            entries[key] = value
            break
        popped.append((key, value))
    return dict(reversed(popped))


def from_plain(wrap: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Convert this wrap's entries of a state dict to our names and this rank's slices."""
    wrap._reshard()
    convert = from_local if wrap._in_local_state else shard_like
    for name, param in named_params(wrap._places):
        value = state.get(prefix + name)
        # A tensor of another shape is left as it is: torch's error names the parameter.
        if isinstance(value, Tensor) and (wrap._in_local_state or value.shape == param.shape):
            state[prefix + name] = convert(value, param)
    rename_keys(state, prefix, insert=f"{INNER}.")


def add_our_versions(wrap: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict that has the modules' versions, if any, under our names as well."""
    # torch looks a module's version up by its path, and ours contain `INNER`.
    versions = getattr(state, "_metadata", None)
    if versions is None:
        return state
    copied = OrderedDict(state)
    ours = {name: versions.get(plain_name(name + ".")[:-1]) for name, _ in wrap.named_modules()}
    copied._metadata = {**versions, **{name: v for name, v in ours.items() if v is not None}}  # type: ignore[attr-defined]
    return copied


def after_load(wrap: Any, keys: Any) -> None:
    """Look up parameters that loading may have assigned, and report keys by plain names."""
    wrap._find_params_again()
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = [plain_name(name) for name in names]


def describe_slices(
    params: Iterable[tuple[str, nn.Parameter]], buffers: Iterable[str]
) -> dict[str, Any]:
    """Return what `consolidate_shard_weights` needs to know about this rank's slices."""
    first_names: dict[int, str] = {}
    facts = {}
    for name, param in params:
        facts[name] = {
            "shape": list(param.shape),
            "same_as": first_names.setdefault(id(param), name),  # the first name of a tied one
            "sharded": is_dtensor(param),
        }
    return {"param_metadata": facts, "buffer_names": [plain_name(name) for name in buffers]}


@contextmanager
def set_flag(wraps: Iterable[Any], flag: str) -> Iterator[None]:
    """Set this attribute of all wraps to True inside, and restore it afterwards."""
    former = [(wrap, getattr(wrap, flag)) for wrap in wraps]
    try:
        for wrap, _ in former:
            setattr(wrap, flag, True)
        yield
    finally:
        for wrap, value in former:
            setattr(wrap, flag, value)

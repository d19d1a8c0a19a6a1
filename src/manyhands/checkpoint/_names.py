"""What the tensors of a model are called in the plain model, whatever it is wrapped in.

Wrappers put their own name between: `module.` (data parallelism), `_orig_mod.` (torch.compile),
`_fsdp_wrapped_module.` (FSDP), `_checkpoint_wrapped_module.` (activation checkpointing). A
checkpoint has none of them, so that it fits the model under any other wrapping.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from manyhands.scaling._adaptdl import AdaptiveDataParallel
from manyhands.sharding.fsdp._transparent import CHECKPOINTED, INNER
from manyhands.sharding.fsdp._wrapper import FullyShardedDataParallel
from manyhands.sharding.zero._ddp import ShardedDataParallel

BETWEEN = {"_orig_mod", INNER, CHECKPOINTED}
AROUND = (
    DistributedDataParallel,
    nn.DataParallel,
    ShardedDataParallel,
    AdaptiveDataParallel,
)


@dataclass
class Names:
    """A model's tensors by plain name, each once, and the modules with a state of another kind."""

    params: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)  # of tied tensors: name -> first name
    extras: dict[str, nn.Module] = field(default_factory=dict)
    of: dict[int, str] = field(default_factory=dict)  # id of a tensor -> its name

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.params, **self.buffers}

    def all_of(self, name: str) -> list[str]:
        """A tensor's name and its others, if it is tied."""
        return [name, *(other for other, first in self.aliases.items() if first == name)]


def names_of(model: nn.Module) -> Names:
    """The names in a model, all its parameters in the state between two steps."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}. "
            'Several go in as one: nn.ModuleDict({"generator": g, "critic": c}).'
        )
    _check_shared(model)
    _reshard(model)
    names = Names()
    for prefix, module in _plain(model, ""):
        for name, param in module._parameters.items():
            _add(names, names.params, prefix + name, param)
        for name, buffer in module._buffers.items():
            if name not in module._non_persistent_buffers_set:
                _add(names, names.buffers, prefix + name, buffer)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            names.extras[prefix + "_extra_state"] = module
    on_meta = [name for name, tensor in names.tensors.items() if tensor.is_meta]
    if on_meta:
        raise ValueError(
            f"{listed(on_meta)} of the model {'is' if len(on_meta) == 1 else 'are'} on the meta "
            'device, without memory. Give it some first: model.to_empty(device="cpu").'
        )
    return names


def _add(names: Names, to: dict[str, Tensor], name: str, tensor: Tensor | None) -> None:
    if tensor is None:
        return
    first = names.of.setdefault(id(tensor), name)
    if first == name:
        to[name] = tensor
    else:
        names.aliases[name] = first


def _plain(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Every place of the tree, a shared module at each of its places, under plain prefixes."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is None:
            continue
        between = name in BETWEEN or (name == "module" and isinstance(module, AROUND))
        yield from _plain(child, prefix if between else f"{prefix}{name}.")


def _check_shared(model: nn.Module) -> None:
    """Raise where workers have parameters of their own: a checkpoint holds one of each name."""
    wraps = [each for each in model.modules() if isinstance(each, FullyShardedDataParallel)]
    if any(wrap.world_size > 1 for wrap in wraps):
        for wrap in wraps:
            if wrap.world_size == 1 and wrap.params:
                raise ValueError(
                    f"a wrap of {type(wrap.module).__name__} is in a process group of one, inside "
                    "one of several workers: each worker has its own parameters there, and a "
                    "checkpoint would hold those of one. Save each worker's model.state_dict() and "
                    "optimizer.state_dict() in a file of its own."
                )


def _reshard(model: nn.Module) -> None:
    """Let the parameters of torch's `fully_shard` be the sharded ones, also after a forward."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()
    for module in model.modules():
        if isinstance(module, ShardedDataParallel):
            module._wait()


def listed(names: Sequence[str], most: int = 8) -> str:
    """Some names, and how many more."""
    more = len(names) - most
    return ", ".join(map(repr, names[:most])) + (f" and {more} more" if more > 0 else "")


_ESCAPES = str.maketrans({"%": "%25", ".": "%2E", "/": "%2F"})


def escaped(key: str) -> str:
    """A key of a dict, or an entry's name, as part of a tensor's name."""
    return key.translate(_ESCAPES)


def below(path: str, key: object) -> str:
    """The name of what a container called `path` has under a key or at a place."""
    return f"{path}.{escaped(str(key))}"


def state_key(prefix: str, entry: str, name: str) -> str:
    """An entry of a parameter's state."""
    return f"{prefix}/{escaped(entry)}/{name}"


def put_new(tensors: dict[str, Any], key: str, tensor: Any) -> None:
    """Add a tensor; one that would take another's place is an error."""
    if key in tensors:
        raise ValueError(
            f"two tensors of this checkpoint would be called {key!r}, and one of them be lost. "
            "Rename one of them, or leave it out."
        )
    tensors[key] = tensor

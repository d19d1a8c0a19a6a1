"""What tensors are called: in the plain model, and in a checkpoint.

A model's tensors have the names of the plain model, without those that wrappers put in between
(`_core/modules.py`). So a checkpoint fits the model under any other wrapper.

The keys of all tensors in a checkpoint, such that no two tensors have one key:

    model/NAME                     a parameter or buffer
    optimizer.0/ENTRY/NAME         an entry of a parameter's state
    optimizer.0/options.1.lr       an option of its second parameter group
    optimizer.0/rule.x.y           the scaling rule's state; likewise `other`
    optimizer.0/blocks.anchor/NAME, optimizer.0/replica.1/...   see `_blocks`
    scheduler.0.x                  a scheduler's state
    value/NAME.x.0.y               in the user's value of that name: value["x"][0]["y"]
    value/NAME/PARAMETER           in a module among the user's values
    random/RANK/GENERATOR          a random generator of each rank

If a key of a dict becomes part of a name, its dots, slashes and percent signs are written as in a
web address. So {"a": {"b": t}} is `a.b`, and {"a.b": t} is `a%2Eb`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from manyhands._core.modules import ModuleWrapper, plain_modules


@dataclass
class ModelNames:
    """A model's tensors by plain name, each tensor once, and the modules that have extra state."""

    params: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)  # other name of a tied tensor -> its name
    extras: dict[str, nn.Module] = field(default_factory=dict)
    by_id: dict[int, str] = field(default_factory=dict)  # id of a tensor -> its name

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.params, **self.buffers}

    def all_of(self, name: str) -> list[str]:
        """Return a tensor's name and, if it is tied, its other names."""
        return [name, *(other for other, first in self.aliases.items() if first == name)]


def find_names(model: nn.Module) -> ModelNames:
    """Return the names in a model, after bringing its parameters into their state between steps."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}. "
            'Put several into one: nn.ModuleDict({"generator": g, "critic": c}).'
        )
    wrappers = [each for each in model.modules() if isinstance(each, ModuleWrapper)]
    for wrapper in wrappers:
        wrapper.check_can_save(model)
    _reshard(model)
    for wrapper in wrappers:
        wrapper.settle()  # updated parameters may still be on their way to this rank
    names = ModelNames()
    # Not `named_parameters`, which leaves out the second name of a tied tensor.
    for prefix, module in plain_modules(model):
        for name, param in module._parameters.items():
            _add_tensor(names, names.params, prefix + name, param)
        for name, buffer in module._buffers.items():
            if name not in module._non_persistent_buffers_set:
                _add_tensor(names, names.buffers, prefix + name, buffer)
        # torch's default `get_extra_state` raises; a class that overrides it has extra state.
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            names.extras[prefix + "_extra_state"] = module
    on_meta = [name for name, tensor in names.tensors.items() if tensor.is_meta]
    if on_meta:
        raise ValueError(
            f"{list_names(on_meta)} of the model {'is' if len(on_meta) == 1 else 'are'} on the "
            'meta device, without memory. Allocate it first: model.to_empty(device="cpu").'
        )
    return names


def _add_tensor(
    names: ModelNames, target: dict[str, Tensor], name: str, tensor: Tensor | None
) -> None:
    if tensor is None:  # such as `register_parameter("bias", None)`
        return
    first = names.by_id.setdefault(id(tensor), name)
    if first == name:
        target[name] = tensor
    else:
        names.aliases[name] = first


def _reshard(model: nn.Module) -> None:
    """Free gathered parameters: after a forward, `fully_shard` still shows the whole ones."""
    # From sys.modules: a program that uses `fully_shard` has imported it; others need not.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def list_names(names: Sequence[str], most: int = 8) -> str:
    """Return the first names, quoted, and the number of the others."""
    more = len(names) - most
    return ", ".join(map(repr, names[:most])) + (f" and {more} more" if more > 0 else "")


# -- keys ------------------------------------------------------------------------------------------

_ESCAPES = str.maketrans({"%": "%25", ".": "%2E", "/": "%2F"})


def escape(key: str) -> str:
    """Return a key of a dict, or the name of an entry, as part of a tensor's key."""
    return key.translate(_ESCAPES)


def child_path(path: str, key: object) -> str:
    """Return the path of a container's child; `key` is a key of a dict or an index of a list."""
    return f"{path}.{escape(str(key))}"


def state_key(prefix: str, entry: str, name: str) -> str:
    """Return the key of one entry of a parameter's state."""
    return f"{prefix}/{escape(entry)}/{name}"


def put_new(tensors: dict[str, Any], key: str, tensor: Any) -> None:
    """Add a tensor. Raise ValueError if there is one with that key."""
    if key in tensors:
        raise ValueError(
            f"two tensors of this checkpoint would be called {key!r}, and one of them would be "
            "lost. Rename one of them, or leave it out."
        )
    tensors[key] = tensor

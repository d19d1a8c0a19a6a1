"""Save a model's tensors under the plain names, and load them under any wrapper.

The tensors have the names of the plain model, without those that wrappers put in between
(`_optimizers/modules.py`). So a checkpoint fits the model under any other wrapper.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from manyhands._optimizers.modules import ModuleWrapper, plain_modules
from manyhands._ranks.received import received_tensors
from manyhands.checkpoint._format import Contents, ModelMeta
from manyhands.checkpoint._handover import ForeignState
from manyhands.checkpoint._reader import Reader
from manyhands.checkpoint._tensor_parts import TensorParts, to_parts
from manyhands.checkpoint._values import decode, encode

# -- names -----------------------------------------------------------------------------------------


@dataclass
class ModelNames:
    """A model's tensors by plain name, each tensor once, and the modules that have extra state."""

    params: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)  # other name of a tied tensor -> its name
    extras: dict[str, nn.Module] = field(default_factory=dict)
    by_id: dict[int, str] = field(default_factory=dict)  # id of a tensor -> its name
    left_out: dict[str, list[int]] = field(default_factory=dict)  # shapes of frozen parameters
    config: str = ""  # the model's own description of itself, as a JSON file for transformers

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.params, **self.buffers}

    def all_of(self, name: str) -> list[str]:
        """Return a tensor's name and, if it is tied, its other names."""
        return [name, *(other for other, first in self.aliases.items() if first == name)]

    def leave_out_frozen(self) -> None:
        """Leave the parameters out that are not trained."""
        for name, param in list(self.params.items()):
            if not param.requires_grad:
                for each in self.all_of(name):
                    self.left_out[each] = list(param.shape)
                    self.aliases.pop(each, None)
                del self.params[name]


def find_names(model: object, *, on_meta: bool = False) -> ModelNames:
    """Return the names in a model, after bringing its parameters into their state between steps."""
    # `on_meta`: tensors may be without memory.
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}. "
            'Put several into one: nn.ModuleDict({"generator": g, "critic": c}).'
        )
    # From sys.modules: only a program that uses `fully_shard` has imported it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for each in model.modules():
        if isinstance(each, ModuleWrapper):
            each.check_can_save(model)
        if fsdp is not None and isinstance(each, fsdp.FullyShardedDataParallel):
            raise TypeError(
                "torch's FullyShardedDataParallel shows only this rank's shard of the model, "
                "without its place. Use mh.FSDP or torch's fully_shard."
            )
        if fsdp is not None and isinstance(each, fsdp.FSDPModule):
            each.reshard()  # after a forward, parameters are still gathered
    names = ModelNames(config=describe_config(model))
    # Not `named_parameters`, which leaves out the second name of a tied tensor.
    for prefix, module in plain_modules(model):
        buffers = dict(module._buffers)
        for name in module._non_persistent_buffers_set:
            buffers.pop(name, None)
        for target, tensors in ((names.params, module._parameters), (names.buffers, buffers)):
            for name, tensor in tensors.items():
                if tensor is None:  # such as `register_parameter("bias", None)`
                    continue
                first = names.by_id.setdefault(id(tensor), prefix + name)
                if first == prefix + name:
                    target[first] = tensor
                else:
                    names.aliases[prefix + name] = first
        # torch's default `get_extra_state` raises; a class that overrides it has extra state.
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            names.extras[prefix + "_extra_state"] = module
    empty = [name for name, tensor in names.tensors.items() if tensor.is_meta]
    if empty and not on_meta:
        raise ValueError(
            f"{list_names(empty)} of the model: on the meta device, without memory. Call "
            'model.to_empty(device="cpu") first.'
        )
    return names


def describe_config(model: nn.Module) -> str:
    """Return the text of transformers' `config.json` for a model; "" if it has no config."""
    # The last without a prefix is inside of all wrappers.
    plain = [module for prefix, module in plain_modules(model) if not prefix][-1]
    to_text = getattr(getattr(plain, "config", None), "to_json_string", None)
    if to_text is None:
        return ""
    config = json.loads(to_text())
    # Not the class that `fully_shard` has made of it, FSDPModel.
    kind = next(c.__name__ for c in type(plain).__mro__ if not c.__name__.startswith("FSDP"))
    types = (param.dtype for param in model.parameters() if param.is_floating_point())
    dtype = str(next(types, torch.get_default_dtype())).removeprefix("torch.")
    config |= {"architectures": [kind], "dtype": dtype}
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def list_names(names: Sequence[str]) -> str:
    """Return the first names, quoted, and the number of further names."""
    text = ", ".join(map(repr, names[:8]))
    if len(names) > 8:
        text += f" and {len(names) - 8} more"
    return text


# -- save and load ---------------------------------------------------------------------------------


def collect_model(names: ModelNames, prefix: str, contents: Contents) -> ModelMeta:
    """Add this rank's tensors to the contents; return the model's description as JSON."""
    # Every rank has the parameters, and writes a share of them. Buffers are taken from rank 0, as
    # under DistributedDataParallel.
    for name, tensor in names.params.items():
        contents.add(f"{prefix}/{name}", to_parts(tensor, contents.savers))
    for name, tensor in names.buffers.items():
        contents.put_of_first(f"{prefix}/{name}", tensor)
    extras = {}
    for name, module in names.extras.items():
        # On every rank, even if only rank 0's is saved: a module may use collectives there.
        state = module.get_extra_state()
        extras[name] = encode(state, f"{prefix}/{name}", contents.put_of_first)
    return {
        "params": list(names.params),
        "buffers": list(names.buffers),
        "aliases": names.aliases,
        "config": names.config,
        "left_out": names.left_out,
        "extras": extras,
    }


def match_model(
    names: ModelNames, meta: ModelMeta, prefix: str, reader: Reader, what: str = "model"
) -> tuple[dict[str, TensorParts], list[ForeignState]]:
    """Check that a saved model fits. Return the memory to fill, by key, and the extra states."""
    targets: dict[str, TensorParts] = {}
    saved = {name: name for name in (*meta["params"], *meta["buffers"])} | meta["aliases"]
    left_out = meta["left_out"]  # by `save(frozen=False)`: they stay as they are
    missing = []
    wrong = []
    received = received_tensors()  # from a crew: later than any checkpoint
    for name, tensor in names.tensors.items():
        shape = tuple(tensor.shape)
        # Any of a tied tensor's names will do: another class may register them in other order.
        known = [other for other in names.all_of(name) if other in saved]
        if not known:
            before = left_out.get(name)
            if before is None:
                missing.append(name)
            elif tuple(before) != shape:
                wrong.append(f"{name!r} was {tuple(before)} at the save, and is {shape} here")
            continue
        key = f"{prefix}/{saved[known[0]]}"
        stored = reader.tensors[key]
        if shape != stored.shape:
            wrong.append(f"{name!r} is {stored.shape} in the checkpoint and {shape} here")
        elif not can_convert(stored.torch_dtype, tensor.dtype):
            wrong.append(f"{name!r} is {stored.dtype} in the checkpoint and {tensor.dtype} here")
        elif id(tensor) not in received:
            # Several may have been tied in the checkpoint, and not be here.
            targets[key] = to_parts(tensor).merge(targets.get(key))
    unexpected = {*saved, *left_out} - {*names.tensors, *names.aliases}
    missing += names.extras.keys() - meta["extras"].keys()
    unexpected |= meta["extras"].keys() - names.extras.keys()
    # All problems in one message: they often have one cause.
    problems = wrong[:8]
    if unexpected:
        problems.insert(0, f"only the checkpoint has {list_names(sorted(unexpected))}")
    if missing:
        problems.insert(0, f"only the {what} here has {list_names(sorted(missing))}")
    if problems:
        raise ValueError(
            f"the checkpoint's {what} is a different one: {'; '.join(problems)}. Build the model "
            "that was saved."
        )
    states = []
    for name, module in names.extras.items():
        state = decode(meta["extras"][name], reader.read_once)
        states.append(ForeignState(name, module.get_extra_state, module.set_extra_state, state))
    return targets, states


def can_convert(saved: torch.dtype, here: torch.dtype) -> bool:
    """Return whether numbers of one type may be loaded as the other."""
    return saved == here or (saved.is_floating_point and here.is_floating_point)

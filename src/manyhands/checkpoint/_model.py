"""Save and load a model's tensors under the names of the plain model.

The names omit wrappers (`_optimizers/modules.py`), so a checkpoint loads under any wrapper.
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
    """The tensors of a model by plain name, without duplicates, and modules with extra state."""

    params: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)  # alias of a tied tensor -> name
    extras: dict[str, nn.Module] = field(default_factory=dict)
    by_id: dict[int, str] = field(default_factory=dict)  # id of a tensor -> name
    # Shapes of omitted frozen parameters.
    left_out: dict[str, list[int]] = field(default_factory=dict)
    config: str = ""  # the text of transformers' config.json, or ""

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.params, **self.buffers}

    def all_of(self, name: str) -> list[str]:
        """Return a tensor's name, followed by the aliases of a tied tensor."""
        return [name, *(other for other, first in self.aliases.items() if first == name)]

    def leave_out_frozen(self) -> None:
        """Omit frozen parameters."""
        for name, param in list(self.params.items()):
            if not param.requires_grad:
                for each in self.all_of(name):
                    self.left_out[each] = list(param.shape)
                    self.aliases.pop(each, None)
                del self.params[name]


def find_names(model: object, *, on_meta: bool = False) -> ModelNames:
    """Return the names in a model. Reshards gathered parameters."""
    # `on_meta` allows tensors without memory.
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}. "
            'Combine several models: nn.ModuleDict({"generator": g, "critic": c}).'
        )
    # Not imported: programs without `fully_shard` do not need it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for each in model.modules():
        if isinstance(each, ModuleWrapper):
            each.check_can_save(model)
        if fsdp is not None and isinstance(each, fsdp.FullyShardedDataParallel):
            raise TypeError(
                "torch's FullyShardedDataParallel does not expose the position of this rank's "
                "shard. Use mh.FSDP or torch's fully_shard."
            )
        if fsdp is not None and isinstance(each, fsdp.FSDPModule):
            each.reshard()  # after a forward pass, parameters are still gathered
    names = ModelNames(config=describe_config(model))
    # Not `named_parameters`, which omits the second name of a tied tensor.
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
        # Only classes that override `get_extra_state` have extra state; torch's default raises.
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            names.extras[prefix + "_extra_state"] = module
    empty = [name for name, tensor in names.tensors.items() if tensor.is_meta]
    if empty and not on_meta:
        raise ValueError(
            f"{list_names(empty)} of the model have no memory (meta device). Call "
            'model.to_empty(device="cpu") first.'
        )
    return names


def describe_config(model: nn.Module) -> str:
    """Return the text of transformers' `config.json` for a model, or ""."""
    # The last module with an empty prefix is inside all wrappers.
    plain = [module for prefix, module in plain_modules(model) if not prefix][-1]
    to_text = getattr(getattr(plain, "config", None), "to_json_string", None)
    if to_text is None:
        return ""
    config = json.loads(to_text())
    # Skips the FSDP class that `fully_shard` creates.
    kind = next(c.__name__ for c in type(plain).__mro__ if not c.__name__.startswith("FSDP"))
    types = (param.dtype for param in model.parameters() if param.is_floating_point())
    dtype = str(next(types, torch.get_default_dtype())).removeprefix("torch.")
    config |= {"architectures": [kind], "dtype": dtype}
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def list_names(names: Sequence[str]) -> str:
    """Return the first names in quotes, followed by the number of further names."""
    text = ", ".join(map(repr, names[:8]))
    if len(names) > 8:
        text += f" and {len(names) - 8} more"
    return text


# -- save and load ---------------------------------------------------------------------------------


def collect_model(names: ModelNames, prefix: str, contents: Contents) -> ModelMeta:
    """Add this rank's tensors to the contents. Return the model's description as JSON."""
    # Every rank writes a share of the parameters. Buffers are saved from rank 0, as in
    # DistributedDataParallel.
    for name, tensor in names.params.items():
        contents.add(f"{prefix}/{name}", to_parts(tensor, contents.savers))
    for name, tensor in names.buffers.items():
        contents.put_of_first(f"{prefix}/{name}", tensor)
    extras = {}
    for name, module in names.extras.items():
        # Called on every rank, because the module may use collectives.
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
    """Check that a saved model fits. Return the memory to fill by key, with extra states."""
    targets: dict[str, TensorParts] = {}
    saved = {name: name for name in (*meta["params"], *meta["buffers"])} | meta["aliases"]
    left_out = meta["left_out"]  # omitted by `save(frozen=False)`: not loaded
    missing = []
    wrong = []
    received = received_tensors()  # from a crew: newer than any checkpoint
    for name, tensor in names.tensors.items():
        shape = tuple(tensor.shape)
        # For a tied tensor any name may be the saved one: classes may register names in a different
        # order.
        known = [other for other in names.all_of(name) if other in saved]
        if not known:
            before = left_out.get(name)
            if before is None:
                missing.append(name)
            elif tuple(before) != shape:
                wrong.append(f"{name!r} is {tuple(before)} in the checkpoint and {shape} here")
            continue
        key = f"{prefix}/{saved[known[0]]}"
        stored = reader.tensors[key]
        if shape != stored.shape:
            wrong.append(f"{name!r} is {stored.shape} in the checkpoint and {shape} here")
        elif not can_convert(stored.torch_dtype, tensor.dtype):
            wrong.append(f"{name!r} is {stored.dtype} in the checkpoint and {tensor.dtype} here")
        elif id(tensor) not in received:
            # Tensors may be tied in the checkpoint but separate here.
            targets[key] = to_parts(tensor).merge(targets.get(key))
    unexpected = {*saved, *left_out} - {*names.tensors, *names.aliases}
    missing += names.extras.keys() - meta["extras"].keys()
    unexpected |= meta["extras"].keys() - names.extras.keys()
    # A single message with all problems, which often have a common cause.
    problems = wrong[:8]
    if unexpected:
        problems.insert(0, f"only the checkpoint has {list_names(sorted(unexpected))}")
    if missing:
        problems.insert(0, f"only the {what} here has {list_names(sorted(missing))}")
    if problems:
        raise ValueError(
            f"the checkpoint has a different {what}: {'; '.join(problems)}. Build the model that "
            "was saved."
        )
    states = []
    for name, module in names.extras.items():
        state = decode(meta["extras"][name], reader.read_once)
        states.append(ForeignState(name, module.get_extra_state, module.set_extra_state, state))
    return targets, states


def can_convert(saved: torch.dtype, here: torch.dtype) -> bool:
    """Return whether tensors of the saved type may be loaded as the type here."""
    return saved == here or (saved.is_floating_point and here.is_floating_point)

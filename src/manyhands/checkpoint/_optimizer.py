"""An optimizer's state under its parameters' names: saved from any of ours, loaded into any other.

The index describes an optimizer as `_index.OptimizerMeta` says.

An entry of the parameter's shape may lie in slices on several ranks (`_slices.py`). Any other entry
is whole on each rank that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from manyhands._core.state_parts import (
    OptimizerLayers,
    OptimizerStatePart,
    RuleParts,
    ShardedOptimizer,
    options_of,
    state_parts,
)
from manyhands._core.wrappers import unwrap
from manyhands.checkpoint import _foreign, _index
from manyhands.checkpoint._blocks import BlocksLoader, collect_blocks
from manyhands.checkpoint._model import ModelNames, list_names
from manyhands.checkpoint._ranks import Replica
from manyhands.checkpoint._slices import (
    Parts,
    allocate_target,
    entries_of,
    entry_parts,
    is_partial,
    merge_parts,
    put_new,
    to_parts,
)
from manyhands.checkpoint._values import GetTensor, PutTensor, decode, encode, state_key, tensor_key


@dataclass
class SavedOptimizer:
    """What a rank contributes for an optimizer: its description as JSON, and tensors by key."""

    meta: dict[str, Any]
    tensors: dict[str, Parts] = field(default_factory=dict)


def prepare_optimizers(optimizers: Iterable[object], *, to_load: bool) -> None:
    """Let sharded optimizers finish what is in flight. Every rank must call this."""
    for each in optimizers:
        inner = unwrap(each)[-1] if isinstance(each, Optimizer) else each
        if isinstance(inner, ShardedOptimizer):
            # `prepare` also places parameters that are trained again, which takes collectives. A
            # save needs only to wait for parameters in flight.
            inner.prepare() if to_load else inner.wait()


def group_names(optimizer: Optimizer, names: ModelNames | None) -> list[list[str]]:
    """Return the parameters' names, by group."""
    result = []
    for number, group in enumerate(optimizer.param_groups):
        # torch stores names itself if the optimizer was made from `named_parameters()`.
        own_names: Any = group.get("param_names")
        if names is None and own_names is None:
            raise ValueError(
                "the optimizer's state is saved under its parameters' names, which the model "
                "knows. Give it as well: model=model."
            )
        members = []
        for place, param in enumerate(group["params"]):
            name = own_names[place] if names is None else names.by_id.get(id(param))
            if name is None:
                raise ValueError(
                    f"parameter {place} of group {number}, of shape {tuple(param.shape)}, is not "
                    "the model's. Give the model that the optimizer is for, and make the optimizer "
                    "after the model is moved and sharded: fully_shard replaces parameters."
                )
            members.append(name)
        result.append(members)
    return result


def _names_by_id(inner: Optimizer, groups: Sequence[Sequence[str]]) -> dict[int, str]:
    """Return each parameter's name by the parameter's id."""
    params = [param for group in inner.param_groups for param in group["params"]]
    members = [name for group in groups for name in group]
    return {id(param): name for param, name in zip(params, members, strict=True)}


# -- save ------------------------------------------------------------------------------------------


def collect_optimizer(
    optimizer: Optimizer, names: ModelNames | None, number: int, replica: Replica
) -> SavedOptimizer:
    """Return what this rank contributes; one rank of a replica describes what all have alike."""
    layers = OptimizerLayers.of(optimizer)
    rule, inner = layers.rule, layers.inner
    groups = group_names(inner, names)
    root = f"optimizer.{number}"
    prefix = replica.key_prefix(root)
    saved = SavedOptimizer({"replica": replica.number, "state": {}})

    def put(path: str, tensor: Tensor) -> str:
        put_new(saved.tensors, path, to_parts(tensor))
        return path

    parts, packed = state_parts(inner)
    flat_names = [name for group in groups for name in group]
    for part in parts:
        name = flat_names[part.index]
        meta = saved.meta["state"].setdefault(name, {})
        for entry, value in entries_of(part).items():
            key = state_key(prefix, entry, name)
            if not isinstance(value, Tensor):
                meta[entry] = encode(value, key, put)
                continue
            # Not `put`: a rank may hold several ranges of one parameter, which share the key.
            stored = entry_parts(part, entry, value)
            before = saved.tensors.get(key)
            saved.tensors[key] = merge_parts(before, stored)
            meta[entry] = {"$": "tensor", "key": key}
    blocks = None
    if layers.blocks is not None:
        # Under `root`, not `prefix`: all replicas have the same outer state.
        blocks, tensors = collect_blocks(layers.blocks, _names_by_id(inner, groups), root, replica)
        saved.tensors |= tensors
    if not replica.leads:
        if layers.sharded is None:
            saved.meta["state"] = {}  # the leading rank describes the same state
        return saved
    options = [options_of(group) for group in inner.param_groups]
    saved.meta |= {
        "class": layers.class_name,
        "groups": [
            {"names": members, "options": encode(each, f"{prefix}/options.{i}", put)}
            for i, (members, each) in enumerate(zip(groups, options, strict=True))
        ],
        "other": encode(_other_state(packed, layers), f"{prefix}/other", put),
        "rule": None if rule is None else _collect_rule(rule, flat_names, prefix, put),
        "blocks": blocks,
    }
    return saved


def _other_state(packed: Mapping[str, object], layers: OptimizerLayers) -> dict[str, object]:
    """Return what a user's own optimizer adds to its state dict."""
    found = {k: v for k, v in packed.items() if k not in ("state", "param_groups", "manyhands")}
    # The layers ended at a wrapper with state of its own, and ours is inside: saving that as
    # "other" would store every rank's state as if it were rank 0's.
    if "blocks" in packed or ("manyhands" in packed and layers.rule is None):
        ours = "blocks" if "blocks" in packed else "a scaling rule"
        raise TypeError(
            f"there is {ours} inside of this {type(layers.inner).__name__}, which has state of its "
            "own. Give the optimizer inside as optimizer=..., and save the state of the wrapper "
            "around it under a name of yours."
        )
    return found


def _collect_rule(
    rule: RuleParts, names: Sequence[str], prefix: str, put: PutTensor
) -> _index.StateMeta:
    state = rule.scaling_state_dict()
    # By name instead of position: other groups or shardings may have another order.
    state["previous"] = {
        name: grad for name, grad in zip(names, state["previous"], strict=False) if grad is not None
    }
    return {"class": type(rule).__name__, "state": encode(state, f"{prefix}/rule", put)}


# -- load ------------------------------------------------------------------------------------------


class OptimizerLoader:
    """Loads a saved state into an optimizer.

    Creating a loader checks that the state fits, and allocates memory. Then `targets` are to be
    filled, `load` hands the state to the optimizer, and `finish` to the rule and blocks around it.
    Until `load`, the optimizer is unchanged, except for state tensors that are filled in place.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        meta: _index.OptimizerMeta,
        names: ModelNames | None,
        tensors: Mapping[str, _index.StoredTensor],
        get: GetTensor,
        number: int,
        replica: Replica,
    ) -> None:
        layers = self._layers = OptimizerLayers.of(optimizer)
        self.rule, self.inner = layers.rule, layers.inner
        self.targets: dict[str, Parts] = {}
        meta, saved_replica = replica.meta_to_load(meta)
        self._meta, self._tensors, self._get = meta, tensors, get
        self._names = names
        # An entry that is whole, but needed in several places: read once, then copied.
        self._first: dict[str, Tensor] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []  # (tensor, the tensor to copy it from)
        self._groups = group_names(self.inner, names)
        self._check_class_and_groups()
        # A tied parameter may have been saved under another of its names.
        self._aliases = {
            other: name
            for members in self._groups
            for name in members
            for other in _all_names(names, name)
        }
        self._state = {self._aliases.get(name, name): s for name, s in meta["state"].items()}
        self._options = self._merge_options()
        self._check_entries()
        self._other = decode(meta["other"], get)
        self._scaling: object = None if self.rule is None else self._parse_rule(self.rule)
        self._blocks: BlocksLoader | None = None
        if layers.blocks is not None:
            try:
                self._blocks = BlocksLoader(
                    layers.blocks,
                    meta.get("blocks"),
                    self._saved_names(),
                    tensors,
                    get,
                    f"optimizer.{number}",
                    replica,
                    saved_replica,
                )
            # The schema checks that the counters can be decoded, but not what they are.
            except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
                raise ValueError(
                    f"the checkpoint's state of blocks is damaged: {error!r}. Load another one."
                ) from error
            self.targets |= self._blocks.targets
        # Parameters that are trained again get their place in a bucket.
        if isinstance(self.inner, ShardedOptimizer):
            self.inner.prepare()
        parts, self._packed = state_parts(self.inner, include_empty=True)
        flat_names = [name for group in self._groups for name in group]
        self._to_load = [
            (part, self._allocate_entries(part, flat_names[part.index])) for part in parts
        ]

    def _check_class_and_groups(self) -> None:
        here, saved_class = self._layers.class_name, self._meta["class"]
        if here != saved_class:
            raise ValueError(
                f"the checkpoint has the state of {saved_class}, and the optimizer here is {here}. "
                "Build the optimizer that the run was saved with, or load the model alone."
            )
        saved = [set(group["names"]) for group in self._meta["groups"]]
        if len(saved) != len(self._groups):
            raise ValueError(
                f"the checkpoint's optimizer has {len(saved)} parameter groups, and the one here "
                f"{len(self._groups)}. Build it from the same groups."
            )
        for number, (members, saved_members) in enumerate(zip(self._groups, saved, strict=True)):
            # Compared as sets: the order within a group may differ.
            here_names = {other for name in members for other in _all_names(self._names, name)}
            only_here = sorted(
                name for name in members if not saved_members & _all_names(self._names, name)
            )
            only_saved = sorted(saved_members - here_names)
            if only_here or only_saved:
                raise ValueError(
                    f"parameter group {number} has other parameters than the checkpoint's: "
                    + "; ".join(
                        f"only {where} {list_names(found)}"
                        for where, found in (("here", only_here), ("in the checkpoint", only_saved))
                        if found
                    )
                    + ". Build the optimizer from the same groups."
                )

    def _check_entries(self) -> None:
        groups = zip(self.inner.param_groups, self._groups, strict=True)
        dims = {
            name: param.dim()
            for group, names in groups
            for param, name in zip(group["params"], names, strict=True)
        }
        plain, find_dims = self._layers.plain, dims.__getitem__
        _foreign.check_entries(
            plain, self._groups, self._options, self._state, find_dims, skip=_index.EXACT_ENTRY
        )

    def _saved_names(self) -> dict[int, str]:
        """Return each parameter's name in the checkpoint, by the parameter's id."""
        saved = {name for group in self._meta["groups"] for name in group["names"]}
        here = _names_by_id(self.inner, self._groups)
        return {
            number: next(iter(saved & _all_names(self._names, name)))
            for number, name in here.items()
        }

    def _merge_options(self) -> list[dict[str, object]]:
        result = []
        for group, meta in zip(self.inner.param_groups, self._meta["groups"], strict=True):
            here, saved = options_of(group), decode(meta["options"], self._get)
            _foreign.check_group_options(self._layers.plain, here, saved)
            kept = {name: here[name] for name in _foreign.KEPT_OPTIONS if name in here}
            # Options of this release of torch that the saved run did not have stay as they are.
            result.append({**here, **saved, **kept})
        return result

    def _parse_rule(self, rule: RuleParts) -> object:
        meta = self._meta["rule"]
        if meta is None:
            raise ValueError(
                "the checkpoint is of a run without a scaling rule, and here a "
                f"{type(rule).__name__} is around the optimizer. To continue a run under a new "
                f"rule, load it before wrapping: mh.load(...), then mh.{type(rule).__name__}"
                "(optimizer)."
            )
        state = decode(meta["state"], self._get)
        previous = state.get("previous")
        if not isinstance(previous, dict):
            raise ValueError(
                "the checkpoint's scaling rule has no previous gradients: it is damaged. Load "
                "another checkpoint."
            )
        # Back from names to the order of this optimizer's parameters.
        members = [name for group in self._groups for name in group]
        by_name = {self._aliases.get(name, name): grad for name, grad in previous.items()}
        state["previous"] = [by_name.get(name) for name in members] if previous else []
        return rule.check_scaling_state(state)

    def _allocate_entries(self, part: OptimizerStatePart, name: str) -> dict[str, object]:
        """Return a parameter's entries; their tensors are targets, still to be filled."""
        result: dict[str, object] = {}
        for entry, meta in self._state.get(name, {}).items():
            key = tensor_key(meta)
            if key is None:
                result[entry] = decode(meta, self._get)
                continue
            stored = self._tensors[key]
            if entry == _index.EXACT_ENTRY:
                # An optimizer without rounded parameters has no use for the exact ones.
                if part.exact is not None:
                    self._add_target(key, entry_parts(part, _index.EXACT_ENTRY, part.exact))
                continue
            dtype = stored.torch_dtype
            tensor, target = allocate_target(part, name, entry, stored.shape, dtype)
            result[entry] = tensor
            if key not in self._first or is_partial(target):
                self._first.setdefault(key, tensor)
                self._add_target(key, target)
            else:  # one value for several ranges of a parameter, such as the number of steps
                self._copies.append((tensor, self._first[key]))
        return result

    def _add_target(self, key: str, target: Parts) -> None:
        self.targets[key] = merge_parts(self.targets.get(key), target)

    def load(self) -> None:
        """Hand the filled targets to the optimizer. Its `load_state_dict` may be the user's."""
        for tensor, first in self._copies:
            tensor.copy_(first)
        state, for_later = {}, {}
        for part, entries in self._to_load:
            if not entries:
                continue
            if part.number is None:  # frozen, so without a place in the sharded optimizer
                for_later[part.index] = entries
            else:
                state[part.number] = entries
        options = self._options
        groups = [
            {**{k: v for k, v in group.items() if k not in loaded}, **loaded}
            for group, loaded in zip(self._packed["param_groups"], options, strict=True)
        ]
        packed = {**self._packed, **self._other, "state": state, "param_groups": groups}
        holder, sharded = self.inner, self._layers.sharded
        if sharded is None:
            holder.load_state_dict(packed)
        else:
            # Not `load_state_dict`, which expects the state of all ranks.
            sharded.load_parts(packed, for_later, options)
            holder = sharded.optim
        params = [param for group in holder.param_groups for param in group["params"]]
        for number, entries in state.items():
            _restore_types(holder.state[params[number]], entries)

    def finish(self) -> None:
        """Hand their states to the rule and the blocks around the optimizer."""
        if self.rule is not None:
            self.rule.take_scaling_state(self._scaling)
        if self._blocks is not None:
            self._blocks.finish()


def _all_names(names: ModelNames | None, name: str) -> set[str]:
    """Return all names of a parameter; without a model, tied names are unknown."""
    return {name} if names is None else set(names.all_of(name))


def _restore_types(held: dict[str, object], entries: Mapping[str, object]) -> None:
    """Give entries their saved type back: torch's loading converts them to the parameter's type."""
    for name, value in entries.items():
        now = held.get(name)
        if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
            held[name] = value.to(now.device)

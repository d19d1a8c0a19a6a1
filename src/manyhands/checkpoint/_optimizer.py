"""An optimizer's state under its parameters' names: saved from any of ours, loaded into any other.

The index describes an optimizer as `_index.OptimizerMeta` says.

An entry of the parameter's shape may lie in slices on several ranks (`_slices.py`). Any other entry
is whole on each rank that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._core.flat import local_shard
from manyhands._core.state_parts import (
    BlocksParts,
    OptimizerLayers,
    OptimizerStatePart,
    RuleParts,
    ShardedOptimizer,
    StatePart,
    options_of,
    plain_optimizer,
    state_parts,
)
from manyhands._core.wrappers import unwrap
from manyhands.checkpoint import _index
from manyhands.checkpoint._model import ModelNames, list_names
from manyhands.checkpoint._ranks import Replica
from manyhands.checkpoint._slices import (
    Parts,
    TensorParts,
    allocate_target,
    entries_of,
    entry_parts,
    is_partial,
    merge_parts,
    put_new,
    to_parts,
)
from manyhands.checkpoint._values import (
    GetTensor,
    Json,
    PutTensor,
    decode,
    encode,
    state_key,
    tensor_key,
)

#: Options that say how a step is computed, not what it computes. They keep the value that the
#: optimizer was made with: a run saved on a GPU may continue on a CPU, without fused kernels.
KEPT_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
OWN = "residual"  # the entry of blocks that each replica has of its own


@dataclass
class SavedOptimizer:
    """What a rank contributes for an optimizer: its description as JSON, and tensors by key."""

    meta: dict[str, Any]
    tensors: dict[str, Parts] = field(default_factory=dict)


def prepare_to_load(optimizers: Iterable[object]) -> None:
    """Let sharded optimizers place parameters that are trained again. Every rank must call this."""
    for each in optimizers:
        inner = unwrap(each)[-1] if isinstance(each, Optimizer) else each
        if isinstance(inner, ShardedOptimizer):
            inner.prepare()


def group_names(optimizer: Optimizer, names: ModelNames | None) -> list[list[str]]:
    """Return the parameters' names by group: the model's, the groups' own, or numbers."""
    result = []
    for number, group in enumerate(optimizer.param_groups):
        # torch stores names itself if the optimizer was made from `named_parameters()`.
        own_names: Any = group.get("param_names")
        if names is None and own_names is None:
            raise ValueError("an optimizer's state needs the model's names. Give model=model, too.")
        members = []
        for place, param in enumerate(group["params"]):
            name = own_names[place] if names is None else names.by_id.get(id(param))
            if name is None:
                raise ValueError(
                    f"parameter {place} of group {number}, of shape {tuple(param.shape)}, is not "
                    "the model's. Make the optimizer after the model is moved and sharded."
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
            "own. Give the optimizer inside, and the wrapper's state under a name of yours."
        )
    return found


def _collect_rule(
    rule: RuleParts, names: Sequence[str], prefix: str, put: PutTensor
) -> _index.StateMeta:
    """Return a scaling rule's state as JSON, with its gradients by parameter name."""
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
        self._other = decode(meta["other"], get)
        self._scaling: object = None if self.rule is None else self._parse_rule(self.rule)
        self._blocks: BlocksLoader | None = None
        if layers.blocks is not None:
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
            self.targets |= self._blocks.targets
        # Parameters that are trained again get their place in a bucket.
        if isinstance(self.inner, ShardedOptimizer):
            self.inner.prepare()
        parts, self._packed = state_parts(self.inner, include_empty=True)
        flat_names = [name for group in self._groups for name in group]
        self._to_load = [(p, self._allocate_entries(p, flat_names[p.index])) for p in parts]

    def _check_class_and_groups(self) -> None:
        """Raise unless the optimizer here has the saved one's class and parameter groups."""
        here, saved_class = self._layers.class_name, self._meta["class"]
        if here != saved_class:
            raise ValueError(
                f"the checkpoint has the state of {saved_class}, and the optimizer here is {here}."
            )
        saved = [set(group["names"]) for group in self._meta["groups"]]
        if len(saved) != len(self._groups):
            raise ValueError(
                f"the checkpoint has {len(saved)} parameter groups, and the optimizer here "
                f"{len(self._groups)}."
            )
        for number, (members, saved_members) in enumerate(zip(self._groups, saved, strict=True)):
            # Compared as sets: the order within a group may differ.
            here_names = {other for name in members for other in _all_names(self._names, name)}
            only_here = [n for n in members if not saved_members & _all_names(self._names, n)]
            only_saved = saved_members - here_names
            if only_here or only_saved:
                raise ValueError(
                    f"parameter group {number} has other parameters than the checkpoint's: only "
                    f"here {list_names(sorted(only_here))}; only in the checkpoint "
                    f"{list_names(sorted(only_saved))}."
                )

    def _saved_names(self) -> dict[int, str]:
        """Return each parameter's name in the checkpoint, by the parameter's id."""
        saved = {name for group in self._meta["groups"] for name in group["names"]}
        here = _names_by_id(self.inner, self._groups)
        return {n: next(iter(saved & _all_names(self._names, name))) for n, name in here.items()}

    def _merge_options(self) -> list[dict[str, object]]:
        """Return each group's options to load: the saved ones, but those that stay as they are."""
        result = []
        for group, meta in zip(self.inner.param_groups, self._meta["groups"], strict=True):
            here, saved = options_of(group), decode(meta["options"], self._get)
            kept = {name: here[name] for name in KEPT_OPTIONS if name in here}
            # Options of this release of torch that the saved run did not have stay as they are.
            result.append({**here, **saved, **kept})
        return result

    def _parse_rule(self, rule: RuleParts) -> object:
        """Return the saved rule's state, checked, with its gradients in this optimizer's order."""
        meta = self._meta["rule"]
        if meta is None:
            name = type(rule).__name__
            raise ValueError(
                f"the checkpoint is of a run without a scaling rule, and {name} is around the "
                f"optimizer here. To begin with a rule, load it before wrapping in {name}."
            )
        state = decode(meta["state"], self._get)
        previous = state["previous"]
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


# -- blocks ----------------------------------------------------------------------------------------
# The outer state, which all replicas have alike: the anchor and the memories. They are saved as
# slices of whole tensors, each slice once, so that any number of replicas, under any sharding, can
# load its own slices. A codec's residual belongs to ranks that round and average together. It is
# loaded if every rank has the slices that it had; otherwise it begins at zero.


def _tensors_by_key(part: StatePart, name: str, key: str, replica: Replica) -> dict[str, Tensor]:
    """Return the outer state of one parameter by key; `key` is the optimizer's prefix."""
    return {
        f"{replica.key_prefix(key) if entry == OWN else key}/blocks.{entry}/{name}": values
        for entry, values in part.entries.items()
    }


def collect_blocks(
    blocks: BlocksParts, names: Mapping[int, str], key: str, replica: Replica
) -> tuple[Json, dict[str, Parts]]:
    """Return what all replicas have alike, as JSON, and this rank's slices of tensors by key."""
    meta = {**blocks.save_counters(), "memories": blocks.memories, "layouts": replica.layouts}
    tensors: dict[str, Parts] = {
        path: TensorParts.from_flat(values, part.param, part.start or 0)
        for part in blocks.outer_parts()
        for path, values in _tensors_by_key(part, names[id(part.param)], key, replica).items()
    }
    # `put` stores nothing: the counters contain no tensors.
    return encode(meta, f"{key}/blocks", lambda path, _: path), tensors


class BlocksLoader:
    """Loads a saved outer state into blocks. Creating a loader checks that it fits.

    `targets` are views of anchor and memories themselves. Nothing else writes to these between two
    steps, so they need no second copy in memory.
    """

    def __init__(
        self,
        blocks: BlocksParts,
        meta: Json,
        saved_names: Mapping[int, str],
        tensors: Mapping[str, _index.StoredTensor],
        get: GetTensor,
        key: str,
        replica: Replica,
        saved_replica: Replica,
    ) -> None:
        self.targets: dict[str, Parts] = {}
        self._blocks = blocks
        # Without a saved anchor: frozen in the saved run, or all of them if one worker saved it.
        self._unsaved: list[Tensor] = []
        self._meta = blocks.check_counters(decode(meta, get))
        if self._meta is None:  # saved without blocks
            return
        memories = self._meta["memories"]
        if memories != blocks.memories:
            raise ValueError(
                f"the checkpoint's outer step has {memories} memories, and the one here "
                f"{blocks.memories}. Continue with an outer step of the same kind."
            )
        self._load_residuals = self._meta["layouts"] == replica.layouts
        for part in blocks.outer_parts():
            name = saved_names[id(part.param)]
            if f"{key}/blocks.anchor/{name}" not in tensors:
                self._unsaved.append(part.param)
                continue
            residual = part.entries.get(OWN)
            for path, values in _tensors_by_key(part, name, key, saved_replica).items():
                if values is residual and not self._load_residuals:
                    continue
                parts = TensorParts.from_flat(values, part.param, part.start or 0)
                self._check_shape(path, parts, tensors)
                self.targets[path] = parts

    def _check_shape(
        self, path: str, parts: TensorParts, tensors: Mapping[str, _index.StoredTensor]
    ) -> None:
        """Raise unless the checkpoint has this tensor of the outer state, in the same shape."""
        stored = tensors.get(path)
        if stored is None or stored.shape != parts.shape:
            found = "missing" if stored is None else f"of the shape {stored.shape}"
            raise ValueError(
                f"{path!r} is {found} in the checkpoint, and of the shape {parts.shape} here."
            )

    def finish(self) -> None:
        """Continue from the filled targets. The parameters must be filled as well by now."""
        if self._meta is None:
            # The anchor begins at the parameters, without outer momentum.
            self._blocks.begin()
        else:
            residuals = self._load_residuals
            self._blocks.load_counters(self._meta, self._unsaved, residuals=residuals)


# -- undo ------------------------------------------------------------------------------------------
# torch's own optimizers do not fail once their tensors are filled. For any other, everything that
# is about to be filled is copied first.


def has_foreign_loading(optimizer: Optimizer) -> bool:
    """Return whether code that is neither torch's nor ours runs when its state is loaded."""
    for each in (optimizer, plain_optimizer(optimizer)):  # both of them load
        if each._optimizer_load_state_dict_pre_hooks or each._optimizer_load_state_dict_post_hooks:
            return True
        for name in ("load_state_dict", "__setstate__"):
            # The instance first: a method may have been patched.
            owners = [each, *type(each).__mro__]
            owner: object = next(owner for owner in owners if name in vars(owner))
            module = getattr(vars(owner)[name], "__module__", None) or ""
            if not module.startswith(("torch.optim.", "manyhands.")):
                return True
    return False


class OptimizerSnapshot:
    """A copy of optimizers, and of the tensors that are about to be filled."""

    def __init__(self, optimizers: Iterable[Optimizer], targets: Iterable[Parts]) -> None:
        self._tensors = [(t, t.clone()) for target in targets for t in _tensors_of(target)]
        self._optimizers = []
        for optimizer in optimizers:
            # By id, so that an optimizer that is not sharded comes once.
            for each in {id(o): o for o in (optimizer, plain_optimizer(optimizer))}.values():
                groups = [(group, dict(group)) for group in each.param_groups]
                state = {param: dict(entries) for param, entries in each.state.items()}
                self._optimizers.append((each, dict(vars(each)), groups, state))

    @torch.no_grad()
    def restore(self) -> None:
        """Put the optimizers back as they were, after a load that failed halfway."""
        for tensor, before in self._tensors:
            tensor.copy_(before)
        for optimizer, attributes, groups, state in self._optimizers:
            # The same dicts are refilled: schedulers and wrappers hold references to them.
            vars(optimizer).clear()
            vars(optimizer).update(attributes)
            for group, options in groups:
                group.clear()
                group.update(options)
            optimizer.state.clear()
            optimizer.state.update(state)


def _tensors_of(target: Parts) -> list[Tensor]:
    """Return the memory on this rank that the planner would fill."""
    if isinstance(target, TensorParts):
        return [elements for _, elements in target.slices]
    return [local_shard(target).detach()]

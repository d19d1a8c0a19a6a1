"""An optimizer's state under its parameters' names: saved from any of ours, loaded into any other.

The commit describes an optimizer as `_format.OptimizerMeta` says, without its state: which entries
a parameter has, the names of the stored tensors say. An entry of the parameter's shape may lie in
slices on several ranks. Any other entry is whole on each rank that has it, and the rank that has
the parameter's first element writes it. What is no tensor is stored as JSON, in a tensor of bytes.

**Replicas.** Under data parallelism all ranks have one optimizer state, whole or in shards: they
are one replica. In blocks each replica (a rank, or the ranks of a machine) steps with its own
optimizer state and scaling rule, so a checkpoint stores one for each. If N replicas were saved,
replica r of a later run continues from the saved replica r modulo N.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from manyhands._optimizers.several import AND, SEVERAL, optimizers_in
from manyhands._optimizers.state_parts import (
    BlocksParts,
    OptimizerLayers,
    OptimizerStatePart,
    RuleParts,
    SavedState,
    ShardedOptimizer,
    StatePart,
    common_state,
    options_of,
    state_parts,
)
from manyhands._optimizers.wrappers import unwrap
from manyhands._tensors.flat import is_dtensor
from manyhands.checkpoint import _tensor_parts as tensor_parts
from manyhands.checkpoint._commit import check_form
from manyhands.checkpoint._format import (
    Contents,
    GroupMeta,
    OptimizerMeta,
    ReplicaMeta,
    StateMeta,
)
from manyhands.checkpoint._handover import check_continues, explain_refusal, restore_types
from manyhands.checkpoint._json import parse_json
from manyhands.checkpoint._model import ModelNames, list_names
from manyhands.checkpoint._reader import Reader
from manyhands.checkpoint._tensor_parts import ALONE, EXACT_ENTRY, Holders, Savers, TensorParts
from manyhands.checkpoint._values import (
    GetTensor,
    Json,
    PutTensor,
    decode,
    encode,
    escape,
    state_key,
    tensor_key,
    tensor_keys,
    unescape,
)

#: Options that say how a step is computed, not what it computes. They keep the value that the
#: optimizer was made with: a run saved on a GPU may continue on a CPU, without fused kernels.
KEPT_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
OWN = "residual"  # the entry of blocks that each replica has of its own


@dataclass(frozen=True)
class Replica:
    """The replica that this rank belongs to, among the ranks that save or load together."""

    number: int = 0
    count: int = 1
    leads: bool = True  # whether this rank describes what all ranks of the replica have alike
    layout: tuple[object, ...] = ()  # how this rank's outer state is laid out

    @classmethod
    def of(cls, optimizer: Optimizer, savers: Savers) -> Replica:
        """Find out which replica this rank is in, and how many there are."""
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}. Give "
                "other objects a name of yours: mh.save(path, scaler=scaler)."
            )
        blocks = OptimizerLayers.of(optimizer).blocks
        if blocks is None or savers.size == 1:
            layout = () if blocks is None else (1, 0, *blocks.layout)
            return cls(leads=savers.rank == 0, layout=layout)
        # The ranks with this one's place in their replicas, one for each replica.
        peers = [rank for rank in savers.ranks if rank in set(blocks.peers)]
        number = peers.index(savers.ranks[savers.rank])
        leads = savers.ranks[0] in peers
        layout = (savers.size, savers.rank, *blocks.layout)
        return cls(number, len(peers), leads, layout)

    def key_prefix(self, key: str) -> str:
        """Return the prefix of this replica's own tensors.

        The first replica's are where those of a run without blocks are, so that such a run can load
        them, and the other way round.
        """
        return key if self.number == 0 else f"{key}/replica.{self.number}"


def to_bytes(value: object) -> Tensor:
    """Return JSON as a tensor of bytes."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def from_bytes(tensor: Tensor) -> Any:
    """Return the JSON that `to_bytes` was given; ValueError if it cannot have been."""
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise ValueError(f"JSON is in a row of bytes, not in {tuple(tensor.shape)} {tensor.dtype}")
    return parse_json(bytes(tensor.tolist()))


def saved_state(
    tensors: Iterable[str], prefix: str, groups: Sequence[GroupMeta], get: GetTensor
) -> dict[str, dict[str, Json]]:
    """Return what is saved of each parameter's state: by name the entries, as JSON."""
    state: dict[str, dict[str, Json]] = {}
    inside: set[str] = set()  # keys of tensors that are in a list or dict
    for key in tensors:
        entry, slash, name = key.removeprefix(prefix + "/").partition("/")
        if not key.startswith(prefix + "/") or not slash:
            continue
        if "." not in entry:  # which an entry's name has not: `escape`
            state.setdefault(name, {})[unescape(entry)] = {"$": "tensor", "key": key}
        elif entry.startswith("json."):
            entry = unescape(entry.removeprefix("json."))
            meta = from_bytes(get(key))
            inside.update(tensor_keys(meta))
            state.setdefault(name, {})[entry] = meta
    known = {name for group in groups for name in group["names"]}
    for name in state.keys() - known:
        if not {tensor_key(meta) for meta in state.pop(name).values()} <= inside:
            raise ValueError(f"there is a state of {name!r}, which is no parameter's name.")
    return state


def saved_options(groups: Sequence[GroupMeta], get: GetTensor) -> list[dict[str, Any]]:
    """Return the saved options of each group."""
    result = [decode_dict("options of a group", each["options"], get) for each in groups]
    if any("params" in options or "param_names" in options for options in result):
        raise ValueError("the options of a group have its parameters among them.")
    return result


def saved_rule(meta: StateMeta, get: GetTensor) -> dict[str, Any]:
    """Return a scaling rule's state, with its gradients by name."""
    state = decode_dict("state of a rule", meta["state"], get)
    if not isinstance(state.get("previous"), dict):
        raise ValueError("the saved state of a rule has no gradients by name.")
    return state


@dataclass(frozen=True)
class SavedOptimizer:
    """The part of a checkpoint that an optimizer continues from.

    Usually this is one saved optimizer. Optimizers that were saved one by one may be continued as
    one list in blocks, `DiLoCo([a, b])`, and the other way round.
    """

    numbers: range  # of the saved optimizers
    part: int | None = None  # position in the saved list, if the checkpoint has a list


def match_saved(
    here: Sequence[Optimizer], saved: Sequence[OptimizerMeta]
) -> list[SavedOptimizer] | None:
    """Return what each optimizer continues from; None if the numbers of optimizers differ."""
    if len(here) == len(saved):
        return [SavedOptimizer(range(number, number + 1)) for number in range(len(here))]
    matches: list[SavedOptimizer] = []
    sizes = [len(optimizers_in(OptimizerLayers.of(each).plain)) for each in here]
    if sum(sizes) == len(saved):
        first = 0
        for size in sizes:
            matches.append(SavedOptimizer(range(first, first + size)))
            first += size
        return matches
    saved_sizes = [len(meta["class"].split(AND)) for meta in saved]
    if sum(saved_sizes) == len(here):
        for number, size in enumerate(saved_sizes):
            for part in range(size):
                only = part if size > 1 else None
                matches.append(SavedOptimizer(range(number, number + 1), only))
        return matches
    return None


def decode_dict(what: str, meta: Json, get: GetTensor) -> dict[str, Any]:
    """Return the dict that was encoded as this; ValueError if it is something else."""
    value = decode(meta, get)
    if not isinstance(value, dict):
        raise ValueError(f"the saved {what} must be a dict, got {value!r:.80}.")
    return value


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
                    "the model's. Make the optimizer after the model is moved and sharded. If it "
                    "is in no module, add it: model.register_parameter(name, parameter)."
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
    optimizer: Optimizer, names: ModelNames | None, number: int, contents: Contents
) -> dict[str, Any]:
    """Add this rank's tensors to the contents; return what it says of the optimizer as JSON."""
    # One rank of a replica describes what all have alike.
    savers = contents.savers
    replica = Replica.of(optimizer, savers)
    layers = OptimizerLayers.of(optimizer)
    rule = layers.rule
    inner = layers.inner
    groups = group_names(inner, names)
    root = f"optimizer.{number}"
    prefix = replica.key_prefix(root)
    parts, packed = state_parts(inner)
    flat_names = [name for group in groups for name in group]
    # Without blocks, all ranks have the state of an optimizer that is not sharded. If one is
    # sharded among a part of the ranks only, the other parts have copies of it.
    everyone = savers if replica.count == 1 else ALONE
    copies = ALONE
    if layers.sharded is not None and everyone.size > 1:
        copies = savers.copies(dist.get_process_group_ranks(layers.sharded.group))
    for part in parts:
        name = flat_names[part.index]
        sharded = layers.sharded is not None and part.number is not None
        # Of a parameter's ranges, the one with the first element has what belongs to all of them.
        writes = not part.start if sharded else replica.leads or everyone is savers
        same = copies if sharded else everyone
        exact = {} if part.exact is None else {EXACT_ENTRY: part.exact}
        for entry, value in {**part.entries, **exact}.items():
            key = state_key(prefix, entry, name)
            if not isinstance(value, Tensor):
                if writes:
                    first = copies.rank == 0 if sharded else replica.leads
                    text = to_bytes(encode(value, key, contents.put if first else no_put))
                    key = f"{prefix}/json.{escape(entry)}/{name}"
                    contents.add(key, tensor_parts.to_parts(text, same))
                continue
            own = is_dtensor(value) or (sharded and tensor_parts.is_elementwise(part, entry, value))
            if writes or own:
                # A rank may hold several ranges of one parameter, which share the key.
                before = contents.tensors.pop(key, None)
                # The mesh of a DTensor says who has the same.
                among = ALONE if sharded and is_dtensor(value) else same
                contents.add(key, tensor_parts.entry_parts(part, entry, value, among).merge(before))
    blocks: Json = None
    if layers.blocks is not None:
        # Under `root`, not `prefix`: all replicas have the same outer state.
        blocks = collect_blocks(layers.blocks, _names_by_id(inner, groups), root, replica, contents)
        contents.own[f"layout.{number}"] = to_bytes(replica.layout)
    if not replica.leads:
        return {}
    options = [options_of(group) for group in inner.param_groups]
    meta = {
        "groups": [
            {"names": members, "options": encode(each, f"{prefix}/options.{i}", contents.put)}
            for i, (members, each) in enumerate(zip(groups, options, strict=True))
        ],
        "other": encode(_other_state(packed, layers), f"{prefix}/other", contents.put),
        "rule": None if rule is None else _collect_rule(rule, flat_names, prefix, contents.put),
    }
    if replica.number:
        contents.put(f"{prefix}/meta", to_bytes(meta))
    return {**meta, "class": layers.class_name, "blocks": blocks, "replicas": replica.count}


def no_put(path: str, _: Tensor) -> str:
    """Store nothing: another rank has the same, and stores it."""
    return path


def _other_state(packed: SavedState, layers: OptimizerLayers) -> dict[str, object]:
    """Return what a user's own optimizer adds to its state dict, and to its "state"."""
    found = {k: v for k, v in packed.items() if k not in ("state", "param_groups", "manyhands")}
    if common := common_state(packed):
        found["state"] = common
    # The layers ended at a wrapper with state of its own, and ours is inside: saving that as
    # "other" would store every rank's state as if it were rank 0's.
    if "blocks" in packed or ("manyhands" in packed and layers.rule is None):
        ours = "blocks" if "blocks" in packed else "a scaling rule"
        raise TypeError(
            f"there is {ours} inside of this {type(layers.inner).__name__}, which has state of its "
            "own. Give the optimizer inside, and the wrapper's state under a name of yours."
        )
    return found


def _collect_rule(rule: RuleParts, names: Sequence[str], prefix: str, put: PutTensor) -> StateMeta:
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
        saved: SavedOptimizer,
        names: ModelNames | None,
        reader: Reader,
        replica: Replica,
        same_layout: bool,
    ) -> None:
        layers = OptimizerLayers.of(optimizer)
        self._layers = layers
        self.rule = layers.rule
        self.inner = layers.inner
        self.targets: dict[str, TensorParts] = {}
        self._reader = reader
        self._names = names
        get = reader.read_once
        self._get = get
        number = saved.numbers.start
        root = f"optimizer.{number}"
        meta = reader.commit.optimizers[number]
        saved_replica = Replica(replica.number % max(1, meta["replicas"]))  # that this continues
        prefix = saved_replica.key_prefix(root)
        if saved_replica.number:  # the first is described by `meta` itself
            own = from_bytes(reader.read_whole(f"{prefix}/meta"))
            check_form(own, ReplicaMeta, f"{prefix}/meta")
            meta = {**meta, **own}
        self._meta = meta
        self._other = decode_dict("rest of an optimizer", meta["other"], get)
        prefixes = [(prefix, meta["groups"])]
        if saved.part is not None:
            self._take_part(saved.part)
        elif len(saved.numbers) > 1:
            metas = [reader.commit.optimizers[each] for each in saved.numbers]
            self._join(metas)
            prefixes = []
            for each, own_meta in zip(saved.numbers, metas, strict=True):
                prefixes.append((f"optimizer.{each}", own_meta["groups"]))
        self._groups = group_names(self.inner, names)
        self._check_class_and_groups()
        # A tied parameter may have been saved under another of its names.
        self._aliases = {
            other: name
            for members in self._groups
            for name in members
            for other in _all_names(names, name)
        }
        self._state: dict[str, dict[str, Json]] = {}
        for root_key, groups in prefixes:
            for name, entries in saved_state(reader.tensors, root_key, groups, get).items():
                self._state[self._aliases.get(name, name)] = entries
        self._options = self._merge_options()
        self._common = self._other.pop("state", {})
        if not isinstance(self._common, dict):
            raise ValueError(f"the saved common state must be a dict, got {self._common!r:.80}.")
        self._scaling: object = None if self.rule is None else self._parse_rule(self.rule)
        self._blocks: BlocksLoader | None = None
        # A worker that has joined a crew late has the crew's anchor and counters: they are later.
        if layers.blocks is not None and layers.blocks.received_steps is None:
            counters = self._meta.get("blocks")
            names_here = self._saved_names()
            self._blocks = BlocksLoader(
                layers.blocks, counters, names_here, reader, root, saved_replica, same_layout
            )
            self.targets |= self._blocks.targets
        # Parameters that are trained again get their place in a bucket.
        if isinstance(self.inner, ShardedOptimizer):
            self.inner.prepare()
        parts, self._packed = state_parts(self.inner, include_empty=True)
        flat_names = [name for group in self._groups for name in group]
        self._to_load = [(p, self._allocate_entries(p, flat_names[p.index])) for p in parts]
        named = [(flat_names[part.index], part, entries) for part, entries in self._to_load]
        #: Whether `load` cannot fail: otherwise everything is copied before.
        self.is_sure = check_continues(self.inner, self._options, named)

    def step_of_run(self, saved: int | None) -> int | None:
        """Return the step to continue from: the saved one or, on a late worker, the crew's."""
        steps = None if self._layers.blocks is None else self._layers.blocks.received_steps
        counters: Any = self._meta.get("blocks")
        # Only if the saved step is the blocks' count, and not, say, a number of epochs.
        if steps is None or not isinstance(counters, Mapping) or counters.get("steps") != saved:
            return saved
        return steps

    def _take_part(self, part: int) -> None:
        """Describe one optimizer of a list that was saved in blocks."""
        several = self._other[SEVERAL]
        first = sum(len(each["groups"]) for each in several[:part])
        own = several[part]
        groups = self._meta["groups"][first : first + len(own["groups"])]
        self._meta = {**self._meta, "class": own["class"], "groups": groups}
        self._other = {**own["other"], "state": own["state"]}

    def _join(self, metas: Sequence[OptimizerMeta]) -> None:
        """Describe optimizers that were saved one by one as the list that they are here."""
        in_blocks = [meta["class"] for meta in metas if meta["blocks"] is not None]
        if in_blocks:
            raise ValueError(
                f"in the checkpoint {AND.join(in_blocks)} had separate blocks, and the optimizers "
                "here are one list. Wrap each optimizer by itself, as it was saved."
            )
        groups: list[Any] = []
        several: list[dict[str, Any]] = []
        for meta in metas:
            groups += meta["groups"]
            other = decode(meta["other"], self._get)
            state = other.pop("state", {})
            sizes = [len(group["names"]) for group in meta["groups"]]
            own = {"class": meta["class"], "groups": sizes, "state": state, "other": other}
            several.append(own)
        classes = AND.join(meta["class"] for meta in metas)
        self._meta = {**self._meta, "class": classes, "groups": groups, "rule": None}
        self._other = {SEVERAL: several}

    def _check_class_and_groups(self) -> None:
        """Raise unless the optimizer here has the saved one's class and parameter groups."""
        here = self._layers.class_name
        saved_class = self._meta["class"]
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
        loaded = saved_options(self._meta["groups"], self._get)
        for group, saved in zip(self.inner.param_groups, loaded, strict=True):
            here = options_of(group)
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
        state = saved_rule(meta, self._get)
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
            stored = self._reader.tensors[key]
            if stored.shape != tuple(part.param.shape):
                self._reader.check_claim(key)
            if entry == EXACT_ENTRY:
                # An optimizer without rounded parameters has no use for the exact ones.
                if part.exact is None:
                    continue
                target = tensor_parts.entry_parts(part, EXACT_ENTRY, part.exact)
            else:
                # The parameter itself, if the model was saved, too.
                own = self._reader.tensors.get("model/" + key.partition(f"/{escape(entry)}/")[2])
                result[entry], target = tensor_parts.allocate_target(part, entry, stored, own)
            self.targets[key] = target.merge(self.targets.get(key))
        return result

    def load(self) -> None:
        """Hand the filled targets to the optimizer. Its `load_state_dict` may be the user's."""
        state = {}
        for_later = {}
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
        all_state = {**self._common, **state}
        packed = {**self._packed, **self._other, "state": all_state, "param_groups": groups}
        holder = self.inner
        sharded = self._layers.sharded
        with explain_refusal(self._layers.class_name):
            if sharded is None:
                holder.load_state_dict(packed)
            else:
                # Not `load_state_dict`, which expects the state of all ranks.
                sharded.load_parts(packed, for_later, options)
                holder = sharded.optim
        params = [param for group in holder.param_groups for param in group["params"]]
        for number, entries in state.items():
            restore_types(holder.state[params[number]], entries)

    def finish(self) -> None:
        """Hand their states to the rule and the blocks around the optimizer."""
        if self.rule is not None:
            self.rule.take_scaling_state(self._scaling)
        if self._blocks is not None:
            self._blocks.finish()


def _all_names(names: ModelNames | None, name: str) -> set[str]:
    """Return all names of a parameter; without a model, tied names are unknown."""
    return {name} if names is None else set(names.all_of(name))


# -- blocks ----------------------------------------------------------------------------------------
# The outer state, which all replicas have alike: the anchor and the memories. They are saved as
# slices of whole tensors, each slice once, so that any number of replicas, under any sharding, can
# load its own slices. A codec's residual belongs to ranks that round and average together. It is
# loaded if a rank has the slices that it had; otherwise it begins at zero.


def _tensors_by_key(part: StatePart, name: str, key: str, replica: Replica) -> dict[str, Tensor]:
    """Return the outer state of one parameter by key; `key` is the optimizer's prefix."""
    return {
        f"{replica.key_prefix(key) if entry == OWN else key}/blocks.{entry}/{name}": values
        for entry, values in part.entries.items()
    }


def collect_blocks(
    blocks: BlocksParts, names: Mapping[int, str], key: str, replica: Replica, contents: Contents
) -> Json:
    """Add this rank's slices of the outer state; return what all replicas have alike, as JSON."""
    replicas = Holders(replica.count, replica.number, "replicas")
    meta = {**blocks.save_counters(), "memories": blocks.memories}
    for part in blocks.outer_parts():
        name = names[id(part.param)]
        residual = part.entries.get(OWN)
        for path, values in _tensors_by_key(part, name, key, replica).items():
            holders = Holders() if values is residual else replicas
            start = part.start or 0
            contents.add(path, TensorParts.from_flat(values, part.param, start, holders))
    return encode(meta, f"{key}/blocks", no_put)  # which contains no tensors


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
        reader: Reader,
        key: str,
        saved_replica: Replica,
        same_layout: bool,
    ) -> None:
        self.targets: dict[str, TensorParts] = {}
        self._blocks = blocks
        # Without a saved anchor: frozen in the saved run, or all of them if one worker saved it.
        self._unsaved: list[Tensor] = []
        self._meta = blocks.check_counters(decode(meta, reader.read_once))
        if self._meta is None:  # saved without blocks
            return
        memories = self._meta["memories"]
        if memories != blocks.memories:
            raise ValueError(
                f"the checkpoint's outer step has {memories} memories, and the one here "
                f"{blocks.memories}. Continue with an outer step of the same kind."
            )
        self._load_residuals = same_layout
        for part in blocks.outer_parts():
            name = saved_names[id(part.param)]
            if f"{key}/blocks.anchor/{name}" not in reader.tensors:
                self._unsaved.append(part.param)
                continue
            residual = part.entries.get(OWN)
            for path, values in _tensors_by_key(part, name, key, saved_replica).items():
                if values is residual and not self._load_residuals:
                    continue
                parts = TensorParts.from_flat(values, part.param, part.start or 0)
                stored = reader.tensors.get(path)
                if stored is None or stored.shape != parts.shape:
                    found = "missing" if stored is None else f"of the shape {stored.shape}"
                    raise ValueError(
                        f"{path!r} is {found} in the checkpoint, and {parts.shape} here."
                    )
                self.targets[path] = parts

    def finish(self) -> None:
        """Continue from the filled targets. The parameters must be filled as well by now."""
        if self._meta is None:
            # The anchor begins at the parameters, without outer momentum.
            self._blocks.begin()
        else:
            residuals = self._load_residuals
            self._blocks.load_counters(self._meta, self._unsaved, residuals=residuals)

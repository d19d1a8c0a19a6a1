"""Save an optimizer's state by parameter name, and load it under any sharding.

`_format.OptimizerMeta` describes an optimizer in the commit. The names of stored tensors show the
entries of each parameter. An entry of the parameter's shape may be split into slices. Other entries
are written by the rank with the parameter's first element. Entries other than tensors are stored as
JSON in a tensor of bytes.

**Replicas.** Under data parallelism all ranks form a single replica with a complete or sharded
optimizer state. In blocks each replica (a rank, or the ranks of a machine) has a separate optimizer
state and scaling rule. With N saved replicas, replica r of a later run loads saved replica r modulo
N.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

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
from manyhands.checkpoint._commit import check_form, parse_json
from manyhands.checkpoint._format import (
    OWN,
    Contents,
    GroupMeta,
    ReplicaMeta,
    StateMeta,
    memory_of,
)
from manyhands.checkpoint._handover import (
    KEPT_OPTIONS,
    check_continues,
    explain_refusal,
    restore_types,
)
from manyhands.checkpoint._model import ModelNames, list_names
from manyhands.checkpoint._reader import Reader
from manyhands.checkpoint._tensor_parts import (
    ALONE,
    EXACT_ENTRY,
    Holders,
    Savers,
    TensorParts,
    allocate_target,
    entry_parts,
    is_elementwise,
    to_parts,
)
from manyhands.checkpoint._values import (
    GetTensor,
    Json,
    decode,
    encode,
    escape,
    tensor_key,
    unescape,
)

RESIDUAL = "residual"  # the only entry of blocks that differs between replicas


@dataclass(frozen=True)
class Replica:
    """The replica of this rank among the ranks that save or load together."""

    number: int = 0
    count: int = 1
    leads: bool = True  # whether this rank describes the replica's common state
    layout: tuple[object, ...] = ()  # of this rank's outer state

    @classmethod
    def of(cls, optimizer: Optimizer, savers: Savers) -> Replica:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}. Pass "
                "other objects under a different name: mh.save(path, scaler=scaler)."
            )
        blocks = OptimizerLayers.of(optimizer).blocks
        if blocks is None:
            return cls(leads=savers.rank == 0)
        own = savers.ranks[savers.rank]
        # One rank per replica: the ranks at this rank's place in their replicas.
        peers = [own]
        if savers.size > 1:
            averaging = set(blocks.peers)
            peers = [rank for rank in savers.ranks if rank in averaging]
        layout = (savers.size, savers.rank, *blocks.layout)
        return cls(peers.index(own), len(peers), savers.ranks[0] in peers, layout)

    def key_prefix(self, key: str) -> str:
        """Return the key prefix of tensors that differ between replicas."""
        # The first replica uses the prefix of a run without blocks, which can load it.
        return key if self.number == 0 else f"{key}/replica.{self.number}"


def to_bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def from_bytes(tensor: Tensor) -> Any:
    return parse_json(memory_of(tensor))


def saved_state(
    tensors: Iterable[str], prefix: str, groups: Sequence[GroupMeta], get: GetTensor
) -> dict[str, dict[str, Json]]:
    state: dict[str, dict[str, Json]] = {}
    for group in groups:
        state |= {name: {} for name in group["names"]}
    for key in tensors:
        entry, _, name = key.removeprefix(f"{prefix}/").partition("/")
        if name not in state or not key.startswith(f"{prefix}/"):
            continue
        if entry.startswith("json."):
            state[name][unescape(entry.removeprefix("json."))] = from_bytes(get(key))
        elif "." not in entry:  # names of entries have no dots: `escape`
            state[name][unescape(entry)] = {"$": "tensor", "key": key}
    return state


def saved_options(groups: Sequence[GroupMeta], get: GetTensor) -> list[dict[str, Any]]:
    return [options_of(decode_dict("options of a group", each["options"], get)) for each in groups]


def saved_rule(meta: StateMeta, get: GetTensor) -> dict[str, Any]:
    state = decode_dict("state of a rule", meta["state"], get)
    if not isinstance(state.get("previous"), dict):
        raise ValueError("the saved state of a rule must have gradients by name.")
    return state


def decode_dict(what: str, meta: Json, get: GetTensor) -> dict[str, Any]:
    value = decode(meta, get)
    if not isinstance(value, dict):
        raise ValueError(f"the saved {what} must be a dict, got {value!r:.80}.")
    return value


def prepare_to_load(optimizers: Iterable[object]) -> None:
    """Let sharded optimizers place newly trained parameters. Call it on every rank."""
    for each in optimizers:
        if isinstance(each, Optimizer):
            each = unwrap(each)[-1]
        if isinstance(each, ShardedOptimizer):
            each.prepare()


def group_names(optimizer: Optimizer, names: ModelNames | None) -> list[list[str]]:
    """Return the names of parameters by group, from the model or from the groups."""
    result = []
    for number, group in enumerate(optimizer.param_groups):
        # torch stores names if the optimizer was created from `named_parameters()`.
        members: Any = group.get("param_names")
        if names is not None:
            members = [names.by_id.get(id(param)) for param in group["params"]]
        elif members is None:
            raise ValueError("an optimizer's state needs the model's names. Also pass model=model.")
        if None in members:
            place = members.index(None)
            raise ValueError(
                f"parameter {place} of group {number}, of shape "
                f"{tuple(group['params'][place].shape)}, is not in the model. Create the optimizer "
                "after moving and sharding the model. If no module has the parameter, add it: "
                "model.register_parameter(name, parameter)."
            )
        result.append(members)
    return result


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


# -- save ------------------------------------------------------------------------------------------


def collect_optimizer(
    optimizer: Optimizer, names: ModelNames | None, number: int, contents: Contents
) -> dict[str, Any]:
    """Add this rank's tensors to the contents. Return the description of the optimizer."""
    savers = contents.savers
    replica = Replica.of(optimizer, savers)
    layers = OptimizerLayers.of(optimizer)
    inner = layers.inner
    groups = group_names(inner, names)
    flat_names = list(chain.from_iterable(groups))
    root = f"optimizer.{number}"
    prefix = replica.key_prefix(root)
    parts, packed = state_parts(inner)
    # Without blocks, all ranks have the state of an unsharded optimizer. If a subset of ranks
    # shards an optimizer, the other subsets have copies.
    everyone = savers if replica.count == 1 else ALONE
    copies = ALONE
    if layers.sharded is not None and everyone.size > 1:
        copies = savers.copies(dist.get_process_group_ranks(layers.sharded.group))
    for part in parts:
        name = flat_names[part.index]
        if layers.sharded is not None and part.number is not None:
            # The range with the first element writes entries that belong to all ranges.
            _collect_part(part, name, prefix, contents, copies, not part.start, sharded=True)
        else:
            writes = replica.leads or everyone is savers
            _collect_part(part, name, prefix, contents, everyone, writes)
    blocks: Json = None
    if layers.blocks is not None:
        # Under `root`, not `prefix`: all replicas share the outer state.
        by_id = dict(zip(map(id, _params_of(inner)), flat_names, strict=True))
        blocks = collect_blocks(layers.blocks, by_id, root, replica, contents)
        contents.own[f"{OWN}layout.{number}"] = to_bytes(replica.layout)
    if not replica.leads:
        return {}
    metas = []
    for i, (members, group) in enumerate(zip(groups, inner.param_groups, strict=True)):
        options = encode(options_of(group), f"{prefix}/options.{i}", contents.put)
        metas.append({"names": members, "options": options})
    rule: Json = None
    if layers.rule is not None:
        state = layers.rule.scaling_state_dict()
        # By name, not position: groups and shardings may have different orders.
        by_name = dict(zip(flat_names, state["previous"], strict=False))
        state["previous"] = {name: grad for name, grad in by_name.items() if grad is not None}
        encoded = encode(state, f"{prefix}/rule", contents.put)
        rule = {"class": type(layers.rule).__name__, "state": encoded}
    other = encode(_other_state(packed, layers), f"{prefix}/other", contents.put)
    meta = {"groups": metas, "other": other, "rule": rule}
    if replica.number:
        contents.put(f"{prefix}/meta", to_bytes(meta))
    return {**meta, "class": layers.class_name, "blocks": blocks, "replicas": replica.count}


def _collect_part(
    part: OptimizerStatePart,
    name: str,
    prefix: str,
    contents: Contents,
    savers: Savers,
    writes: bool,
    sharded: bool = False,
) -> None:
    """Add the state of a parameter, or of a range. `writes`: also entries that are not split."""
    entries = dict(part.entries)
    if part.exact is not None:
        entries[EXACT_ENTRY] = part.exact
    for entry, value in entries.items():
        key = f"{prefix}/{escape(entry)}/{name}"
        if not isinstance(value, Tensor):
            if writes:
                put = contents.put if savers.rank == 0 else no_put
                text = to_bytes(encode(value, key, put))
                contents.add(f"{prefix}/json.{escape(entry)}/{name}", to_parts(text, savers))
            continue
        own = is_dtensor(value) or (sharded and is_elementwise(part, entry, value))
        if writes or own:
            # A rank may have several ranges of a parameter, which share the key.
            before = contents.tensors.pop(key, None)
            # For a DTensor, the mesh determines the holders of each shard.
            among = ALONE if sharded and is_dtensor(value) else savers
            contents.add(key, entry_parts(part, entry, value, among).merge(before))


def no_put(path: str, _: Tensor) -> str:
    """Do not store the tensor: a different rank does."""
    return path


def _other_state(packed: SavedState, layers: OptimizerLayers) -> dict[str, object]:
    found = dict(packed)
    for ours in ("state", "param_groups", "manyhands"):
        found.pop(ours, None)
    common = common_state(packed)
    if common:
        found["state"] = common
    # The search for layers stops at a foreign wrapper with state. "other" would store the state of
    # layers inside from rank 0 only.
    inside = ""
    if "manyhands" in packed and layers.rule is None:
        inside = "a scaling rule"
    if "blocks" in packed:
        inside = "blocks"
    if inside:
        raise TypeError(
            f"this {type(layers.inner).__name__} contains {inside} and has additional state. Pass "
            "the inner optimizer as optimizer=, and the wrapper's state under a different name."
        )
    return found


# -- load ------------------------------------------------------------------------------------------


class OptimizerLoader:
    """Loads a saved state into an optimizer.

    The constructor checks that the state fits and allocates memory. Then fill `targets`, call
    `load` to pass the state to the optimizer, and `finish` for the rule and blocks around it.
    """

    def __init__(
        self,
        number: int,
        optimizer: Optimizer,
        own_replica: Replica,
        names: ModelNames | None,
        reader: Reader,
        own: Mapping[str, Tensor],
    ) -> None:
        layers = OptimizerLayers.of(optimizer)
        self._inner = layers.inner
        self.targets: dict[str, TensorParts] = {}
        self._layers = layers
        self._reader = reader
        self._get = reader.read_once
        root = f"optimizer.{number}"
        self._meta = reader.commit.optimizers[number]
        replica = Replica(own_replica.number % max(1, self._meta["replicas"]))
        prefix = replica.key_prefix(root)
        if replica.number:  # the commit describes the first replica
            of_replica = from_bytes(reader.read_whole(f"{prefix}/meta"))
            check_form(of_replica, ReplicaMeta)
            self._meta = {**self._meta, **of_replica}
        self._other = decode_dict("rest of an optimizer", self._meta["other"], self._get)
        state = saved_state(reader.tensors, prefix, self._meta["groups"], self._get)
        groups = group_names(self._inner, names)
        self._flat_names = list(chain.from_iterable(groups))
        # A tied parameter may be saved under a different name.
        self._aliases: dict[str, str] = {}
        if names is not None:
            for name in self._flat_names:
                self._aliases |= dict.fromkeys(names.all_of(name), name)
        self._saved_names: dict[str, str] = {}  # by the name in this run
        self._check_class_and_groups(groups)
        self._state = {self._aliases.get(name, name): state[name] for name in state}
        self._options = self._merge_options()
        self._common = self._other.pop("state", {})
        if not isinstance(self._common, dict):
            raise ValueError(f"the saved common state must be a dict, got {self._common!r:.80}.")
        self._scaling: object = None
        if layers.rule is not None:
            self._scaling = self._parse_rule(layers.rule)
        self._counters: dict[str, Any] | None = None  # counters of blocks, if saved
        self._unsaved: list[Tensor] = []  # parameters without a saved anchor
        layout = own.get(f"{OWN}layout.{number}")
        here = to_bytes(own_replica.layout)
        self._same_layout = layout is not None and layout.tolist() == here.tolist()
        # A worker that joined a running crew has the crew's anchor and counters, which are newer.
        self._loads_blocks = layers.blocks is not None and layers.blocks.received_steps is None
        if layers.blocks is not None and self._loads_blocks:
            self._prepare_blocks(layers.blocks, root, replica)
        parts, self._packed = state_parts(self._inner, include_empty=True)
        self._to_load = [(part, self._allocate_entries(part)) for part in parts]
        named = [(self._flat_names[part.index], part, state) for part, state in self._to_load]
        check_continues(self._inner, self._options, named)

    def step_of_run(self, saved: int) -> int:
        blocks = self._layers.blocks
        counters = self._meta["blocks"]
        if blocks is None or blocks.received_steps is None or not isinstance(counters, Mapping):
            return saved
        # Only if the saved step is the count of the blocks, not for example a number of epochs.
        return blocks.received_steps if counters.get("steps") == saved else saved

    def _check_class_and_groups(self, groups: Sequence[Sequence[str]]) -> None:
        here = self._layers.class_name
        saved = self._meta["groups"]
        if here != self._meta["class"]:
            raise ValueError(
                f"the checkpoint has the state of {self._meta['class']}, but the optimizer here is "
                f"{here}. Create the optimizer that was saved."
            )
        if len(saved) != len(groups):
            raise ValueError(
                f"the checkpoint has {len(saved)} parameter groups, but the optimizer here has "
                f"{len(groups)}. Create the same groups."
            )
        for number, (members, group) in enumerate(zip(groups, saved, strict=True)):
            own = {self._aliases.get(name, name): name for name in group["names"]}
            self._saved_names |= own
            # Compared as sets: the order within a group may differ.
            if own.keys() != set(members):
                only_here = sorted(set(members) - own.keys())
                only_saved = sorted(own.keys() - set(members))
                raise ValueError(
                    f"the parameters of group {number} differ from the checkpoint: only here "
                    f"{list_names(only_here)}; only in the checkpoint {list_names(only_saved)}."
                )

    def _merge_options(self) -> list[dict[str, object]]:
        result = []
        loaded = saved_options(self._meta["groups"], self._get)
        for group, saved in zip(self._inner.param_groups, loaded, strict=True):
            here = options_of(group)
            kept = {name: here[name] for name in KEPT_OPTIONS if name in here}
            # Options that the saved run's torch did not have stay unchanged.
            result.append({**here, **saved, **kept})
        return result

    def _parse_rule(self, rule: RuleParts) -> object:
        """Return the saved rule's state, checked, with gradients in this optimizer's order."""
        meta = self._meta["rule"]
        if meta is None:
            name = type(rule).__name__
            raise ValueError(
                f"the checkpoint was saved without a scaling rule, but {name} wraps the optimizer "
                f"here. To add a rule, load the checkpoint before wrapping in {name}."
            )
        state = saved_rule(meta, self._get)
        by_name = {self._aliases.get(name, name): grad for name, grad in state["previous"].items()}
        state["previous"] = []
        if by_name:
            state["previous"] = [by_name.get(name) for name in self._flat_names]
        return rule.check_scaling_state(state)

    def _allocate_entries(self, part: OptimizerStatePart) -> dict[str, object]:
        result: dict[str, object] = {}
        name = self._flat_names[part.index]
        for entry, meta in self._state.get(name, {}).items():
            key = tensor_key(meta)
            if key is None:
                result[entry] = decode(meta, self._get)
                continue
            stored = self._reader.tensors[key]
            if stored.shape != tuple(part.param.shape):
                self._reader.check_claim(key)
            if entry != EXACT_ENTRY:
                # The parameter in the checkpoint, if the model was saved.
                own = self._reader.tensors.get(f"model/{self._saved_names[name]}")
                result[entry], target = allocate_target(part, entry, stored, own)
            elif part.exact is not None:
                target = entry_parts(part, entry, part.exact)
            else:  # without rounded parameters, exact parameters are not used
                continue
            self.targets[key] = target.merge(self.targets.get(key))
        return result

    def load(self) -> None:
        """Pass the filled targets to the optimizer's `load_state_dict`, which may be user code."""
        state = dict(self._common)
        for_later = {}
        for part, entries in self._to_load:
            if not entries:
                continue
            if part.number is None:  # frozen, so not in the sharded optimizer
                for_later[part.index] = entries
            else:
                state[part.number] = entries
        groups = []
        for group, loaded in zip(self._packed["param_groups"], self._options, strict=True):
            groups.append({**group, **loaded})
        packed = {**self._packed, **self._other, "state": state, "param_groups": groups}
        holder = self._inner
        sharded = self._layers.sharded
        with explain_refusal(self._layers.class_name):
            if sharded is None:
                holder.load_state_dict(packed)
            else:
                # Not `load_state_dict`, which expects the state of all ranks.
                sharded.load_parts(packed, for_later, self._options)
                holder = sharded.optim
        params = _params_of(holder)
        for part, entries in self._to_load:
            if entries and part.number is not None:
                restore_types(holder.state[params[part.number]], entries)

    def _prepare_blocks(self, blocks: BlocksParts, root: str, replica: Replica) -> None:
        """Check that a saved outer state fits. The anchor and memories are the targets."""
        # Filled in place: no other code writes to these tensors between two steps.
        self._counters = blocks.check_counters(decode(self._meta["blocks"], self._get))
        if self._counters is None:
            return
        memories = self._counters["memories"]
        if memories != blocks.memories:
            raise ValueError(
                f"the checkpoint's outer step has {memories} memories, but the outer step here has "
                f"{blocks.memories}. Use the outer step that was saved."
            )
        names = dict(zip(map(id, _params_of(self._inner)), self._flat_names, strict=True))
        for part in blocks.outer_parts():
            name = self._saved_names[names[id(part.param)]]
            # Frozen in the saved run, or saved by a single worker.
            if f"{root}/blocks.anchor/{name}" not in self._reader.tensors:
                self._unsaved.append(part.param)
                continue
            for entry, key, slices in _outer_slices(part, name, root, replica):
                if entry != RESIDUAL or self._same_layout:
                    self.targets[key] = slices

    def finish(self) -> None:
        """Load rules and blocks around the optimizer. Parameters must be filled."""
        layers = self._layers
        if layers.rule is not None:
            layers.rule.take_scaling_state(self._scaling)
        if layers.blocks is None or not self._loads_blocks:
            return
        if self._counters is None:
            layers.blocks.begin()  # the anchor becomes the parameters, without outer momentum
        else:
            layers.blocks.load_counters(self._counters, self._unsaved, residuals=self._same_layout)


# -- blocks ----------------------------------------------------------------------------------------
# All replicas share the outer state: anchor and memories. Each slice is saved once. A codec's
# residual belongs to ranks that round and average together. It loads if the rank's slices have not
# changed; otherwise it starts at zero.


def _outer_slices(
    part: StatePart, name: str, root: str, replica: Replica
) -> Iterator[tuple[str, str, TensorParts]]:
    for entry, values in part.entries.items():
        prefix = replica.key_prefix(root) if entry == RESIDUAL else root
        slices = TensorParts.from_flat(values, part.param, part.start or 0)
        yield entry, f"{prefix}/blocks.{entry}/{name}", slices


def collect_blocks(
    blocks: BlocksParts, names: Mapping[int, str], root: str, replica: Replica, contents: Contents
) -> Json:
    """Add this rank's slices of the outer state. Return the common counters as JSON."""
    for part in blocks.outer_parts():
        for entry, key, slices in _outer_slices(part, names[id(part.param)], root, replica):
            if entry != RESIDUAL:
                slices.holders = Holders(replica.count, replica.number, "replicas")
            contents.add(key, slices)
    meta = {**blocks.save_counters(), "memories": blocks.memories}
    return encode(meta, f"{root}/blocks", no_put)  # there are no tensors

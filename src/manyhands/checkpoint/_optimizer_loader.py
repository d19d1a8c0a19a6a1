"""Load an optimizer's saved state under any sharding: see `_optimizer.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._optimizers.state_parts import (
    IMPLEMENTATION,
    BlocksParts,
    OptimizerLayers,
    OptimizerStatePart,
    RuleParts,
    options_of,
    state_parts,
)
from manyhands._optimizers.wrappers import params_of
from manyhands._tensors.flat import is_dtensor, order_of_dims
from manyhands.checkpoint._commit import check_form
from manyhands.checkpoint._format import OWN, ReplicaMeta
from manyhands.checkpoint._handover import (
    check_continues,
    explain_refusal,
    restore_types,
)
from manyhands.checkpoint._model import ModelNames, list_names
from manyhands.checkpoint._optimizer import (
    RESIDUAL,
    Replica,
    decode_dict,
    from_bytes,
    group_names,
    outer_slices,
    saved_options,
    saved_rule,
    saved_state,
    to_bytes,
)
from manyhands.checkpoint._reader import Reader
from manyhands.checkpoint._tensor_parts import (
    StoredTensor,
    TensorParts,
    to_parts,
)
from manyhands.checkpoint._values import decode, tensor_key


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
            # A run saved on a GPU may continue on a CPU without fused kernels.
            kept = {name: here[name] for name in IMPLEMENTATION if name in here}
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
            # The parameter in the checkpoint, if the model was saved.
            own = self._reader.tensors.get(f"model/{self._saved_names[name]}")
            result[entry], target = _allocate_target(part, entry, stored, own)
            self.targets[key] = target.merge(self.targets.get(key))
        return result

    def load(self) -> None:
        """Pass the filled targets to the optimizer's `load_state_dict`, which may be user code."""
        state = dict(self._common)
        for part, entries in self._to_load:
            if entries:
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
                sharded.load_parts(packed)
                holder = sharded.optim
        params = params_of(holder.param_groups)
        for part, entries in self._to_load:
            if entries:
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
        names = dict(
            zip(map(id, params_of(self._inner.param_groups)), self._flat_names, strict=True)
        )
        for part in blocks.outer_parts():
            name = self._saved_names[names[id(part.param)]]
            # Frozen in the saved run, or saved by a single worker.
            if f"{root}/blocks.anchor/{name}" not in self._reader.tensors:
                self._unsaved.append(part.param)
                continue
            for entry, key, slices in outer_slices(part, name, root, replica):
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


def _allocate_target(
    part: OptimizerStatePart, entry: str, stored: StoredTensor, own: StoredTensor | None
) -> tuple[Tensor, TensorParts]:
    """Return a tensor to fill with a saved entry, and its slices. `own`: the saved parameter."""
    param = part.param
    like = part.like
    shape = torch.Size(stored.shape)
    dtype = stored.torch_dtype
    now = part.entries.get(entry)
    if shape != param.shape or (shape == () and entry == "step"):
        if not (isinstance(now, Tensor) and (now.shape, now.dtype) == (shape, dtype)):
            # As in torch's optimizers, `step` is on the CPU: reading it must not wait for the GPU.
            device = "cpu" if entry == "step" else param.device
            now = torch.empty(shape, dtype=dtype, device=device)
        return now, to_parts(now)
    # State in the parameter's type is converted with the parameter, as in torch's loading.
    if own is not None and dtype == own.torch_dtype:
        dtype = like.dtype
    if not (isinstance(now, Tensor) and now.dtype == dtype and _has_same_layout(now, like)):
        now = torch.empty_like(like.detach(), dtype=dtype)
    if part.start is not None:
        return now, TensorParts.from_flat(now, param, part.start)
    return now, to_parts(now)


def _has_same_layout(now: Tensor, like: Tensor) -> bool:
    if now.shape != like.shape or is_dtensor(now) != is_dtensor(like):
        return False
    if is_dtensor(now):
        return now.placements == like.placements  # type: ignore[attr-defined]
    return now.device == like.device and order_of_dims(now) == order_of_dims(like)

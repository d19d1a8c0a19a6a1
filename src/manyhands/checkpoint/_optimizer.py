"""An optimizer's state under its parameters' names: out of any of ours, and into any other.

    class       of the optimizer that the user asked for
    groups      for each parameter group the names, and the options (learning rate and so on)
    state       for each name the entries: a tensor of the checkpoint, or a value
    rule        of a scaling rule around it: its averages, progress, scale
    blocks      of blocks around it: the counters of all workers
    replicas    in blocks, what the others have of their own: groups, state, other, rule

An entry of the parameter's shape may lie in parts on several workers (`_shares.py` knows where);
any other is whole, with whoever has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from manyhands.checkpoint import _index, _values
from manyhands.checkpoint._blocks_state import BlocksLoading, saved_blocks
from manyhands.checkpoint._names import Names, listed, put_new, state_key
from manyhands.checkpoint._replicas import Replica
from manyhands.checkpoint._shares import (
    EXACT,
    Share,
    is_cut,
    part_to_save,
    sharded,
    shares_of,
    target_for,
)
from manyhands.checkpoint._unwrap import Parts
from manyhands.checkpoint._values import decoded, encoded
from manyhands.scaling._optimizer import ScalingRuleBase
from manyhands.sharding._agreement import options_of

#: How a step is computed, not what it computes: stays what the optimizer here was made with.
OURS = ("foreach", "fused", "capturable", "differentiable")


@dataclass
class Saved:
    """What an optimizer gives to a checkpoint: JSON, and tensors by key."""

    told: dict[str, Any]
    tensors: dict[str, Any] = field(default_factory=dict)


def names_in(optimizer: Optimizer, names: Names | None) -> list[list[str]]:
    """The parameters' names, by group."""
    result = []
    for number, group in enumerate(optimizer.param_groups):
        given: Any = group.get("param_names")
        if names is None and given is None:
            raise ValueError(
                "the optimizer's state is saved under its parameters' names, which the model "
                "knows. Give it as well: model=model."
            )
        members = []
        for place, param in enumerate(group["params"]):
            name = given[place] if names is None else names.of.get(id(param))
            if name is None:
                raise ValueError(
                    f"parameter {place} of group {number}, of shape {tuple(param.shape)}, is not "
                    "the model's. Give the model that the optimizer is for, and make the optimizer "
                    "after the model is moved and sharded: fully_shard replaces parameters."
                )
            members.append(name)
        result.append(members)
    return result


# -- out -------------------------------------------------------------------------------------------


def collected(optimizer: Any, names: Names | None, number: int, replica: Replica) -> Saved:
    """What this worker has of an optimizer's state; the first of a replica says what all know."""
    parts = Parts.of(optimizer)
    rule, inner = parts.rule, parts.inner
    groups = names_in(inner, names)
    root = f"optimizer.{number}"
    prefix = replica.within(root)
    saved = Saved({"replica": replica.number, "state": {}})

    def put(path: str, tensor: Tensor) -> str:
        put_new(saved.tensors, path, part_to_save(tensor))
        return path

    shares, packed = shares_of(inner, groups)
    for share in shares:
        told = saved.told["state"].setdefault(share.name, {})
        for entry, value in share.entries.items():
            key = state_key(prefix, entry, share.name)
            if not isinstance(value, Tensor):
                told[entry] = encoded(value, key, put)
                continue
            part = share.to_save(entry, value)
            before = saved.tensors.get(key)
            saved.tensors[key] = part if before is None else before.with_parts_of(part)
            told[entry] = {"$": "tensor", "key": key}
    blocks = None
    if parts.blocks is not None:
        blocks, tensors = saved_blocks(parts.blocks, _by_id(inner, groups), root, replica)
        saved.tensors |= tensors
    if not replica.leads:
        if not sharded(inner):
            saved.told["state"] = {}  # the first one tells the same
        return saved
    options = [options_of(group) for group in inner.param_groups]
    saved.told |= {
        "class": parts.class_name,
        "groups": [
            {"names": members, "options": encoded(given, f"{prefix}/options.{i}", put)}
            for i, (members, given) in enumerate(zip(groups, options, strict=True))
        ],
        "other": encoded(_other(packed, parts), f"{prefix}/other", put),
        "rule": None if rule is None else _rule_state(rule, groups, prefix, put),
        "blocks": blocks,
    }
    return saved


def _by_id(inner: Optimizer, groups: Sequence[Sequence[str]]) -> dict[int, str]:
    """The names by parameter."""
    params = [param for group in inner.param_groups for param in group["params"]]
    members = [name for group in groups for name in group]
    return {id(param): name for param, name in zip(params, members, strict=True)}


def _other(packed: Mapping[str, Any], parts: Parts) -> dict[str, Any]:
    """What an optimizer of somebody's own adds to its state dict."""
    found = {k: v for k, v in packed.items() if k not in ("state", "param_groups", "manyhands")}
    if "blocks" in packed or ("manyhands" in packed and parts.rule is None):
        ours = "blocks" if "blocks" in packed else "a scaling rule"
        raise TypeError(
            f"there is {ours} inside of this {type(parts.inner).__name__}, which has state of its "
            "own. Give the optimizer that it is around, optimizer=..., and the state of what is "
            "around it under a name of yours."
        )
    return found


def _rule_state(
    rule: ScalingRuleBase,
    groups: Sequence[Sequence[str]],
    prefix: str,
    put: Callable[[str, Tensor], str],
) -> Any:
    state = rule.scaling_state_dict()
    members = [name for group in groups for name in group]
    state["previous"] = {
        name: grad
        for name, grad in zip(members, state["previous"], strict=False)
        if grad is not None
    }
    return {"class": type(rule).__name__, "state": encoded(state, f"{prefix}/rule", put)}


# -- in --------------------------------------------------------------------------------------------


class Loading:
    """A saved state on its way into an optimizer.

    Making one checks that it fits, and makes room; `targets` are then filled, and `finish` hands
    the state over. Until then the optimizer is as it was, but for state tensors that are filled in
    place.
    """

    def __init__(
        self,
        optimizer: Any,
        told: Mapping[str, Any],
        names: Names | None,
        tensors: Mapping[str, _index.Tensor],
        get: Callable[[str], Tensor],
        number: int,
        replica: Replica,
    ) -> None:
        parts = self._parts = Parts.of(optimizer)
        self.rule, self.inner = parts.rule, parts.inner
        self.targets: dict[str, Any] = {}
        told, from_replica = replica.part_of(told)
        self._told, self._tensors, self._get = told, tensors, get
        self._first: dict[str, Tensor] = {}
        self._alike: list[tuple[Tensor, Tensor]] = []
        self._groups = names_in(self.inner, names)
        self._check(names)
        self._aliases = {
            other: name
            for members in self._groups
            for name in members
            for other in (names.all_of(name) if names is not None else [name])
        }
        self._state = {self._aliases.get(name, name): s for name, s in told["state"].items()}
        self._check_entries()
        self._options = self._matched_options()
        self._other = decoded(told["other"], get)
        self._scaling: Any = None if self.rule is None else self._parsed_rule(self.rule)
        self._blocks = None
        if parts.blocks is not None:
            try:
                self._blocks = BlocksLoading(
                    parts.blocks,
                    told.get("blocks"),
                    self._saved_names(names),
                    tensors,
                    get,
                    f"optimizer.{number}",
                    replica,
                    from_replica,
                )
            except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
                raise ValueError(
                    f"the checkpoint's state of blocks is damaged: {error!r}. Load another one."
                ) from error
            self.targets |= self._blocks.targets
        if hasattr(self.inner, "_prepare"):  # of an OSS: what has thawed gets its place
            self.inner._prepare()
        shares, packed = shares_of(self.inner, self._groups, places_only=True)
        self._packed = packed
        self._filled: list[tuple[Share, dict[str, Any]]] = [
            (share, self._entries(share)) for share in shares
        ]

    def _check(self, names: Names | None) -> None:
        here, there = self._parts.class_name, self._told["class"]
        if here != there:
            raise ValueError(
                f"the checkpoint has the state of {there}, and the optimizer here is {here}. Build "
                "the optimizer that the run was saved with, or load the model alone."
            )
        saved = [set(group["names"]) for group in self._told["groups"]]
        if len(saved) != len(self._groups):
            raise ValueError(
                f"the checkpoint's optimizer has {len(saved)} parameter groups, and the one here "
                f"{len(self._groups)}. Build it from the same groups."
            )
        for number, (members, theirs) in enumerate(zip(self._groups, saved, strict=True)):
            others = {
                other
                for name in members
                for other in (names.all_of(name) if names is not None else [name])
            }
            lacking = sorted(name for name in members if not theirs & _all_of(names, name))
            extra = sorted(theirs - others)
            if lacking or extra:
                raise ValueError(
                    f"parameter group {number} has other parameters than the checkpoint's: "
                    + "; ".join(
                        f"only {where} {listed(found)}"
                        for where, found in (("here", lacking), ("there", extra))
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
        plain = getattr(self.inner, "optim", self.inner)
        _values.check_entries(plain, self._groups, self._state, dims.__getitem__, but=EXACT)

    def _saved_names(self, names: Names | None) -> dict[int, str]:
        """What the parameters are called in the checkpoint: a tied one has several names."""
        saved = {name for group in self._told["groups"] for name in group["names"]}
        here = _by_id(self.inner, self._groups)
        return {number: next(iter(saved & _all_of(names, name))) for number, name in here.items()}

    def _matched_options(self) -> list[dict[str, Any]]:
        result = []
        for group, told in zip(self.inner.param_groups, self._told["groups"], strict=True):
            here, saved = options_of(group), decoded(told["options"], self._get)
            _values.check_options(self.inner, here, saved)
            ours = {name: here[name] for name in OURS if name in here}
            result.append({**here, **saved, **ours})
        return result

    def _parsed_rule(self, rule: ScalingRuleBase) -> Any:
        told = self._told["rule"]
        if told is None:
            raise ValueError(
                f"the checkpoint is of a run without a scaling rule, and {type(rule).__name__} is "
                "around the optimizer here. To continue a bare run under a rule, load it before "
                f"wrapping: mh.load(...), then mh.{type(rule).__name__}(optimizer)."
            )
        state = decoded(told["state"], self._get)
        previous = state.get("previous")
        if not isinstance(previous, dict):
            raise ValueError(
                "the checkpoint's scaling rule has no previous gradients. Load another."
            )
        members = [name for group in self._groups for name in group]
        by_name = {self._aliases.get(name, name): grad for name, grad in previous.items()}
        state["previous"] = [by_name.get(name) for name in members] if previous else []
        return rule._parsed(state)

    def _entries(self, share: Share) -> dict[str, Any]:
        """Room for a share's entries; its tensors are among the targets."""
        result: dict[str, Any] = {}
        for entry, told in self._state.get(share.name, {}).items():
            if not (isinstance(told, Mapping) and told.get("$") == "tensor"):
                result[entry] = decoded(told, self._get)
                continue
            key, saved = told["key"], self._tensors[told["key"]]
            if entry == EXACT:
                if share.exact is not None:
                    self._aim(key, share.to_save(EXACT, share.exact))
                continue
            tensor, part = target_for(share, entry, saved.shape, saved.torch_dtype)
            result[entry] = tensor
            if key not in self._first or is_cut(part):
                self._first.setdefault(key, tensor)
                self._aim(key, part)
            else:  # the same for each of several runs, such as the number of steps
                self._alike.append((tensor, self._first[key]))
        return result

    def _aim(self, key: str, part: Any) -> None:
        before = self.targets.get(key)
        self.targets[key] = part if before is None else before.with_parts_of(part)

    def load(self) -> None:
        """The targets are filled: let the optimizer have them. Its class may be the user's."""
        for tensor, first in self._alike:
            tensor.copy_(first)
        state, for_later = {}, {}
        for share, entries in self._filled:
            if not entries:
                continue
            if share.number is None:
                assert share.param_number is not None
                for_later[share.param_number] = entries
            else:
                state[share.number] = entries
        options = self._options
        groups = [
            {**{k: v for k, v in group.items() if k not in given}, **given}
            for group, given in zip(self._packed["param_groups"], options, strict=True)
        ]
        packed = {**self._packed, **self._other, "state": state, "param_groups": groups}
        if sharded(self.inner):
            self.inner._continue_from(packed, for_later, options)  # type: ignore[attr-defined]
            holder = self.inner.optim  # type: ignore[attr-defined]
        else:
            self.inner.load_state_dict(packed)
            holder = self.inner
        params = [param for group in holder.param_groups for param in group["params"]]
        for number, entries in state.items():
            _restore_types(holder.state[params[number]], entries)

    def finish(self) -> None:
        """What is ours around it goes on as well."""
        if self.rule is not None:
            self.rule._continue_from(self._scaling)
        if self._blocks is not None:
            self._blocks.finish()


def _all_of(names: Names | None, name: str) -> set[str]:
    return {name} if names is None else set(names.all_of(name))


def _restore_types(held: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """torch gives state the parameter's type; what was saved in another keeps it."""
    for name, value in entries.items():
        now = held.get(name)
        if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
            held[name] = value.to(now.device)

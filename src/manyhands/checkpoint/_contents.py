"""All that goes into a checkpoint: collected on one side, and checked against on the other.

`_names.py` says what the tensors are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from manyhands._core.dtensor import is_dtensor
from manyhands.checkpoint import _index, _values
from manyhands.checkpoint._model import ModelLoading, is_module, returned, saved_model
from manyhands.checkpoint._names import Names, escaped, listed, names_of, put_new
from manyhands.checkpoint._optimizer import Loading, collected
from manyhands.checkpoint._random import random_state
from manyhands.checkpoint._replicas import Replica
from manyhands.checkpoint._shares import part_to_save
from manyhands.checkpoint._undo import Before, Other, Others, has_own_loading
from manyhands.checkpoint._unwrap import Parts
from manyhands.checkpoint._values import decoded, encoded, has_state

TAKEN = ("step",)


@dataclass
class Contents:
    """What this worker gives: tensors by key, and JSON."""

    tensors: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def add(self, tensors: Mapping[str, Any]) -> None:
        for key, tensor in tensors.items():
            put_new(self.tensors, key, tensor)


def listed_as(given: Any) -> list[Any]:
    """One, several or none, as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def collect(
    model: Any,
    optimizer: Any,
    scheduler: Any,
    values: Mapping[str, Any],
    rank: int,
    replicas: Sequence[Replica],
) -> Contents:
    """What this worker gives to a checkpoint. Tensors are not copied."""
    contents = Contents()
    names: Names | None = None
    if model is not None:
        names = names_of(model)
        contents.model, tensors = saved_model(names, "model", rank)
        contents.add(tensors)
    for number, (each, replica) in enumerate(zip(listed_as(optimizer), replicas, strict=True)):
        saved = collected(each, names, number, replica)
        contents.optimizers.append(saved.told)
        contents.add(saved.tensors)

    def put(path: str, tensor: Tensor) -> str:
        if rank == 0 or is_dtensor(tensor):
            contents.add({path: part_to_save(tensor)})
        return path

    for number, each in enumerate(listed_as(scheduler)):
        check_has_state("scheduler", each)
        state = encoded(dict(each.state_dict()), f"scheduler.{number}", put)
        contents.schedulers.append({"class": type(each).__name__, "state": state})
    for name, value in values.items():
        check_value(name, value)
        if is_module(value):
            told, tensors = saved_model(names_of(value), f"value/{escaped(name)}", rank)
            contents.values[name] = {"$": "module", "value": told}
            contents.add(tensors)
        else:
            contents.values[name] = encoded(value, f"value/{escaped(name)}", put)
    for generator, state in random_state().items():
        contents.add({f"random/{rank}/{generator}": part_to_save(state)})
    return contents


def check_has_state(what: str, value: Any) -> None:
    if not has_state(value):
        raise TypeError(
            f"{what} must have state_dict() and load_state_dict(), got {type(value).__name__}."
        )


def check_value(name: str, value: Any) -> None:
    if name in TAKEN:
        raise TypeError(f"{name}= has a meaning of its own. Give this value another name.")
    if isinstance(value, Optimizer):
        raise TypeError(
            f"{name}= is an optimizer, whose state belongs to parameters. Give all of them as "
            "optimizer=[first, second]."
        )


class Restoring:
    """A checkpoint on its way into memory.

    Making it compares everything with the index and reads small values, and changes nothing. Then
    come `ask_others`, the `targets` to be filled, and `finish`; `undo`, if one of them fails.
    """

    def __init__(
        self,
        index: _index.Index,
        get: Callable[[str], Tensor],
        model: Any,
        optimizer: Any,
        scheduler: Any,
        values: Mapping[str, Any],
        replicas: Sequence[Replica],
    ) -> None:
        self.targets: dict[str, Any] = {}
        self.result: dict[str, Any] = {} if index.step is None else {"step": index.step}
        self._others = Others()
        self._models: list[ModelLoading] = []
        self._optimizers: list[Loading] = []
        self._before: Before | None = None
        tensors, names = index.tensors, None
        if model is not None:
            names = names_of(model)
            if index.model is None:
                raise ValueError("the checkpoint has no model: it was saved without model=.")
            self._take_model(ModelLoading(names, index.model, "model", tensors, get))
        optimizers = listed_as(optimizer)
        if optimizers:
            _check_number("optimizer", len(optimizers), len(index.optimizers))
        for number, (each, replica) in enumerate(zip(optimizers, replicas, strict=True)):
            told = index.optimizers[number]
            loading = Loading(each, told, names, tensors, get, number, replica)
            self.targets |= loading.targets
            self._optimizers.append(loading)
        self._take_schedulers(listed_as(scheduler), index.schedulers, get)
        lacking = sorted(set(values) - set(index.values))
        if lacking:
            raise ValueError(
                f"the checkpoint has no {listed(lacking)}, but {listed(sorted(index.values))}. "
                "Give the names that were saved."
            )
        for name, told in index.values.items():
            self._take_value(name, told, values.get(name), tensors, get)

    def _take_model(self, loading: ModelLoading) -> None:
        self.targets |= loading.targets
        self._models.append(loading)
        self._others.add(*loading.others)

    def _take_schedulers(
        self, here: Sequence[Any], there: Sequence[Mapping[str, Any]], get: Callable[[str], Tensor]
    ) -> None:
        if here:
            _check_number("scheduler", len(here), len(there))
        for each, told in zip(here, there, strict=False):
            check_has_state("scheduler", each)
            if type(each).__name__ != told["class"]:
                raise ValueError(
                    f"the checkpoint has the state of a {told['class']}, and the scheduler here is "
                    f"a {type(each).__name__}. Build the one that was saved, or leave it out."
                )
            state = decoded(told["state"], get)
            if _values.is_torchs(each):
                _values.check_attributes(each, each.state_dict(), state)
            self._others.add(Other("the scheduler", each.state_dict, each.load_state_dict, state))

    def _take_value(
        self,
        name: str,
        told: Any,
        given: Any,
        tensors: Mapping[str, _index.Tensor],
        get: Callable[[str], Tensor],
    ) -> None:
        if given is not None:
            check_value(name, given)
            check_has_state(f"{name}=", given)
        if isinstance(told, Mapping) and told.get("$") == "module":
            if given is None:
                self.result[name] = returned(told["value"], f"value/{escaped(name)}", get)
                return
            prefix = f"value/{escaped(name)}"
            loading = ModelLoading(names_of(given), told["value"], prefix, tensors, get, what=name)
            self._take_model(loading)
            self.result[name] = given
            return
        value = decoded(told, get)
        if given is None:
            self.result[name] = value
            return
        if _values.is_torchs(given):
            _values.check_state(given, given.state_dict(), value, f"{name}=")
        self._others.add(Other(f"{name}=", given.state_dict, given.load_state_dict, value))
        self.result[name] = given

    def ask_others(self) -> None:
        """Give code that is not ours what it is to take, as long as nothing else has changed."""
        self._others.apply()
        if any(has_own_loading(each.inner) for each in self._optimizers):
            inner = [each.inner for each in self._optimizers]
            self._before = Before(inner, self.targets.values())

    def finish(self) -> None:
        """The targets are filled. First what may be the user's code, then ours alone."""
        for loading in self._optimizers:
            loading.load()
        for model in self._models:
            model.finish()
        for loading in self._optimizers:
            loading.finish()

    def undo(self) -> None:
        """Some worker could not load: be as before, as far as that is known."""
        if self._before is not None:
            self._before.restore()
        failed = self._others.undo()
        if failed:
            raise RuntimeError(
                f"the checkpoint could not be loaded, and {', '.join(failed)} did not take its own "
                "earlier state back. Make it anew."
            )


def _check_number(what: str, here: int, there: int) -> None:
    if here != there:
        raise ValueError(
            f"the checkpoint has {there} {what}(s), and {here} were given. Give as many as were "
            f"saved, in the same order: {what}=[first, second]."
        )


def at_rest(optimizer: Any, *, to_load: bool) -> None:
    """Let sharded optimizers finish what they have under way; on every worker."""
    for each in listed_as(optimizer):
        inner = Parts.of(each).inner
        settle = getattr(inner, "_prepare" if to_load else "wait", None)
        if settle is not None and hasattr(inner, "_workers"):
            settle()

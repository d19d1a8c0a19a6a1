"""All that belongs to a run: collected for a save, and checked and restored by a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._core.sharded import is_dtensor
from manyhands._core.state_parts import ShardedOptimizer
from manyhands._core.wrappers import unwrap
from manyhands.checkpoint import _foreign, _index
from manyhands.checkpoint._blocks import Replica
from manyhands.checkpoint._foreign import (
    ForeignState,
    ForeignStates,
    OptimizerSnapshot,
    has_foreign_loading,
)
from manyhands.checkpoint._model import (
    ModelLoader,
    ModelNames,
    collect_model,
    find_names,
    list_names,
    read_tensors,
)
from manyhands.checkpoint._optimizer import OptimizerLoader, collect_optimizer
from manyhands.checkpoint._parts import put_new, to_parts
from manyhands.checkpoint._random import random_state
from manyhands.checkpoint._values import GetTensor, decode, encode, escape, has_state

RESERVED = ("step",)  # names with a meaning of their own in the result of `load`


@dataclass
class Contents:
    """What this rank contributes to a checkpoint: tensors by key, and JSON."""

    tensors: dict[str, Any] = field(default_factory=dict)
    model: _index.ModelMeta | None = None
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[_index.SchedulerMeta] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def add(self, tensors: Mapping[str, Any]) -> None:
        for key, tensor in tensors.items():
            put_new(self.tensors, key, tensor)


def as_list(argument: Any) -> list[Any]:
    """Return an argument that may be one object, a list of them, or None, as a list."""
    if argument is None:
        return []
    return list(argument) if isinstance(argument, list | tuple) else [argument]


# -- save ------------------------------------------------------------------------------------------


def collect(
    model: Any,
    optimizer: Any,
    scheduler: Any,
    values: Mapping[str, Any],
    rank: int,
    replicas: Sequence[Replica],
) -> Contents:
    """Return what this rank contributes to a checkpoint. Tensors are not copied."""
    contents = Contents()
    names: ModelNames | None = None
    if model is not None:
        names = find_names(model)
        contents.model, tensors = collect_model(names, "model", rank)
        contents.add(tensors)
    for number, (each, replica) in enumerate(zip(as_list(optimizer), replicas, strict=True)):
        saved = collect_optimizer(each, names, number, replica)
        contents.optimizers.append(saved.meta)
        contents.add(saved.tensors)

    def put(path: str, tensor: Tensor) -> str:
        # Schedulers and values are rank 0's, but every rank has a shard of a DTensor.
        if rank == 0 or is_dtensor(tensor):
            contents.add({path: to_parts(tensor)})
        return path

    for number, each in enumerate(as_list(scheduler)):
        check_has_state("scheduler", each)
        state = encode(dict(each.state_dict()), f"scheduler.{number}", put)
        contents.schedulers.append({"class": type(each).__name__, "state": state})
    for name, value in values.items():
        check_value(name, value)
        if isinstance(value, nn.Module):
            meta, tensors = collect_model(find_names(value), f"value/{escape(name)}", rank)
            contents.values[name] = {"$": "module", "value": meta}
            contents.add(tensors)
        else:
            contents.values[name] = encode(value, f"value/{escape(name)}", put)
    for generator, state in random_state().items():
        contents.add({f"random/{rank}/{generator}": to_parts(state)})
    return contents


def check_has_state(what: str, value: Any) -> None:
    if not has_state(value):
        raise TypeError(
            f"{what} must have state_dict() and load_state_dict(), got {type(value).__name__}."
        )


def check_value(name: str, value: Any) -> None:
    if name in RESERVED:
        raise TypeError(f"{name}= has a meaning of its own. Give this value another name.")
    if isinstance(value, Optimizer):
        raise TypeError(
            f"{name}= is an optimizer, whose state belongs to parameters. Give all of them as "
            "optimizer=[first, second]."
        )


def prepare_optimizers(optimizer: Any, *, to_load: bool) -> None:
    """Let sharded optimizers finish what is in flight. Every rank must call this."""
    for each in as_list(optimizer):
        inner = unwrap(each)[-1] if isinstance(each, Optimizer) else each
        if isinstance(inner, ShardedOptimizer):
            # `prepare` also places parameters that are trained again, which takes collectives. A
            # save needs only to wait for parameters in flight.
            inner.prepare() if to_load else inner.wait()


# -- load ------------------------------------------------------------------------------------------


class RunLoader:
    """Loads a checkpoint into the objects of a run.

    Creating a loader compares everything with the index and reads small values, but changes
    nothing. The next steps are `load_foreign_states`, filling the `targets`, and `finish`; if any
    of them fails on any rank, `undo`.
    """

    def __init__(
        self,
        index: _index.Index,
        get: GetTensor,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        values: Mapping[str, Any],
        replicas: Sequence[Replica],
    ) -> None:
        self.targets: dict[str, Any] = {}
        self.result: dict[str, Any] = {} if index.step is None else {"step": index.step}
        self._foreign_states = ForeignStates()
        self._models: list[ModelLoader] = []
        self._optimizers: list[OptimizerLoader] = []
        self._snapshot: OptimizerSnapshot | None = None
        tensors, names = index.tensors, None
        # The model first: the optimizer's state is found by the model's names.
        if model is not None:
            names = find_names(model)
            if index.model is None:
                raise ValueError(
                    "the checkpoint has no model: it was saved without model=. Load it without "
                    "model=, or load another checkpoint."
                )
            self._add_model(ModelLoader(names, index.model, "model", tensors, get))
        optimizers = as_list(optimizer)
        if optimizers:
            _check_number("optimizer", len(optimizers), len(index.optimizers))
        for number, (each, replica) in enumerate(zip(optimizers, replicas, strict=True)):
            meta = index.optimizers[number]
            loader = OptimizerLoader(each, meta, names, tensors, get, number, replica)
            self.targets |= loader.targets
            self._optimizers.append(loader)
        self._add_schedulers(as_list(scheduler), index.schedulers, get)
        missing = sorted(set(values) - set(index.values))
        if missing:
            raise ValueError(
                f"the checkpoint has no {list_names(missing)}, but "
                f"{list_names(sorted(index.values))}. Give the names that were saved."
            )
        for name, meta in index.values.items():
            self._add_value(name, meta, values.get(name), tensors, get)

    def _add_model(self, loader: ModelLoader) -> None:
        self.targets |= loader.targets
        self._models.append(loader)
        self._foreign_states.add(*loader.foreign_states)

    def _add_schedulers(
        self, here: Sequence[Any], saved: Sequence[_index.SchedulerMeta], get: GetTensor
    ) -> None:
        if here:
            _check_number("scheduler", len(here), len(saved))
        # Not strict: with no scheduler here, the saved ones are left out.
        for each, meta in zip(here, saved, strict=False):
            check_has_state("scheduler", each)
            if type(each).__name__ != meta["class"]:
                raise ValueError(
                    f"the checkpoint has the state of a {meta['class']}, and the scheduler here is "
                    f"a {type(each).__name__}. Build the one that was saved, or leave it out."
                )
            state = decode(meta["state"], get)
            if _foreign.is_from_torch(each):
                _foreign.check_attributes(each, each.state_dict(), state)
            self._foreign_states.add(
                ForeignState("the scheduler", each.state_dict, each.load_state_dict, state)
            )

    def _add_value(
        self,
        name: str,
        meta: Any,
        target: Any,
        tensors: Mapping[str, _index.StoredTensor],
        get: GetTensor,
    ) -> None:
        """Prepare one of the user's values; `target`, if not None, is the object to load into."""
        if target is not None:
            check_value(name, target)
            check_has_state(f"{name}=", target)
        if isinstance(meta, Mapping) and meta.get("$") == "module":
            prefix = f"value/{escape(name)}"
            if target is None:
                self.result[name] = read_tensors(meta["value"], prefix, get)
                return
            names = find_names(target)
            self._add_model(ModelLoader(names, meta["value"], prefix, tensors, get, what=name))
            self.result[name] = target
            return
        value = decode(meta, get)
        if target is None:
            self.result[name] = value
            return
        if _foreign.is_from_torch(target):
            _foreign.check_state_dict(target, target.state_dict(), value, f"{name}=")
        self._foreign_states.add(
            ForeignState(f"{name}=", target.state_dict, target.load_state_dict, value)
        )
        self.result[name] = target

    def load_foreign_states(self) -> None:
        """Load what only foreign code can load, while the model and optimizer are unchanged."""
        self._foreign_states.apply()
        # The copies cost memory, so they are made only if an optimizer may refuse its state.
        if any(has_foreign_loading(each.inner) for each in self._optimizers):
            inner = [each.inner for each in self._optimizers]
            self._snapshot = OptimizerSnapshot(inner, self.targets.values())

    def finish(self) -> None:
        """Hand the filled targets over: first what may run the user's code, then ours alone."""
        for optimizer in self._optimizers:
            optimizer.load()
        for model in self._models:
            model.finish()
        # Blocks need the model complete: a new anchor begins at the parameters.
        for optimizer in self._optimizers:
            optimizer.finish()

    def undo(self) -> None:
        """Put everything back as it was, after some rank could not load."""
        if self._snapshot is not None:
            self._snapshot.restore()
        failed = self._foreign_states.undo()
        if failed:
            raise RuntimeError(
                f"the checkpoint could not be loaded, and {', '.join(failed)} did not take its own "
                "earlier state back. Create it anew."
            )


def _check_number(what: str, here: int, saved: int) -> None:
    if here != saved:
        raise ValueError(
            f"the checkpoint has {saved} {what}(s), and {here} were given. Give as many as were "
            f"saved, in the same order: {what}=[first, second]."
        )

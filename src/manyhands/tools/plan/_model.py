"""Compute the sizes of a module, its optimizers and its activations.

Activations are tensors that autograd saves. A hook measures them in a forward pass under torch's
FakeTensorMode, which has shapes only.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from manyhands._arguments import instance, one_of, shown
from manyhands._optimizers.optimizers import (
    StateSizes,
    choose_layout,
    constructor_arguments,
    traits_of,
)
from manyhands._optimizers.several import optimizers_in
from manyhands._optimizers.state_parts import ShardedOptimizer, options_of
from manyhands._optimizers.wrappers import unwrap
from manyhands._ranks.ranks import SENT_ALONE
from manyhands._tensors.trees import tree_map_tensors
from manyhands.sharding.fsdp._wrapping import Policy, default_auto_wrap_policy, pick_modules
from manyhands.tools.plan._costs import ModelSizes, OptimizerParams, ParamSize, WrapParams

OneOptimizer: TypeAlias = str | type[Optimizer] | Optimizer

LARGEST_WRAP = 10**8  # elements of an FSDP wrap; in a smaller model, 1/50 of the elements


# -- modules and optimizers ------------------------------------------------------------------------


def build_module(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return the module, or build the module on the meta device.

    If the function fails there, for example because it reads values, call it without the device.
    """
    made: object = model
    is_other_class = isinstance(model, type) and not issubclass(model, nn.Module)
    if not isinstance(model, nn.Module) and callable(model) and not is_other_class:
        try:
            with torch.device("meta"):
                made = model()
        except (RuntimeError, NotImplementedError):
            made = model()
    return instance("model", made, nn.Module, "a torch.nn.Module, or a function that returns one")


@dataclass(frozen=True)
class PlannedOptimizer:
    kind: type[Optimizer]
    arguments: dict[str, Any]
    groups: list[tuple[dict[str, Any], list[Tensor]]]

    @staticmethod
    def of(optimizer: Optimizer) -> PlannedOptimizer:
        """Describe an optimizer: plain, OSS, or inside a scaling rule or blocks."""
        groups = [(options_of(group), group["params"]) for group in optimizer.param_groups]
        optimizer = unwrap(optimizer)[-1]
        if isinstance(optimizer, ShardedOptimizer):  # the wrapped class defines the state
            arguments = dict(optimizer.optimizer_arguments)
            return PlannedOptimizer(optimizer.optimizer_class, arguments, groups)
        return PlannedOptimizer(type(optimizer), constructor_arguments(optimizer)[0], groups)

    @cached_property
    def all_options(self) -> list[dict[str, Any]]:
        return [{**self.arguments, **options} for options, _ in self.groups] or [self.arguments]

    @cached_property
    def elementwise(self) -> bool:
        return choose_layout(self.kind, None, self.all_options) == "even"

    @property
    def wants_whole_tensors(self) -> bool:
        return not self.elementwise or traits_of(self.kind).on_full_tensors


def planned_optimizers(
    optimizer: object, options: Mapping[str, object], model: nn.Module
) -> list[PlannedOptimizer]:
    several = [optimizer]
    if isinstance(optimizer, list | tuple):
        several = list(optimizer)
    made = [one for one in several if isinstance(one, Optimizer)]
    if len(made) == len(several):
        existing = []
        for one in made:
            for plain in optimizers_in(unwrap(one)[-1]):
                existing.append(PlannedOptimizer.of(plain))
        check_covers(existing, model)
        return existing
    if isinstance(optimizer, str):
        known = {}
        for name in dir(optim):
            kind = getattr(optim, name)
            if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer:
                known[name.lower()] = kind
        one_of("optimizer", optimizer.lower(), sorted(known), "Pass the class of other optimizers.")
        optimizer = known[optimizer.lower()]
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise TypeError(
            f"optimizer must be a name, a class or an optimizer, got {shown(optimizer)}."
        )
    return [PlannedOptimizer(optimizer, dict(options), [({}, list(model.parameters()))])]


def check_covers(optimizers: Sequence[PlannedOptimizer], model: nn.Module) -> None:
    held = Counter[int]()
    for optimizer in optimizers:
        for _, params in optimizer.groups:
            held.update(map(id, params))
    wrong = []
    foreign = set(held)
    for name, param in model.named_parameters():
        foreign.discard(id(param))
        if held[id(param)] != 1 and param.requires_grad:
            wrong.append(name)
    if foreign:
        wrong = [f"{len(foreign)} parameter(s) that are not in the model"]
    if wrong:
        raise ValueError(
            "each trained parameter of the model, and no other parameter, must be in exactly one "
            f"optimizer. Check {', '.join(wrong[:4])}. Pass a list of all optimizers, or freeze "
            "parameters."
        )


# -- sizes -------------------------------------------------------------------------------------


def measure(model: nn.Module, optimizers: list[PlannedOptimizer], wrap_size: int) -> ModelSizes:
    sizes: dict[int, ParamSize] = {}  # by id, so that tied parameters count once
    by_optimizer = []
    for one in optimizers:
        states = StateSizes(one.kind, one.arguments)
        elementwise = one.elementwise
        own = []
        for options, params in one.groups:
            for param in params:
                sizes[id(param)] = _param_size(param, states, options, elementwise)
                own.append(sizes[id(param)])
        by_optimizer.append(OptimizerParams(tuple(own), elementwise, one.wants_whole_tensors))
    others = []
    for param in model.parameters():
        if id(param) not in sizes:
            sizes[id(param)] = _param_size(param)
            others.append(sizes[id(param)])
    # Small buffers of equal kind share a broadcast.
    messages = set[object]()
    buffer_bytes = 0
    for buffer in model.buffers():
        buffer_bytes += buffer.nbytes
        if buffer.numel() <= SENT_ALONE:
            messages.add((buffer.dtype, buffer.device))
        else:
            messages.add(id(buffer))
    wraps = []
    for params, outer in wrap_params(model, wrap_size):
        wraps.append(WrapParams(tuple([sizes[id(param)] for param in params]), outer))
    return ModelSizes(tuple(by_optimizer), tuple(others), tuple(wraps), buffer_bytes, len(messages))


def _param_size(
    param: Tensor,
    states: StateSizes | None = None,
    options: Mapping[str, object] | None = None,
    elementwise: bool = True,
) -> ParamSize:
    fixed = 0
    per_element = 0
    if states is not None and param.requires_grad and param.numel():
        if elementwise:
            fixed, per_element = states.by_element(param.dtype, options or {})
        else:
            fixed = states.bytes(param.shape, param.dtype, options or {})
    return ParamSize(
        elements=param.numel(),
        itemsize=param.element_size(),
        kind=(str(param.dtype), str(param.device)),
        trained=param.requires_grad,
        state_fixed=fixed,
        state_per_element=per_element,
        rows=param.shape[0] if param.dim() else 1,
    )


def wrap_size_of(model: nn.Module) -> int:
    elements = count_elements(model)
    # With 1/50 of the model per wrap, gathered tensors need little memory.
    size = min(LARGEST_WRAP, max(1, elements // 50))
    power = 10 ** (len(str(size)) - 1)
    return size // power * power  # one significant digit, for readability


def count_elements(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def wrap_params(model: nn.Module, least: int) -> list[tuple[list[Tensor], int | None]]:
    """Return the FSDP wraps, from the innermost to the model.

    A wrap has the parameters outside inner wraps, plus the index of the enclosing wrap.
    """
    wraps = list(pick_modules(model, by_size(least), ()))
    if model in wraps:
        wraps.remove(model)
    wraps.append(model)
    numbers = {module: number for number, module in enumerate(wraps)}
    outers: dict[int, int] = {}
    params: list[list[Tensor]] = [[] for _ in wraps]
    seen: set[int] = set()

    def visit(module: nn.Module, outer: int) -> None:
        number = numbers.get(module, outer)
        if number != outer:
            outers.setdefault(number, outer)  # a shared module belongs to its first position
        for param in module.parameters(recurse=False):
            if id(param) not in seen:
                seen.add(id(param))
                params[number].append(param)
        for child in module.children():
            visit(child, number)

    visit(model, len(wraps) - 1)
    return [(held, outers.get(number)) for number, held in enumerate(params)]


def by_size(least: int) -> Policy:
    return partial(default_auto_wrap_policy, min_num_params=least, skip_params_check_for_root=True)


# -- activations -------------------------------------------------------------------------------


def activation_bytes(model: nn.Module, input: object) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import

    kwargs: dict[str, object] = {}
    args: tuple[object, ...] = ()
    if isinstance(input, Mapping):
        kwargs = dict(input)
    elif isinstance(input, list | tuple):
        args = tuple(input)
    else:
        args = (input,)
    # References keep the storages, because addresses of freed storages are reused.
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"), torch.enable_grad():
        named = (*model.named_parameters(), *model.named_buffers())
        state = {name: _fake_tensor(tensor) for name, tensor in named}
        of_model = [tensor.untyped_storage()._cdata for tensor in state.values()]
        args, kwargs = tree_map_tensors(_fake_tensor, (args, kwargs))
        noting = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        logger = logging.getLogger("torch._subclasses.fake_tensor")
        before = logger.disabled
        logger.disabled = True  # torch 2.15 logs the errors that it raises
        try:
            with noting:
                torch.func.functional_call(model, state, args, kwargs)
        except Exception as error:  # a model's forward may raise any exception
            raise ValueError(
                f"the forward pass could not be run on tensors without memory: {error}\n"
                "The forward pass must not read values of tensors, and the model's tensors must be "
                "parameters or buffers. Leave the input out to plan without activations."
            ) from error
        finally:
            logger.disabled = before
    for key in of_model:
        storages.pop(key, None)
    return sum(storage.nbytes() for storage in storages.values())


def _fake_tensor(value: Tensor) -> Tensor:
    """Return an equal tensor without memory, in FakeTensorMode."""
    tensor = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    if isinstance(value, nn.Parameter):
        return nn.Parameter(tensor, requires_grad=value.requires_grad)
    return tensor.requires_grad_(value.requires_grad)

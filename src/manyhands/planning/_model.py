"""From a module and its optimizers to sizes (`ModelSizes`). The module is not changed.

**Optimizer state** is read off a small stand-in. It has as many dimensions as the parameter, and
their lengths are different primes. After two steps, the lengths of a state tensor tell which
dimensions of the parameter it has: Adam's averages of a 5 × 7 parameter are 5 × 7, Adafactor's rows
5 × 1, a matrix over the columns 7 × 7, and a step count is one number for any parameter. So no
tensor of the parameter's size is needed.

**Activations** are what a forward pass keeps for the backward pass. torch's FakeTensorMode runs the
forward with shapes alone, and a hook sees each tensor that autograd saves. Every storage counts
once. Parameters and buffers do not count here, as they are counted anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer, RMSprop

from manyhands._core.ranks import SENT_ALONE
from manyhands.planning._arguments import PlannedOptimizer
from manyhands.planning._sizes import ModelSizes, OptimizerParams, ParamSize, WrapParams
from manyhands.sharding.wrapping._policies import Policy, default_auto_wrap_policy, pick_modules

T = TypeVar("T")

PRIMES = (5, 7, 11, 13, 17, 19)
LARGEST_WRAP = 10**8  # elements of an FSDP wrap; of a smaller model, a 50th of its elements
TRIAL_STEPS = 2  # the first step may make less state than the second


# -- sizes -------------------------------------------------------------------------------------


def measure(model: nn.Module, optimizers: list[PlannedOptimizer], wrap_size: int) -> ModelSizes:
    """Return the sizes of everything that a worker holds."""
    sizes: dict[int, ParamSize] = {}  # by id: tied parameters are one
    by_optimizer = []
    for one in optimizers:
        states, elementwise = OptimizerStateSizes(one.kind, one.arguments), one.elementwise
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
    buffers = list(model.buffers())
    # Small buffers of one kind travel in one message, large ones each in their own.
    small = {(b.dtype, b.device) for b in buffers if b.numel() <= SENT_ALONE}
    return ModelSizes(
        tuple(by_optimizer),
        tuple(others),
        tuple(
            WrapParams(tuple(sizes[id(param)] for param in params), outer)
            for params, outer in wrap_params(model, wrap_size)
        ),
        sum(buffer.numel() * buffer.element_size() for buffer in buffers),
        len(small) + sum(buffer.numel() > SENT_ALONE for buffer in buffers),
    )


def _param_size(
    param: Tensor,
    states: OptimizerStateSizes | None = None,
    options: Mapping[str, object] | None = None,
    elementwise: bool = True,
) -> ParamSize:
    fixed, per_element = 0, 0
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
        real=not param.is_complex(),
    )


def wrap_size_of(model: nn.Module) -> int:
    """Return how many elements a wrap of the plan's FSDP has at least."""
    elements = sum(param.numel() for param in model.parameters())
    # A wrap of a 50th keeps the whole tensors of a backward pass small beside the shards.
    return _round_down(min(LARGEST_WRAP, max(1, elements // 50)))


def _round_down(number: int) -> int:
    """Return the number with all digits but the first set to zero: easier to read in code."""
    power = 10 ** (len(str(number)) - 1)
    return number // power * power


def wrap_params(model: nn.Module, least: int) -> list[tuple[list[Tensor], int | None]]:
    """Return the wraps of the plan's FSDP, the innermost first, the model itself last.

    Each has the parameters that no wrap inside it has, and the number of the wrap around it.
    """
    wraps = [module for module in pick_by_size(model, least) if module is not model] + [model]
    numbers = {module: number for number, module in enumerate(wraps)}
    outers: dict[int, int] = {}
    params: list[list[Tensor]] = [[] for _ in wraps]
    seen: set[int] = set()

    def visit(module: nn.Module, outer: int) -> None:
        number = numbers.get(module, outer)
        if number != outer:
            outers.setdefault(number, outer)  # a shared module is in its first place
        for param in module.parameters(recurse=False):
            if id(param) not in seen:
                seen.add(id(param))
                params[number].append(param)
        for child in module.children():
            visit(child, number)

    visit(model, len(wraps) - 1)
    return [(held, outers.get(number)) for number, held in enumerate(params)]


def pick_by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Return the modules that `auto_wrap` wraps by size, from `least` parameters on."""
    return pick_modules(model, by_size(least), ())


def by_size(least: int) -> Policy:
    """Return the policy of the plan's FSDP: wrap modules of at least so many parameters."""
    return partial(default_auto_wrap_policy, min_num_params=least, skip_params_check_for_root=True)


# -- optimizer state ------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateTensor:
    """A state tensor: `constant` elements for each index into the parameter's `dims`."""

    constant: int
    dims: tuple[int, ...]
    itemsize: int

    def bytes(self, shape: Sequence[int]) -> int:
        return self.constant * prod(shape[dim] for dim in self.dims) * self.itemsize


class OptimizerStateSizes:
    """The size of one optimizer class's state, for parameters of any shape.

    Each combination of dimensions, dtype and options is tried once.
    """

    def __init__(self, kind: type[Optimizer], arguments: Mapping[str, object]) -> None:
        self._kind = kind
        self._arguments: dict[str, Any] = dict(arguments)
        self._known: dict[tuple[int, torch.dtype, str], list[StateTensor]] = {}

    def bytes(self, shape: Sequence[int], dtype: torch.dtype, options: Mapping[str, object]) -> int:
        """Return the bytes of state of a parameter that is not cut."""
        return sum(tensor.bytes(shape) for tensor in self._tensors(len(shape), dtype, options))

    def by_element(self, dtype: torch.dtype, options: Mapping[str, object]) -> tuple[int, int]:
        """Return the bytes for each flat shard, and for each element of it."""
        tensors = self._tensors(1, dtype, options)
        fixed = sum(tensor.bytes(()) for tensor in tensors if not tensor.dims)
        return fixed, sum(tensor.bytes((1,)) for tensor in tensors if tensor.dims)

    def _tensors(
        self, dims: int, dtype: torch.dtype, options: Mapping[str, object]
    ) -> list[StateTensor]:
        # Options may hold lists or tensors, which cannot be keys; their text can.
        key = (dims, dtype, repr(sorted(options.items(), key=lambda option: option[0])))
        if key not in self._known:
            self._known[key] = self._try(dims, dtype, options)
        return self._known[key]

    def _try(
        self, dims: int, dtype: torch.dtype, options: Mapping[str, object]
    ) -> list[StateTensor]:
        """Step the optimizer on a small parameter, and read the shapes of its state."""
        if dims > len(PRIMES):
            raise ValueError(
                f"a parameter has {dims} dimensions; the planner supports up to {len(PRIMES)}."
            )
        shape = PRIMES[:dims]
        # With a generator of its own, and so without a change of the user's random numbers.
        generator = torch.Generator(device="cpu").manual_seed(0)
        random = torch.randn(shape, generator=generator, device="cpu")
        param = torch.nn.Parameter(random.to(dtype))
        # capturable=True raises for a parameter on the CPU, and changes no size.
        options = {**options, **({"capturable": False} if "capturable" in options else {})}
        try:
            optimizer = self._kind([{**options, "params": [param]}], **self._arguments)
            for _ in range(TRIAL_STEPS):
                param.grad = random.to(dtype)
                optimizer.step()
        except Exception as error:  # any class may be planned, and may raise anything
            raise ValueError(
                f"{self._kind.__name__} failed on a {dtype} parameter with {dims} dimension(s), "
                f"such as the model has: {error} If it needs other options, give them to plan(). "
                "If it is for some of the parameters only, make the optimizers as for training "
                "and give plan() a list of them."
            ) from error
        state = optimizer.state.get(param, {})
        return [_describe_state(value, shape) for value in _state_tensors(state)]


def _state_tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _state_tensors(each)]
    return []


def _describe_state(tensor: Tensor, shape: Sequence[int]) -> StateTensor:
    """Find the parameter's dimensions in the tensor's; any other length is a constant."""
    # Every product of different primes is unique, so a flattened dimension is recognised, too.
    products = {
        prod(shape[dim] for dim in chosen): chosen
        for count in range(1, len(shape) + 1)
        for chosen in combinations(range(len(shape)), count)
    }
    constant, dims = 1, list[int]()
    for length in tensor.shape:
        if length in products:
            dims += products[length]
        else:
            constant *= length
    return StateTensor(constant, tuple(dims), tensor.element_size())


def replicated_entries(optimizers: Sequence[PlannedOptimizer]) -> int:
    """Return how many tensors like the parameters AdamScale needs whole, or raise."""
    (one, *others) = optimizers
    if others:
        raise ValueError(
            "AdamScale wraps one optimizer, and the model has several. Leave out rule=, or plan "
            "the parts of the model by themselves."
        )
    if not issubclass(one.kind, Adam | RMSprop):
        raise ValueError(
            f"AdamScale works with Adam, AdamW and RMSprop, got {one.kind.__name__}. "
            "Plan AdaScale for SGD."
        )
    centered = any({**one.arguments, **options}.get("centered") for options, _ in one.groups)
    return 2 if centered else 1


# -- activations -------------------------------------------------------------------------------


class ForwardCosts(NamedTuple):
    """What a forward pass keeps for the backward pass, and what it computes."""

    saved_bytes: int
    operations: int  # floating-point, of matrix products, convolutions and attention


def forward_costs(
    model: nn.Module, input: object, autocast: torch.dtype | None = None
) -> ForwardCosts:
    """Return the costs of a forward pass with one worker's `input`."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import
    from torch.utils.flop_counter import FlopCounterMode

    under_autocast: AbstractContextManager[object] = (
        nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
    )
    counter = FlopCounterMode(display=False)

    args, kwargs = _forward_arguments(input)
    # The storages themselves are kept, or a freed one's address could be counted for another.
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"), torch.enable_grad():
        state = {
            name: _fake_tensor(tensor)
            for named in (model.named_parameters(), model.named_buffers())
            for name, tensor in named
        }
        of_model = {tensor.untyped_storage()._cdata for tensor in state.values()}
        try:
            noting = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
            with counter, noting, under_autocast, _silent("torch._subclasses.fake_tensor"):
                torch.func.functional_call(
                    model,
                    state,
                    tuple(map(_fake_tensor, args)),
                    {name: _fake_tensor(value) for name, value in kwargs.items()},
                )
        except Exception as error:  # a model's forward may raise anything
            raise ValueError(
                f"the forward pass could not be run on tensors without memory: {error}\n"
                "The forward must not read values out of tensors, and the model's tensors must be "
                "parameters or buffers. Without an input, activations are not counted."
            ) from error
    saved = sum(storage.nbytes() for key, storage in storages.items() if key not in of_model)
    return ForwardCosts(saved, counter.get_total_flops())


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Silence a logger: torch 2.15 logs an error with its traceback, and raises it as well."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _forward_arguments(input: object) -> tuple[tuple[object, ...], dict[str, object]]:
    args: tuple[object, ...] = tuple(input) if isinstance(input, list | tuple) else ()
    kwargs = dict(input) if isinstance(input, Mapping) else {}
    if isinstance(input, Tensor):
        args = (input,)
    if not any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        raise TypeError(
            "input must be a tensor, a tuple of the forward's arguments or a dict of them by "
            f"name, got {input!r}. Only shapes matter: torch.empty(8, 128, device='meta')."
        )
    return args, kwargs


def _fake_tensor(value: T) -> T | Tensor:
    """Return a tensor of the same kind without memory. Call this inside FakeTensorMode."""
    if not isinstance(value, Tensor):
        return value
    tensor = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    if isinstance(value, nn.Parameter):
        return nn.Parameter(tensor, requires_grad=value.requires_grad)
    return tensor.requires_grad_(value.requires_grad)

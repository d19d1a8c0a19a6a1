"""Determine whether an optimizer class supports cut or sharded parameters, and state sizes.

`KNOWN` lists torch's classes. Other classes are tested: `trial` steps them on small parameters.

    may_be_cut          are the results equal if a parameter is cut at any position?
    can_be_divided      are the results equal if each parameter is stepped separately?
    choose_layout       may OSS cut parameters?
    problem_on_shards   can the optimizer step DTensors?
    StateSizes          the size of the state, for a parameter of any shape

A class may be cut if it processes elements independently. LAMB's and LARS's norms, Adafactor's rows
and columns, and Muon's matrices depend on a full tensor. For a class that is not torch's, the
default layout has uncut parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from manyhands._arguments import one_of
from manyhands._tensors.trees import tensors_in

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

STEPS = 12
TOYS = (160, 144), (96,)  # shapes of small parameters; some optimizers change methods above a size
PRIMES = (5, 7, 11, 13, 17, 19)


@dataclass(frozen=True)
class Traits:
    """Properties of a class. The defaults require a trial."""

    elementwise: bool = False  # processes elements independently
    on_full_tensors: bool = False  # cannot step DTensors
    divisible: bool = True  # can step some parameters without others


KNOWN: dict[type[Optimizer], Traits] = {
    **dict.fromkeys((optim.SGD, optim.Adam, optim.AdamW, optim.NAdam), Traits(True)),
    **dict.fromkeys((optim.RAdam, optim.Adamax, optim.Adagrad), Traits(True)),
    **dict.fromkeys((optim.Adadelta, optim.RMSprop, optim.ASGD), Traits(True)),
    optim.Rprop: Traits(True, on_full_tensors=True),
    **dict.fromkeys((optim.Adafactor, optim.Muon, optim.SparseAdam), Traits(on_full_tensors=True)),
    optim.LBFGS: Traits(on_full_tensors=True, divisible=False),
}
# Modules of optimizers with 8-bit state. `trial` does not reveal that these cannot step DTensors,
# because the state of small parameters has 32 bits.
QUANTIZED = "bitsandbytes.optim", "torchao.optim.adam"


def traits_of(kind: type[Optimizer]) -> Traits:
    """Return the known properties of a class, limited by the base class."""
    if kind in KNOWN:
        return KNOWN[kind]
    if _has_8_bit_state(kind):
        return Traits(on_full_tensors=True)
    for base in kind.__mro__:
        if base in KNOWN:
            return replace(KNOWN[base], elementwise=False)
    return Traits()


def _has_8_bit_state(kind: type[Optimizer]) -> bool:
    return any(base.__module__.startswith(QUANTIZED) for base in kind.__mro__)


def constructor_arguments(optimizer: Optimizer) -> tuple[dict[str, Any], list[str]]:
    """Return the constructor's arguments from the defaults, and missing names."""
    # Defaults also contain options that are not arguments of the constructor.
    arguments = {}
    unknown = []
    for parameter in list(inspect.signature(type(optimizer)).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in optimizer.defaults:
            arguments[parameter.name] = optimizer.defaults[parameter.name]
        else:
            unknown.append(parameter.name)
    return arguments, unknown


def trial(
    kind: type[Optimizer],
    arguments: Mapping[str, Any],
    params: Sequence[Tensor],
    steps: Sequence[Sequence[Tensor]],
    *,
    options: Mapping[str, object] = MappingProxyType({}),
) -> tuple[list[torch.nn.Parameter], Optimizer]:
    """Step a new optimizer on copies of `params`, with the gradients in `steps`."""
    # `options` belong to the parameter group.
    leaves = [torch.nn.Parameter(param.clone()) for param in params]
    groups: list[Any] = leaves
    if options:
        groups = [{**options, "params": leaves}]
    optimizer = kind(groups, **arguments)
    for grads in steps:
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad.clone()
        optimizer.step()
    return leaves, optimizer


# -- cutting and dividing --------------------------------------------------------------------------


def may_be_cut(kind: type[Optimizer], options: Sequence[Mapping[str, object]]) -> bool:
    if kind in KNOWN:
        return KNOWN[kind].elementwise
    if _has_8_bit_state(kind):
        return False  # the cuts of the trial coincide with blocks of quantized values
    return all(_steps_alike(kind, each, _in_halves, if_it_fails=False) for each in options)


def can_be_divided(kind: type[Optimizer], options: Sequence[Mapping[str, object]]) -> bool:
    if kind in KNOWN or not traits_of(kind).divisible:
        return traits_of(kind).divisible
    return all(_steps_alike(kind, each, list, if_it_fails=True) for each in options)


def _steps_alike(
    kind: type[Optimizer],
    options: Mapping[str, object],
    divide: Callable[[list[Tensor]], list[Tensor]],
    *,
    if_it_fails: bool,
) -> bool:
    # `if_it_fails`: for an optimizer that cannot train toy parameters.
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in TOYS]
    steps = [[torch.randn(shape, generator=generator) for shape in TOYS] for _ in range(STEPS)]
    moving = dict(options)
    if "lr" in options and not options["lr"]:
        moving["lr"] = 0.05

    def stepped(params: Sequence[Tensor], steps: Sequence[Sequence[Tensor]]) -> Tensor:
        torch.manual_seed(0)  # for optimizers that add noise
        leaves, _ = trial(kind, moving, params, steps)
        return torch.cat([leaf.detach().flatten() for leaf in leaves])

    divided = []
    try:
        with torch.random.fork_rng(devices=[]):
            together = stepped(start, steps)
            # `grads` contains the part's gradient for each step.
            for part, *grads in zip(divide(start), *map(divide, steps), strict=True):
                divided.append(stepped([part], [[grad] for grad in grads]))
    except Exception:
        return if_it_fails
    return torch.equal(torch.cat(divided), together)


def _in_halves(tensors: list[Tensor]) -> list[Tensor]:
    halves: list[Tensor] = []
    for tensor in tensors:
        halves += tensor.view(-1).tensor_split(2)
    return halves


def choose_layout(
    kind: type[Optimizer], asked: str | None, options: Sequence[Mapping[str, object]]
) -> str:
    """Return the layout of OSS: "even" or "whole"; raise if results would be wrong."""
    one_of("layout", asked, (None, "even", "whole"))
    if asked == "even" and not may_be_cut(kind, options):
        raise ValueError(
            f'layout="even" cuts parameters anywhere, but {kind.__name__} needs whole parameters: '
            'results would be wrong. Use layout="whole".'
        )
    if asked is None and not can_be_divided(kind, options):
        raise ValueError(
            f"{kind.__name__} combines all parameters in a step, so its state cannot be divided. "
            'Use it without OSS. (If it only adds random noise, layout="whole" works.)'
        )
    return asked or ("even" if traits_of(kind).elementwise else "whole")


# -- DTensors --------------------------------------------------------------------------------------


def fused_problem(optimizer: Optimizer) -> str:
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if not (fused and isinstance(optimizer, optim.SGD | optim.Adagrad)):
        return ""
    return (
        f"torch's fused {type(optimizer).__name__} does not step sharded parameters. Omit "
        "fused=True."
    )


def problem_on_shards(optimizer: Optimizer, like: DTensor) -> str | None:
    # The trial uses collectives, so call this on every rank.
    from torch.distributed.tensor import distribute_tensor

    kind = type(optimizer)
    if traits_of(kind).on_full_tensors:
        return "it needs full tensors"
    # Our optimizers check their parameters at construction.
    if kind in KNOWN or kind.__module__.startswith("manyhands."):
        return None
    # Two of three rows per rank, so that no slice is empty.
    mesh = like.device_mesh
    elements = 6 * like.device_mesh.size()
    param = torch.linspace(-1, 1, elements, dtype=like.dtype, device=like.device).view(-1, 3)
    grad = param.sin() + param.square()
    # The second step uses the state from the first.
    try:
        (plain,), _ = trial(kind, optimizer.defaults, [param], [[grad]] * 2)
    except Exception:
        return None  # the defaults are not sufficient to construct the optimizer
    shard = partial(
        distribute_tensor, device_mesh=mesh, placements=like.placements, src_data_rank=None
    )
    try:
        leaves, _ = trial(kind, optimizer.defaults, [shard(param)], [[shard(grad)]] * 2)
        sharded: Any = leaves[0].detach()
        same = torch.allclose(sharded.full_tensor(), plain.detach(), rtol=1e-3, atol=1e-5)
    except Exception as error:
        return f"on a small example it raised {type(error).__name__}"
    if same:
        return None
    return "on a small example its steps differ from those with full tensors"


# -- size of the state -----------------------------------------------------------------------------


@dataclass(frozen=True)
class StateTensor:
    constant: int
    dims: tuple[int, ...]
    itemsize: int

    @staticmethod
    def of(tensor: Tensor, shape: Sequence[int]) -> StateTensor:
        """Identify the parameter's dimensions; other lengths are constants."""
        # Products of different primes are unique, so flattened dimensions are recognized.
        products = {}
        for count in range(1, len(shape) + 1):
            for chosen in combinations(range(len(shape)), count):
                products[prod([shape[dim] for dim in chosen])] = chosen
        constant = 1
        dims: tuple[int, ...] = ()
        for length in tensor.shape:
            if length in products:
                dims += products[length]
            else:
                constant *= length
        return StateTensor(constant, dims, tensor.element_size())

    def bytes(self, shape: Sequence[int]) -> int:
        return self.constant * prod(shape[dim] for dim in self.dims) * self.itemsize


class StateSizes:
    """The size of an optimizer class's state, for parameters of any shape.

    The lengths of a small parameter are different primes, which identify the parameter's dimensions
    in each state tensor. For example, Adam's averages of a 5 × 7 parameter are 5 × 7, and
    Adafactor's rows are 5 × 1.
    """

    def __init__(self, kind: type[Optimizer], arguments: Mapping[str, object]) -> None:
        self._kind = kind
        self._arguments: dict[str, Any] = dict(arguments)
        self._known: dict[tuple[int, torch.dtype, str], list[StateTensor]] = {}

    def bytes(self, shape: Sequence[int], dtype: torch.dtype, options: Mapping[str, object]) -> int:
        return sum(tensor.bytes(shape) for tensor in self._tensors(len(shape), dtype, options))

    def by_element(self, dtype: torch.dtype, options: Mapping[str, object]) -> tuple[int, int]:
        """Return the bytes per flat shard, and per element of the shard."""
        fixed = 0
        by_element = 0
        for tensor in self._tensors(1, dtype, options):
            if tensor.dims:
                by_element += tensor.bytes((1,))
            else:
                fixed += tensor.bytes(())
        return fixed, by_element

    def _tensors(
        self, dims: int, dtype: torch.dtype, options: Mapping[str, object]
    ) -> list[StateTensor]:
        key = (dims, dtype, repr([(name, options[name]) for name in sorted(options)]))
        if key not in self._known:
            self._known[key] = self._try_steps(PRIMES[:dims], dtype, options)
        return self._known[key]

    def _try_steps(
        self, shape: tuple[int, ...], dtype: torch.dtype, options: Mapping[str, object]
    ) -> list[StateTensor]:
        # Preserves the user's random state.
        generator = torch.Generator(device="cpu").manual_seed(0)
        random = torch.randn(shape, generator=generator, device="cpu").to(dtype)
        # capturable=True raises for a parameter on the CPU, and does not change sizes.
        if "capturable" in options:
            options = {**options, "capturable": False}
        try:  # the second step may add state
            (param,), made = trial(
                self._kind, self._arguments, [random], [[random]] * 2, options=options
            )
        except Exception as error:  # any class, and therefore any exception
            raise ValueError(
                f"{self._kind.__name__} failed on a {dtype} parameter with {len(shape)} "
                f"dimension(s), as in this model: {error} Pass the options that it needs, or a "
                "list of optimizers if this one is for some parameters only."
            ) from error
        return [StateTensor.of(each, shape) for each in tensors_in(made.state[param])]

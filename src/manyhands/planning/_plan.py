"""Plan the training of a model: the four ways to do it on N workers, and the cheapest that fits.

Each way is a row: its bytes and collectives (`_costs.py`), the reason why it cannot be used, if
there is one, and the lines of code to paste (`_table.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from manyhands._core.state_parts import ShardedOptimizer, options_of
from manyhands._core.wrappers import unwrap
from manyhands.blocks._optimizer import Blocks
from manyhands.blocks._outer import Average, BlockMomentum, SlowMomentum
from manyhands.planning._costs import Cost, ModelSizes, blocks_cost, costs
from manyhands.planning._line import (
    LinePlan,
    PassPlan,
    parse_pass_seconds,
    parse_rate,
    parse_speed,
)
from manyhands.planning._model import (
    PlannedOptimizer,
    forward_costs,
    measure,
    replicated_entries,
    wrap_params,
)
from manyhands.planning._table import (
    Plan,
    Row,
    blocks_code,
    explain_layouts,
    explain_wraps,
    most_sharded,
    names_and_code,
    parse_bytes,
    wrap_code,
)
from manyhands.scaling._rule_base import ScalingRuleBase
from manyhands.scaling._rules import AdamScale, AdaScale, LEGWScale, LinearScale, SqrtScale
from manyhands.sharding.fsdp._checks import NEED_WHOLE
from manyhands.sharding.zero._ddp import ShardedDataParallel

LARGEST_WRAP = 10**8  # elements of an FSDP wrap; of a smaller model, a 50th of its elements
MOST_WORKERS = 2**13  # the search for a number of workers that would do ends here
BACKENDS = ("nccl", "gloo")


def plan(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Any = "adamw",
    workers: int = 8,
    *,
    memory: float | str | None = None,
    input: Any = None,
    backend: str = "nccl",
    bucket_size: int | None = None,
    line: float | str | None = None,
    pass_seconds: float | None = None,
    speed: float | str | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    rule: str | type | None = None,
    blocks: str | type | None = None,
    **options: Any,
) -> Plan:
    """Compare the ways to train a model on N workers: bytes held, bytes sent, and which way fits.

    >>> import torch, manyhands as mh
    >>> def build_model():
    ...     return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(64)))
    >>> found = mh.plan(build_model, "adamw", workers=4, memory="500MiB")
    >>> found.cheapest.name
    'OSS + ShardedDataParallel'
    >>> print(found.cheapest.code)
    optimizer = mh.OSS(model.parameters(), optim=torch.optim.AdamW, lr=lr)
    model = mh.ShardedDataParallel(model, optimizer)

    The numbers come from the layout that the library will use, for the worker that holds most.
    For `FullyShardedDataParallel` the model is wrapped as in the row's `code`. Not counted are
    the memory that operations need while they run, and the copies that the optimizer's `foreach`
    implementation makes within a step.

    Args:
        model: a module, on any device, or a function that builds one. A function is called
            under `torch.device("meta")`, so that no memory is needed (or, if that fails, as it is).
        optimizer: the name or the class of an optimizer, a `functools.partial` of it, or the
            existing optimizer; a list, if there are several.
        workers: the number of workers.
        memory: the memory of each worker, such as "24GiB".
        input: one worker's input, to measure activations: a tensor, a tuple of the forward's
            arguments, or a dict of them. Only shapes matter, so meta tensors will do.
        backend: "nccl" or "gloo"; it decides the number of collectives and the buckets in flight.
        bucket_size: elements that travel together, as for `OSS`.
        line: the rate of each worker's line to the others, in bits a second or as a text such as
            "50Mbit" or "10Gbit/s". Then the plan says what a step takes on it, and whether to
            train at the small batch, with `Ramp`, or in blocks.
        pass_seconds: how long one pass takes on one worker, forward and backward, if it is known.
        speed: the operations that a worker does in a second, such as "30TFLOP/s": with an `input`
            the plan computes how long a pass takes. What a model reaches is often a third to a half
            of what a GPU is sold with.
        dtype: the type of the parameters, such as `torch.bfloat16`, of a model that is built here.
        autocast: the type to which `torch.autocast` casts in the forward pass, for activations.
        rule: the scaling rule, such as "AdamScale", whose memory is counted then. That of an
            existing optimizer is found.
        blocks: a method of blocks, such as "DiLoCo": its costs are one more row. That of an
            existing optimizer is found.
        **options: options of the optimizer, such as momentum.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers must be a number of at least 1, got {workers!r}.")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
    if bucket_size is not None and bucket_size < 1:
        raise ValueError(f"bucket_size must be at least 1 element, got {bucket_size}.")
    budget = None if memory is None else parse_bytes(memory)
    line_plan = _parse_line(line, pass_seconds)
    if speed is not None and (input is None or pass_seconds is not None):
        raise ValueError(
            "speed says how long the operations of a pass take: give input as well, and leave "
            "pass_seconds out."
        )
    _check_dtypes(dtype=dtype, autocast=autocast)
    module = _build_module(model, dtype)
    optimizers = _parse_optimizers(optimizer, options, module)
    rule_name = _find_name(rule, RULES, "rule") or _find_layer_name(optimizer, ScalingRuleBase)
    method = _find_method(blocks, optimizer)
    replicas = replicated_entries(optimizers) if rule_name == "AdamScale" else 0
    elements = sum(param.numel() for param in module.parameters())
    # A wrap of a 50th keeps the whole tensors of a backward pass small beside the shards.
    wrap_size = _round_down(min(LARGEST_WRAP, max(1, elements // 50)))
    sizes = measure(module, optimizers, wrap_size)
    activations = operations = None
    if input is not None:
        activations, operations = forward_costs(module, input, autocast)
    compute = None
    if speed is not None and operations is not None:
        compute = PassPlan(operations, parse_speed(speed))
        if line_plan is not None:
            line_plan = replace(line_plan, pass_seconds=compute.seconds)
    several = isinstance(optimizer, list | tuple)
    names, codes = names_and_code(optimizers, several, bucket_size, wrap_code(module, wrap_size))
    obstacles = (None, None, None, _fsdp_obstacle(optimizers, module, wrap_size))

    def rows(count: int) -> tuple[Row, ...]:
        found = costs(sizes, count, bucket_size, backend == "gloo", replicas)
        return tuple(
            # On one worker FSDP shards nothing, and so has no obstacle.
            _row(name, cost, sizes, activations, budget, obstacle if count > 1 else None, code)
            for name, cost, obstacle, code in zip(names, found, obstacles, codes, strict=True)
        )

    here = rows(workers)
    fits = budget is None or any(row.available and row.fits for row in here)
    if method is not None:
        cost = blocks_cost(sizes, workers, method.every, method.memories)
        code = blocks_code(optimizers, several, method.name)
        name = f"{method.name}, every={method.every}"
        row = _row(name, cost, sizes, activations, budget, None, code)
        here = (*here, replace(row, every=method.every))
    return Plan(
        rows=here,
        optimizer=" and ".join(dict.fromkeys(one.kind.__name__ for one in optimizers)),
        layout=explain_layouts(optimizers),
        wraps=explain_wraps(sizes, wrap_size),
        elements=elements,
        workers=workers,
        memory=budget,
        enough=None if fits or budget is None else _fewest_workers(rows, workers, budget),
        line=line_plan,
        rule=rule_name,
        compute=compute,
    )


@dataclass(frozen=True)
class BlockMethod:
    """A method of blocks: its name, the steps of a block, and the tensors of its outer step."""

    name: str
    every: int
    memories: int


RULES = {kind.__name__: kind for kind in (AdaScale, AdamScale, LinearScale, SqrtScale, LEGWScale)}
METHODS = {
    "DiLoCo": BlockMethod("DiLoCo", 100, BlockMomentum.memories),
    "SlowMo": BlockMethod("SlowMo", 16, SlowMomentum.memories),
    "LocalSGD": BlockMethod("LocalSGD", 16, Average.memories),
    "BMUF": BlockMethod("BMUF", 50, BlockMomentum.memories),
}


def _find_name(wanted: str | type | None, known: Iterable[str], what: str) -> str | None:
    """Return the name as it is written in `known`, or raise."""
    if wanted is None:
        return None
    name = wanted.__name__ if isinstance(wanted, type) else wanted
    by_lower = {each.lower(): each for each in known}
    if not isinstance(name, str) or name.lower() not in by_lower:
        raise ValueError(f"{what} must be one of {', '.join(by_lower.values())}, got {name!r}.")
    return by_lower[name.lower()]


def _layers(optimizer: object) -> list[Optimizer]:
    return unwrap(optimizer, every_layer=True) if isinstance(optimizer, Optimizer) else []


def _find_layer_name(optimizer: object, kind: type) -> str | None:
    names = [type(layer).__name__ for layer in _layers(optimizer) if isinstance(layer, kind)]
    return names[0] if names else None


def _find_method(wanted: str | type | None, optimizer: object) -> BlockMethod | None:
    """Return the method of blocks that was named, or that the existing optimizer has."""
    if (name := _find_name(wanted, METHODS, "blocks")) is not None:
        return METHODS[name]
    for layer in _layers(optimizer):
        if isinstance(layer, Blocks):
            every = int(layer.snapshot()["every"])
            return BlockMethod(type(layer).__name__, every, layer.outer.memories)
    return None


def _check_dtypes(**dtypes: object) -> None:
    for name, dtype in dtypes.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(
                f"{name} must be a torch.dtype of floating-point numbers, such as torch.bfloat16, "
                f"got {dtype!r}."
            )


def _parse_line(line: float | str | None, pass_seconds: float | None) -> LinePlan | None:
    if line is None:
        if pass_seconds is not None:
            raise ValueError(
                "pass_seconds is compared with the time on the line: give line as well, such as "
                'line="50Mbit".'
            )
        return None
    rate = parse_rate(line)
    return LinePlan(rate, None if pass_seconds is None else parse_pass_seconds(pass_seconds))


def _row(
    name: str,
    cost: Cost,
    sizes: ModelSizes,
    activations: int | None,
    budget: int | None,
    obstacle: str | None,
    code: str,
) -> Row:
    row = Row(
        name=name,
        parameters=cost.parameters,
        gradients=cost.gradients,
        optimizer=cost.optimizer,
        in_flight=cost.in_flight,
        buffers=sizes.buffers,
        activations=activations,
        sent=cost.sent,
        collectives=cost.collectives,
        fits=None,
        obstacle=obstacle,
        code=code,
        scaling=cost.replicas,
        blocks=cost.blocks,
    )
    return row if budget is None else replace(row, fits=row.total <= budget)


def _fsdp_obstacle(
    optimizers: Sequence[PlannedOptimizer], model: nn.Module, wrap_size: int
) -> str | None:
    """Return the reason why FSDP cannot train this model on several workers, or None."""
    for kind in dict.fromkeys(one.kind for one in optimizers):
        if issubclass(kind, NEED_WHOLE):
            return f"{kind.__name__} needs whole tensors."
    for name, param in model.named_parameters():
        if param.dim() == 0:
            return f"{name} is a scalar, which cannot be divided; make it a tensor of one element."
    for params, _ in wrap_params(model, wrap_size):
        dtypes = dict.fromkeys(str(param.dtype) for param in params if param.requires_grad)
        if len(dtypes) > 1:
            return (
                f"parameters that would be in one wrap are {' and '.join(dtypes)}. "
                "Wrap the parameters of each dtype by themselves."
            )
    return None


def _fewest_workers(
    rows: Callable[[int], tuple[Row, ...]], workers: int, budget: int
) -> int | None:
    """Return the fewest workers on which the most sharded way fits, to 1 in 64, or None.

    The number is doubled until it fits, then the gap to the last failure is halved.
    """
    low, high = workers, 2 * workers
    before, after = most_sharded(rows(low)), most_sharded(rows(high))
    while not after.fits:
        # What every worker holds whole is too much already, and more workers do not change it.
        whole = after.total - after.gradients - after.optimizer - after.in_flight
        stuck = whole > budget and after.parameters == before.parameters
        if stuck or after.total >= before.total or high >= MOST_WORKERS:
            return None
        low, high = high, 2 * high
        before, after = after, most_sharded(rows(high))
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        if most_sharded(rows(middle)).fits:
            high = middle
        else:
            low = middle
    return high


def _round_down(number: int) -> int:
    """Return the number with all digits but the first set to zero: easier to read in code."""
    power = 10 ** (len(str(number)) - 1)
    return number // power * power


# -- the model and the optimizers that were given ------------------------------------------------


def _build_module(
    model: nn.Module | Callable[[], nn.Module], dtype: torch.dtype | None
) -> nn.Module:
    """Return the bare module, without a wrapper of DDP's or of ours around it.

    A function is called on the meta device. If it fails there, because it reads values out of
    tensors, it is called again for a real module.
    """
    if isinstance(model, nn.Module) and dtype is not None:
        raise ValueError(
            "dtype= is for a model that plan() builds, and this one exists: convert it yourself, "
            f"model.to({dtype}), or give a function that builds it."
        )
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise TypeError(
                "model must be a torch.nn.Module or a function that builds one, "
                f"got {type(model).__name__}."
            )
        try:
            with torch.device("meta"):
                made = model()
        except (RuntimeError, NotImplementedError):
            made = model()
        if not isinstance(made, nn.Module):
            name = getattr(model, "__name__", "the function")
            raise TypeError(f"{name}() must return a torch.nn.Module, got {type(made).__name__}.")
        model = made if dtype is None else made.to(dtype)
    while isinstance(model, DistributedDataParallel | ShardedDataParallel):
        model = model.module
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise ValueError(f"{name} has no shape yet. Run the model once, then plan.")
    if not any(param.requires_grad and param.numel() for param in model.parameters()):
        raise ValueError("the model has no parameter that requires a gradient: nothing to plan.")
    return model


def _parse_optimizers(
    optimizer: object, options: Mapping[str, object], model: nn.Module
) -> list[PlannedOptimizer]:
    """Accept a name, a class, a partial, an optimizer, or a list of optimizers."""
    several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    made = [one for one in several if isinstance(one, Optimizer)]
    if made and len(made) == len(several):
        if options:
            raise TypeError(
                f"an existing optimizer already has its options: leave out {sorted(options)}."
            )
        existing = [_describe_optimizer(one) for one in made]
        _check_all_planned(existing, model)
        return existing
    options = dict(options)
    if isinstance(optimizer, partial):
        if optimizer.args:
            raise TypeError("give the partial's arguments by name, and leave out the parameters.")
        options = {**optimizer.keywords, **options}
        optimizer = optimizer.func
    if isinstance(optimizer, str):
        optimizer = _find_class(optimizer)
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise TypeError(
            'optimizer must be a name such as "adamw", a class, a functools.partial of one, an '
            f"optimizer, or a list of optimizers, got {optimizer!r}."
        )
    _check_plan_options(optimizer, options)
    return [PlannedOptimizer(optimizer, options, [({}, list(model.parameters()))])]


def _find_class(name: str) -> type[Optimizer]:
    known = {
        key.lower(): kind
        for key, kind in vars(optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    if name.lower() not in known:
        near = get_close_matches(name.lower(), known, n=1) or ["adamw"]
        raise ValueError(
            f"torch.optim has no optimizer called {name!r}. Did you mean {near[0]!r}? "
            "For an optimizer from elsewhere, give the class."
        )
    return known[name.lower()]


def _check_plan_options(kind: type[Optimizer], options: Mapping[str, object]) -> None:
    accepted = inspect.signature(kind).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return  # any name may be right
    if unknown := [name for name in options if name not in accepted]:
        raise TypeError(
            f"{kind.__name__} has no option {', '.join(unknown)}; it has "
            f"{', '.join(list(accepted)[1:])}."
        )


def _describe_optimizer(optimizer: Optimizer) -> PlannedOptimizer:
    """Read an existing optimizer: a plain one, an OSS, or one inside a scaling rule or blocks."""
    groups = [(options_of(group), group["params"]) for group in optimizer.param_groups]
    optimizer = unwrap(optimizer)[-1]
    if isinstance(optimizer, ShardedOptimizer):  # the class that it shards is what has state
        arguments = dict(optimizer.optimizer_arguments)
        return PlannedOptimizer(optimizer.optimizer_class, arguments, groups, exists=True)
    # Defaults also hold options that a class sets for itself and its constructor refuses.
    accepted = inspect.signature(type(optimizer)).parameters
    arguments = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    return PlannedOptimizer(type(optimizer), arguments, groups, exists=True)


def _check_all_planned(existing: list[PlannedOptimizer], model: nn.Module) -> None:
    held = {id(param) for one in existing for _, params in one.groups for param in params}
    named = dict(model.named_parameters())
    if foreign := len(held - {id(param) for param in named.values()}):
        raise ValueError(
            f"the optimizer holds {foreign} parameter(s) that are not in the model. Make it from "
            "the parameters of the model that is planned."
        )
    left_out = [n for n, p in named.items() if p.requires_grad and id(p) not in held]
    if left_out:
        raise ValueError(
            f"{len(left_out)} parameter(s) of the model are in no optimizer: "
            f"{', '.join(left_out[:4])}{', ...' if len(left_out) > 4 else ''}. Give plan() a list "
            "of all optimizers, or freeze them with requires_grad_(False)."
        )

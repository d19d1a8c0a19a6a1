"""Plan the training of a model: the four ways to do it on N workers, and the cheapest that fits.

Each way is a row: its bytes and collectives (`_costs.py`), the reason why it cannot be used, if
there is one, and the lines of code to paste.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from manyhands.planning._costs import Cost, costs
from manyhands.planning._model import (
    PlannedOptimizer,
    build_module,
    measure,
    parse_optimizers,
    pick_by_size,
    saved_bytes,
    wrap_params,
)
from manyhands.planning._sizes import ModelSizes
from manyhands.planning._table import Plan, Row, most_sharded, parse_bytes
from manyhands.sharding.fsdp._optimizer_guard import NEED_WHOLE

LARGEST_WRAP = 10**8  # elements of an FSDP wrap; of a smaller model, a 50th of its elements
MOST_WORKERS = 2**13  # the search for a number of workers that would do ends here
BACKENDS = ("nccl", "gloo")

FSDP_NAME = "FullyShardedDataParallel"
DDP_CODE = "model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)"


def plan(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Any = "adamw",
    workers: int = 8,
    *,
    memory: float | str | None = None,
    input: Any = None,
    backend: str = "nccl",
    bucket_size: int | None = None,
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
        **options: options of the optimizer, such as momentum.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers must be a number of at least 1, got {workers!r}.")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
    if bucket_size is not None and bucket_size < 1:
        raise ValueError(f"bucket_size must be at least 1 element, got {bucket_size}.")
    budget = None if memory is None else parse_bytes(memory)
    module = build_module(model)
    optimizers = parse_optimizers(optimizer, options, module)
    elements = sum(param.numel() for param in module.parameters())
    # A wrap of a 50th keeps the whole tensors of a backward pass small beside the shards.
    wrap_size = _round_down(min(LARGEST_WRAP, max(1, elements // 50)))
    sizes = measure(module, optimizers, wrap_size)
    activations = None if input is None else saved_bytes(module, input)
    names, codes = _names_and_code(
        optimizers, isinstance(optimizer, list | tuple), bucket_size, _wrap_code(module, wrap_size)
    )
    obstacles = (None, None, None, _fsdp_obstacle(optimizers, module, wrap_size))

    def rows(count: int) -> tuple[Row, ...]:
        found = costs(sizes, count, bucket_size, backend == "gloo")
        return tuple(
            # On one worker FSDP shards nothing, and so has no obstacle.
            _row(name, cost, sizes, activations, budget, obstacle if count > 1 else None, code)
            for name, cost, obstacle, code in zip(names, found, obstacles, codes, strict=True)
        )

    here = rows(workers)
    fits = budget is None or any(row.available and row.fits for row in here)
    return Plan(
        rows=here,
        optimizer=" and ".join(dict.fromkeys(one.kind.__name__ for one in optimizers)),
        layout=_explain_layouts(optimizers),
        wraps=_explain_wraps(sizes, wrap_size),
        elements=elements,
        workers=workers,
        memory=budget,
        enough=None if fits or budget is None else _fewest_workers(rows, workers, budget),
    )


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


# -- lines of code to paste, and explanations --------------------------------------------------


def _names_and_code(
    optimizers: Sequence[PlannedOptimizer], several: bool, bucket_size: int | None, wrap_code: str
) -> tuple[list[str], list[str]]:
    """Return the names of the four ways, and the lines to paste for each."""
    size_option = "" if bucket_size is None else f", bucket_size={bucket_size}"
    if not optimizers[0].exists:
        oss = f"optimizer = {_oss_code(optimizers[0], size_option)}"
    elif several:
        again = f"mh.OSS(one.param_groups, optim=type(one){size_option})"
        oss = f"optimizers = [{again} for one in optimizers]"
    else:
        oss = f"optimizer = mh.OSS(optimizer.param_groups, optim=type(optimizer){size_option})"
    sharded = f"model = mh.ShardedDataParallel(model, optimizer{'s' * several})"
    fully = _fsdp_code(optimizers, several, wrap_code)
    return (
        ["DDP", "OSS + DDP", "OSS + ShardedDataParallel", FSDP_NAME],
        [DDP_CODE, f"{oss}\n{DDP_CODE}", f"{oss}\n{sharded}", fully],
    )


def _fsdp_code(optimizers: Sequence[PlannedOptimizer], several: bool, wrap_code: str) -> str:
    """Return FSDP's lines. Wrapping replaces the parameters, so optimizers are made anew."""
    if not optimizers[0].exists:
        one = optimizers[0]
        return (
            f"{wrap_code}\noptimizer = {_class_text(one)}(model.parameters(){_options_text(one)})"
        )
    again = (
        '[{**group, "params": [params[names[param]] for param in group["params"]]}\n'
        "     for group in one.param_groups]"
    )
    if several:
        made = f"optimizers = [\n    type(one)({again})\n    for one in optimizers\n]"
    else:
        groups = again.replace("one.", "optimizer.").replace("     for", "    for")
        made = f"optimizer = {_class_text(optimizers[0])}(\n    {groups}\n)"
    return (
        "names = {param: name for name, param in model.named_parameters()}\n"
        f"{wrap_code}\n"
        "params = dict(model.named_parameters())\n"
        f"{made}"
    )


def _wrap_code(model: nn.Module, wrap_size: int) -> str:
    if model not in pick_by_size(model, wrap_size):  # such as attention, which is left whole
        return f"model = mh.{FSDP_NAME}(model)"
    return (
        f"with mh.enable_wrap(wrapper_cls=mh.{FSDP_NAME}, skip_params_check_for_root=True):\n"
        f"    model = mh.auto_wrap(model, min_num_params={wrap_size:_})"
    )


def _oss_code(one: PlannedOptimizer, size_option: str) -> str:
    return f"mh.OSS(model.parameters(), optim={_class_text(one)}{_options_text(one)}{size_option})"


def _class_text(one: PlannedOptimizer) -> str:
    name = one.kind.__name__
    return f"torch.optim.{name}" if getattr(torch.optim, name, None) is one.kind else name


def _options_text(one: PlannedOptimizer) -> str:
    """Return an optimizer's options as they are written after its parameters."""
    # The user's learning rate is not known here, so the code names it.
    rate = {} if "lr" not in inspect.signature(one.kind).parameters else {"lr": "lr"}
    texts = {**rate, **{key: repr(value) for key, value in one.arguments.items()}}
    return "".join(f", {key}={value}" for key, value in texts.items())


def _explain_layouts(optimizers: Sequence[PlannedOptimizer]) -> str:
    sentences = []
    for elementwise, text in (
        (True, "updates each element by itself: every worker owns an equal shard."),
        (False, "needs whole tensors: each parameter has one owner, assigned by size."),
    ):
        kinds = dict.fromkeys(one.kind for one in optimizers if one.elementwise is elementwise)
        sentences += [f"{kind.__name__} {text}" for kind in kinds]
    return " ".join(sentences)


def _explain_wraps(sizes: ModelSizes, wrap_size: int) -> str:
    number = sum(bool(wrap.params) for wrap in sizes.wraps)
    if number == 1:
        return f"{FSDP_NAME}: one wrap, around the model."
    return f"{FSDP_NAME}: {number:,} wraps, by auto_wrap(min_num_params={wrap_size:_})."


def _round_down(number: int) -> int:
    """Return the number with all digits but the first set to zero: easier to read in code."""
    power = 10 ** (len(str(number)) - 1)
    return number // power * power

"""Plan the training of a model: the four ways to do it on N workers, and the cheapest that fits.

Each way is a row: its bytes and collectives (`_costs.py`), the reason why it cannot be used, if
there is one, and the lines of code to paste (`_table.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._core.codec import Codec
from manyhands._core.encoded_slices import find_gradient_codec
from manyhands.planning._arguments import (
    BlockMethod,
    OneOptimizer,
    build_module,
    check_dtypes,
    find_method,
    find_rule,
    parse_optimizers,
)
from manyhands.planning._costs import blocks_cost, costs
from manyhands.planning._line import (
    LinePlan,
    PassPlan,
    parse_pass_seconds,
    parse_rate,
    parse_speed,
)
from manyhands.planning._model import (
    ForwardCosts,
    forward_costs,
    measure,
    replicated_entries,
    wrap_params,
    wrap_size_of,
)
from manyhands.planning._sizes import Cost, ModelSizes
from manyhands.planning._table import (
    Plan,
    Row,
    blocks_code,
    explain_layouts,
    explain_wraps,
    leanest,
    names_and_code,
    parse_bytes,
    wrap_code,
)

MOST_WORKERS = 2**13  # the search for a number of workers that would do ends here
BACKENDS = ("nccl", "gloo")


def plan(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: OneOptimizer | Sequence[Optimizer] = "adamw",
    workers: int = 8,
    *,
    memory: float | str | None = None,
    input: Tensor | Sequence[object] | Mapping[str, object] | None = None,
    backend: str = "nccl",
    bucket_size: int | None = None,
    codec: str | None = None,
    line: float | str | None = None,
    pass_seconds: float | None = None,
    speed: float | str | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    rule: str | type | None = None,
    blocks: str | type | None = None,
    **options: object,
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
        codec: the codec of sharded gradients: "int8", "int4" or "fp4", as for `ShardedDataParallel`
            and `FullyShardedDataParallel`.
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
    _check_numbers(workers, backend, bucket_size)
    budget = None if memory is None else parse_bytes(memory)
    line_plan = _parse_line(line, pass_seconds)
    _check_speed(speed, input, pass_seconds)
    check_dtypes(dtype=dtype, autocast=autocast)
    encoding = find_gradient_codec(codec)
    codec = None if encoding is None else codec
    module = build_module(model, dtype)
    optimizers = parse_optimizers(optimizer, options, module)
    rule_name = find_rule(rule, optimizer)
    method = find_method(blocks, optimizer)
    replicas = replicated_entries(optimizers) if rule_name == "AdamScale" else 0
    wrap_size = wrap_size_of(module)
    sizes = measure(module, optimizers, wrap_size)
    forward = None if input is None else forward_costs(module, input, autocast)
    compute = _time_of_a_pass(speed, forward)
    if line_plan is not None and compute is not None:
        line_plan = replace(line_plan, pass_seconds=compute.seconds)
    several = isinstance(optimizer, list | tuple)
    wraps = wrap_code(module, wrap_size, codec)
    names, codes = names_and_code(optimizers, several, bucket_size, codec, wraps)
    obstacle, gloo = wrapping_obstacle(module, wrap_size), backend == "gloo"
    ways = Ways(
        sizes, names, codes, obstacle, forward, budget, bucket_size, gloo, replicas, encoding
    )
    rows = ways.rows(workers)
    enough = ways.enough_workers(workers, rows)
    if method is not None:
        code = blocks_code(optimizers, several, method.name)
        rows = (*rows, ways.blocks_row(workers, method, code))
    return Plan(
        rows=rows,
        optimizer=" and ".join(dict.fromkeys(one.kind.__name__ for one in optimizers)),
        layout=explain_layouts(optimizers),
        wraps=explain_wraps(sizes, wrap_size),
        elements=sum(param.numel() for param in module.parameters()),
        workers=workers,
        memory=budget,
        enough=enough,
        line=line_plan,
        rule=rule_name,
        compute=compute,
        codec=codec,
    )


def _check_numbers(workers: int, backend: str, bucket_size: int | None) -> None:
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers must be a number of at least 1, got {workers!r}.")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
    if bucket_size is not None and bucket_size < 1:
        raise ValueError(f"bucket_size must be at least 1 element, got {bucket_size}.")


def _check_speed(speed: object, input: object, pass_seconds: float | None) -> None:
    if speed is not None and (input is None or pass_seconds is not None):
        raise ValueError(
            "speed says how long the operations of a pass take: give input as well, and leave "
            "pass_seconds out."
        )


def _time_of_a_pass(speed: float | str | None, forward: ForwardCosts | None) -> PassPlan | None:
    if speed is None or forward is None:
        return None
    return PassPlan(forward.operations, parse_speed(speed))


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


@dataclass(frozen=True)
class Ways:
    """The four ways to train one model, on any number of workers."""

    sizes: ModelSizes
    names: list[str]
    codes: list[str]
    fsdp_obstacle: str | None
    forward: ForwardCosts | None
    budget: int | None
    bucket_size: int | None
    gloo: bool
    replicas: int  # how many entries of the optimizer's state every worker needs whole
    codec: Codec | None  # of gradients that are sharded

    def rows(self, workers: int) -> tuple[Row, ...]:
        """Return a row for each way, the most sharded one last."""
        found = costs(self.sizes, workers, self.bucket_size, self.gloo, self.replicas, self.codec)
        # On one worker FSDP shards nothing, and so has no obstacle.
        obstacles = (None, None, None, self.fsdp_obstacle if workers > 1 else None)
        return tuple(map(self.row, self.names, found, self.codes, obstacles))

    def row(self, name: str, cost: Cost, code: str, obstacle: str | None = None) -> Row:
        """Return a way's costs as a row."""
        row = Row(
            name=name,
            parameters=cost.parameters,
            gradients=cost.gradients,
            optimizer=cost.optimizer,
            in_flight=cost.in_flight,
            buffers=self.sizes.buffers,
            activations=None if self.forward is None else self.forward.saved_bytes,
            sent=cost.sent,
            collectives=cost.collectives,
            fits=None,
            obstacle=obstacle,
            code=code,
            scaling=cost.replicas,
            blocks=cost.blocks,
            residuals=cost.residuals,
        )
        return row if self.budget is None else replace(row, fits=row.total <= self.budget)

    def blocks_row(self, workers: int, method: BlockMethod, code: str) -> Row:
        """Return the row of a method of blocks."""
        cost = blocks_cost(self.sizes, workers, method.every, method.memories)
        row = self.row(f"{method.name}, every={method.every}", cost, code)
        return replace(row, every=method.every)

    def enough_workers(self, workers: int, rows: Sequence[Row]) -> int | None:
        """Return the fewest workers on which the way that holds least fits, to 1 in 64, or None.

        It is None if a row fits on these workers, and if no number of workers was found. The number
        is doubled until it fits, then the gap to the last failure is halved.
        """
        if self.budget is None or any(row.available and row.fits for row in rows):
            return None
        low, high = workers, 2 * workers
        before, after = leanest(self.rows(low)), leanest(self.rows(high))
        while not after.fits:
            # What every worker holds whole is too much already: more workers do not change it.
            whole = after.total - after.gradients - after.optimizer - after.in_flight
            stuck = whole > self.budget and after.parameters == before.parameters
            if stuck or after.total >= before.total or high >= MOST_WORKERS:
                return None
            low, high = high, 2 * high
            before, after = after, leanest(self.rows(high))
        while high - low > max(1, low // 64):
            middle = (low + high) // 2
            if leanest(self.rows(middle)).fits:
                high = middle
            else:
                low = middle
        return high


def wrapping_obstacle(model: nn.Module, wrap_size: int | None) -> str | None:
    """Return the reason why FSDP cannot shard this model's parameters, or None.

    Without a `wrap_size` nothing is known about the wraps, which may have obstacles of their own.
    """
    for name, param in model.named_parameters():
        if param.dim() == 0:
            return f"{name} is a scalar, which cannot be divided; make it a tensor of one element."
        if not param.numel():
            return f"{name} has no elements."
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return f"{name or 'the model'} has sparse gradients; make it with sparse=False."
    for params, _ in [] if wrap_size is None else wrap_params(model, wrap_size):
        dtypes = dict.fromkeys(str(param.dtype) for param in params if param.requires_grad)
        if len(dtypes) > 1:
            return (
                f"parameters that would be in one wrap are {' and '.join(dtypes)}. "
                "Wrap the parameters of each dtype by themselves."
            )
    return None

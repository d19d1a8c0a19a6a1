"""Stand in for what a CPU lacks, run everything in float64, and make noise harmless.

CUDA devices become the CPU, NCCL becomes gloo, and nothing is compiled. Lower precisions become
float64, where rounding is a thousand million times smaller. Noise must not depend on how samples
are divided: dropout is off, and what is drawn for each sample is the same for every sample.
"""

import functools
import os
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

LOW = (torch.float32, torch.float16, torch.bfloat16)
DRAWS = ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like")
FILLS = (
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_",
)  # fmt: skip
GIVEN = {"poisson": 1, "_standard_gamma": 1, "_sample_dirichlet": 2}  # dimensions with samples
NORMAL = torch.Tensor.normal_
MADE = ("from_numpy", "as_tensor", "tensor", "load")  # of numbers that are not torch's


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function, in this process, by `around`, which gets it as its first argument."""
    original = getattr(owner, name)

    @functools.wraps(original, updated=())  # others read names and signatures
    def replaced(*args: Any, **named: Any) -> Any:
        return around(original, *args, **named)

    setattr(owner, name, replaced)


class Generator(torch.Generator):
    """One of the CPU, wherever it is asked for."""

    def __new__(cls, device: Any = None) -> "Generator":
        return super().__new__(cls)


class Machine(TorchFunctionMode):
    """See every call of torch: what asks for a GPU, or for a lower precision, gets what is here."""

    def __init__(self, float64: bool) -> None:
        super().__init__()
        self.float64 = float64
        self.watch: Callable[[Any, Any], tuple[Any, Any]] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory", "is_pinned"):
            return name != "is_pinned" and args[0]
        if self.float64 and name in ("float", "half", "bfloat16") and isinstance(args[0], Tensor):
            return args[0].double()
        args = tuple(self.here(a, "device" if name == "to" else "") for a in args)
        kwargs = {key: self.here(value, key) for key, value in (kwargs or {}).items()}
        if self.watch is not None:
            args, kwargs = self.watch(args, kwargs)
        result = func(*args, **kwargs)
        if self.float64 and name in MADE and isinstance(result, Tensor) and result.dtype in LOW:
            return result.double()
        return result

    def here(self, value: Any, key: str = "") -> Any:
        """Return the device or precision that is used in place of the one asked for."""
        if isinstance(value, str) and value.startswith("cuda"):
            return "cpu"
        if getattr(value, "type", "") == "cuda" or (key == "device" and type(value) is int):
            return torch.device("cpu")
        low = self.float64 and isinstance(value, torch.dtype) and value in LOW
        return torch.float64 if low else value


def patch(rank: int, world: int, float64: bool) -> Machine:
    """Replace what needs a GPU in this process, and return the mode that is now active."""
    mode = Machine(float64)
    module = torch.nn.Module
    parallel = torch.nn.parallel.DistributedDataParallel

    def to(move: Any, module: Any, *args: Any, **named: Any) -> Any:
        args = tuple(mode.here(value, "device") for value in args)
        return move(module, *args, **{key: mode.here(value) for key, value in named.items()})

    def ddp(begin: Any, self: Any, module: Any, *args: Any, **named: Any) -> None:
        named |= {} if args else {"device_ids": None}
        named |= {} if args[1:] else {"output_device": None}
        begin(self, module, *(None for _ in args[:2]), *args[2:], **named)

    for name in ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all"):
        setattr(torch.cuda, name, lambda *_, **__: None)  # one each: dynamo lists them
    wrap(torch.cuda, "current_device", lambda _: 0)
    wrap(module, "cuda", lambda _, module, *__, **___: module)
    wrap(module, "to", to)
    wrap(module, "compile", lambda *_, **__: None)
    wrap(torch, "load", lambda load, f, map_location=None, *a, **named: load(f, "cpu", *a, **named))
    wrap(torch, "compile", lambda _, model=None, *__, **___: model or (lambda function: function))
    wrap(parallel, "__init__", ddp)
    wrap(parallel, "_passing_sync_batchnorm_handle", lambda *_: None)  # refuses a CPU
    wrap(torch.nn.SyncBatchNorm, "forward", synchronized_norm)
    torch.Generator = Generator  # type: ignore[misc]
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if float64:
        off = {"device_type": "cpu", "dtype": torch.bfloat16, "enabled": False}
        wrap(torch.autocast, "__init__", lambda begin, self, *_, **__: begin(self, **off))
        torch.set_default_dtype(torch.float64)
        wrap(torch, "set_default_dtype", lambda *_: None)
        for name in ("float", "half", "bfloat16"):
            wrap(module, name, lambda _, module: module.double())
    _patch_groups(rank, world)
    mode.__enter__()
    return mode


def _patch_groups(rank: int, world: int) -> None:
    """Every group is gloo's, every mesh the CPU's, and a started process is this one."""
    address = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"  # which a script may change

    def init(begin: Any, backend: Any = None, *args: Any, **named: Any) -> None:
        named = {"timeout": named.get("timeout"), "init_method": address}
        begin("gloo", rank=rank, world_size=world, **named)

    def group(new: Any, ranks: Any = None, timeout: Any = None, *_: Any, **named: Any) -> Any:
        named = {key: value for key, value in named.items() if key not in ("backend", "device_id")}
        return new(ranks, timeout, "gloo", **named)

    def spawn(_: Any, function: Any, args: Any = (), nprocs: int = 1, *__: Any, **___: Any) -> None:
        if nprocs not in (0, world) and world > 1:
            raise ValueError(f"{nprocs} processes are started: check it with --ranks {nprocs}")
        function(rank, *(world if type(a) is int and a == nprocs else a for a in args))

    for owner in (dist, dist.distributed_c10d):
        wrap(owner, "init_process_group", init)
    wrap(dist, "new_group", group)
    for owner in (dist, dist.device_mesh):
        wrap(owner, "init_device_mesh", lambda mesh, _, *a, **named: mesh("cpu", *a, **named))
    wrap(torch.multiprocessing, "spawn", spawn)


def synchronized_norm(_: Any, module: Any, x: Tensor) -> Tensor:
    """Normalize with the statistics of all ranks, whose batches are of one size."""
    training = module.training or module.running_mean is None
    stored = module.weight, module.bias, module.running_mean, module.running_var
    rate = module.momentum or 0.1
    group = module.process_group or dist.group.WORLD
    parts = (x,)
    if training and dist.is_initialized():
        parts = all_gather(x.contiguous(), group)
    out = torch.native_batch_norm(torch.cat(parts), *stored, training, rate, module.eps)[0]
    return out.chunk(len(parts))[dist.get_rank(group) if len(parts) > 1 else 0]


class FrozenNoise:
    """What was switched off, and whether random numbers are frozen at the moment."""

    def __init__(self) -> None:
        self.frozen = 0  # how many frames ask for it
        self.step = 0
        self.used: set[str] = set()
        self.python: tuple[Any, Any] | None = None  # the script's own random states, while frozen

    def patch(self) -> None:
        for name in [name for name in dir(F) if "dropout" in name]:
            wrap(F, name, self._no_dropout)
        wrap(F, "scaled_dot_product_attention", self._attention)
        for name in (*DRAWS, *FILLS):
            wrap(torch.Tensor if name in FILLS else torch, name, self._draw)
        wrap(torch, "bernoulli", lambda _, p, **__: (torch.rand_like(p) < p).to(p.dtype))
        wrap(torch, "normal", self._normal)
        wrap(torch, "multinomial", self._multinomial)
        for name in GIVEN:
            wrap(torch, name, self._draw_rows)

    def freeze(self) -> None:
        """Draw the same for every sample and on every rank; also `random` and numpy do."""
        self.frozen = 1
        self.python = self.python or (random.getstate(), numpy.random.get_state())
        random.seed(self.step)
        numpy.random.seed(self.step)

    def thaw(self) -> None:
        """Draw what the script would, as its loaders have to."""
        self.frozen = 0
        if self.python is not None:
            random.setstate(self.python[0])
            numpy.random.set_state(self.python[1])
            self.python = None

    def _no_dropout(self, _: Any, input: Tensor, *args: Any, **named: Any) -> Tensor:
        if all(args[:2]) and named.get("p", 1) and named.get("training", True):
            self.used.add("dropout")
        return input

    def _attention(self, attention: Any, *args: Any, **named: Any) -> Tensor:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        named |= dict(zip(names, args, strict=False))
        if named.pop("dropout_p", 0.0):
            self.used.add("dropout")
        return attention(**named)

    def _freezes(self, named: dict[str, Any]) -> bool:
        """Whether a draw is made the same for every sample, which is noted."""
        frozen = self.frozen > 0 and named.get("generator") is None
        self.used |= {"noise"} if frozen else set()
        return frozen

    @contextmanager
    def _seeded(self, *what: Any) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(zlib.crc32(repr((self.step, *what)).encode()))
            yield

    def _draw(self, function: Any, *args: Any, **named: Any) -> Any:
        out = function(*args, **named)  # also moves the random state as it should
        if out.requires_grad or not self._freezes(named):
            return out
        name = function.__name__
        row = out[:1] if out.dim() else out
        if name == "randperm":
            return torch.arange(len(out), dtype=out.dtype)
        with torch.no_grad(), self._seeded(name, *row.shape):
            if name in ("randn", "randn_like"):  # where the first depend on how many there are
                row = NORMAL(torch.empty_like(row))
            elif name.endswith("_"):
                row = function(torch.empty_like(row), *args[1:], **named)
            else:
                row = function(*args, **named)[:1] if out.dim() else function(*args, **named)
            return out.copy_(row.expand_as(out))

    def _normal(self, normal: Any, mean: Any, std: Any = 1.0, *args: Any, **named: Any) -> Tensor:
        out = normal(mean, std, *args, **named)
        if self._freezes(named):
            with torch.no_grad():
                out.copy_(mean + std * torch.randn_like(out))
        return out

    def _multinomial(
        self, draw: Any, input: Tensor, num_samples: int, replacement: bool = False, **named: Any
    ) -> Tensor:
        out = draw(input, num_samples, replacement, **named)
        if self._freezes(named):  # the most probable
            out.copy_(input.topk(1 if replacement else num_samples).indices.expand_as(out))
        return out

    def _draw_rows(self, draw: Any, given: Tensor, **named: Any) -> Tensor:
        """Draw from each sample's own distribution, or from the one of all."""
        out = draw(given, **named)
        if not self._freezes(named):
            return out
        rows = []
        for row in given if given.dim() >= GIVEN[draw.__name__] else [given]:
            with self._seeded(draw.__name__):
                rows.append(draw(row))
        return torch.stack(rows).reshape(out.shape)

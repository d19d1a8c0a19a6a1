"""Replace GPUs, NCCL, compilation and low precisions in a process of a run.

The CPU replaces CUDA devices, gloo replaces NCCL, and functions are not compiled. float64 replaces
lower precisions, and reduces rounding by a factor of a billion.
"""

import functools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.overrides import TorchFunctionMode

from manyhands.tools.check._job import CheckedScript
from manyhands.tools.check._processes import Rank

LOW = (torch.float32, torch.float16, torch.bfloat16)
CASTS = ("float", "half", "bfloat16")
MADE = ("from_numpy", "as_tensor", "tensor", "load")  # make tensors from other data

ACCELERATOR = torch.device("cuda")  # a script may read the type


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function. `around` receives the original as first argument."""
    original = getattr(owner, name)

    @functools.wraps(original, updated=())  # libraries read names and signatures
    def replaced(*args: Any, **named: Any) -> Any:
        return around(original, *args, **named)

    setattr(owner, name, replaced)


def wrap_step(optimizer: Any, around: Callable[..., Any]) -> None:
    """Replace the step of an optimizer's class once."""
    kind: Any = type(optimizer)
    if not hasattr(kind.step, "of_check"):
        wrap(kind, "step", around)
        kind.step.of_check = True
        kind.step.hooked = True  # the original runs torch's hooks


def ignore(*_: Any, **__: Any) -> None:
    """Replace functions of GPUs that the CPU does not need."""


def unchanged(_: Any, value: Any, *__: Any, **___: Any) -> Any:
    """Return the first argument in place of a function's result."""
    return value


class Generator(torch.Generator):
    """A generator on the CPU for any device."""

    def __new__(cls, device: Any = None) -> "Generator":
        return super().__new__(cls)


class Machine(TorchFunctionMode):
    """Replaces devices and precisions in the arguments of every torch function."""

    def __init__(self, float64: bool) -> None:
        super().__init__()
        self.float64 = float64
        self.watch: Callable[[Any, Any], tuple[Any, Any]] | None = None  # may replace arguments
        self.note: Callable[[Any, Any], None] | None = None  # receives arguments and result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        if self.float64 and name in CASTS and isinstance(args[0], Tensor):
            return args[0].double()
        args, kwargs = self.replace_all(args, kwargs or {}, "device" if name == "to" else "")
        if self.watch is not None and name != "__set__":  # such as `p.grad = mean`
            args, kwargs = self.watch(args, kwargs)
        result = func(*args, **kwargs)
        if self.note is not None:
            self.note((args, kwargs), result)
        if self.float64 and name in MADE and isinstance(result, Tensor) and result.dtype in LOW:
            return result.double()
        return result

    def replace_all(self, args: Any, named: Any, key: str) -> tuple[Any, Any]:
        """Replace devices and precisions. Positional arguments get the keyword `key`."""
        args = [self.replace(value, key) for value in args]
        named = {name: self.replace(value, name) for name, value in named.items()}
        return args, named

    def replace(self, value: Any, key: str) -> Any:
        if isinstance(value, str) and value.startswith("cuda"):
            return "cpu"
        if getattr(value, "type", "") == "cuda" or (key == "device" and type(value) is int):
            return torch.device("cpu")
        if self.float64 and isinstance(value, torch.dtype) and value in LOW:
            return torch.float64
        return value


def patch(rank: Rank, job: CheckedScript) -> Machine:
    """Replace everything that needs a GPU, and return the active mode."""
    mode = Machine(job.float64)
    module = torch.nn.Module
    parallel = torch.nn.parallel.DistributedDataParallel

    def zero(_: Any) -> int:
        return 0

    def to(move: Any, module: Any, *args: Any, **named: Any) -> Any:
        args, named = mode.replace_all(args, named, "device")
        return move(module, *args, **named)

    def load(load: Any, file: Any, map_location: Any = None, *args: Any, **named: Any) -> Any:
        return load(file, "cpu", *args, **named)

    def compiled(_: Any, model: Any = None, *__: Any, **___: Any) -> Any:
        return model or functools.partial(unchanged, None)  # a decorator, if no model is given

    def ddp(
        begin: Any, self: Any, module: Any, device_ids: Any = None, output_device: Any = None,
        *args: Any, **named: Any,
    ) -> None:  # fmt: skip
        begin(self, module, None, None, *args, **named)

    def fork_rng(fork: Any, _: Any = None, enabled: bool = True, *__: Any, **___: Any) -> Any:
        return fork([], enabled)  # no other device has random numbers

    wrap(torch.random, "fork_rng", fork_rng)
    _patch_accelerators(rank, job)
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all"):
        wrap(torch.cuda, name, ignore)
    wrap(torch.cuda, "current_device", zero)
    wrap(torch.accelerator, "current_device_index", zero)
    wrap(module, "cuda", unchanged)
    wrap(module, "to", to)
    wrap(module, "compile", ignore)
    wrap(torch, "load", load)
    wrap(torch, "compile", compiled)
    wrap(parallel, "__init__", ddp)
    wrap(parallel, "_passing_sync_batchnorm_handle", ignore)  # requires a GPU
    wrap(torch.nn.SyncBatchNorm, "forward", synchronized_norm)
    torch.Generator = Generator  # type: ignore[misc]
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if job.float64:
        _patch_precision()
    _patch_groups(rank)
    mode.__enter__()
    return mode


def _patch_accelerators(rank: Rank, job: CheckedScript) -> None:
    """Simulate GPUs on the CPU, and note questions for GPUs.

    Libraries get the true answer.
    """
    count = job.accelerators
    folder = str(job.folder)  # before the script changes the working folder

    def is_script() -> bool:
        """Return whether the script, not a library, called the replaced function."""
        asks = sys._getframe(3).f_code.co_filename.startswith(folder)
        if asks:
            (rank.out / "asked").touch()
        return asks

    def is_available(ask: Any, *args: Any) -> bool:
        return (is_script() and count > 0) or ask(*args)

    def device_count(ask: Any) -> int:
        return count if is_script() and count else ask()

    def current(ask: Any, *args: Any, **named: Any) -> Any:
        return ACCELERATOR if is_script() and count else ask(*args, **named)

    for owner in (torch.cuda, torch.accelerator):
        wrap(owner, "is_available", is_available)
        wrap(owner, "device_count", device_count)
    wrap(torch.accelerator, "current_accelerator", current)
    if count:
        for name in ("set_device_index", "set_device_idx", "synchronize"):
            wrap(torch.accelerator, name, ignore)


def _patch_precision() -> None:
    """Replace lower precisions by float64, and switch autocast off."""

    def disabled(begin: Any, self: Any, *_: Any, **__: Any) -> None:
        begin(self, device_type="cpu", dtype=torch.bfloat16, enabled=False)

    def double(_: Any, module: Any) -> Any:
        return module.double()

    def unscaled(begin: Any, self: Any, *_: Any, **__: Any) -> None:
        begin(self, "cpu", enabled=False)

    torch.set_default_dtype(torch.float64)
    wrap(torch, "set_default_dtype", ignore)
    wrap(torch.autocast, "__init__", disabled)
    wrap(torch.amp.GradScaler, "__init__", unscaled)  # scales only float32
    for name in CASTS:
        wrap(torch.nn.Module, name, double)


def _patch_groups(rank: Rank) -> None:
    """Replace groups, meshes and spawned processes."""
    world = rank.world

    def init(begin: Any, *_: Any, timeout: Any = None, **__: Any) -> None:
        # The parent has opened the port, which no other program can take.
        listener = os.dup(rank.listener) if rank.number == 0 else None
        store = dist.TCPStore(
            "127.0.0.1",
            rank.port,
            world,
            is_master=rank.number == 0,
            multi_tenant=True,  # a script may make the group again
            master_listen_fd=listener,
        )
        begin("gloo", None, timeout, world, rank.number, store)

    def group(
        new: Any, ranks: Any = None, timeout: Any = None, backend: Any = None, *_: Any,
        device_id: Any = None, **named: Any,
    ) -> Any:  # fmt: skip
        return new(ranks, timeout, "gloo", **named)

    def mesh(new: Any, device_type: str, *args: Any, **named: Any) -> Any:
        return new("cpu", *args, **named)

    def spawn(_: Any, function: Any, args: Any = (), nprocs: int = 1, *__: Any, **___: Any) -> None:
        if nprocs == 1 and world > 1:
            raise ValueError(
                f"the script spawns 1 process, but the check requires {world}. "
                "Set the number of processes with an option of the script."
            )
        if nprocs not in (0, world) and world > 1:
            raise ValueError(f"the script spawns {nprocs} processes. Give --ranks {nprocs}.")
        # In a replay, an argument may be the number of processes.
        function(rank.number, *(world if type(a) is int and a == nprocs else a for a in args))

    for owner in (dist, dist.distributed_c10d):
        wrap(owner, "init_process_group", init)
    wrap(dist, "new_group", group)
    for owner in (dist, dist.device_mesh):
        wrap(owner, "init_device_mesh", mesh)
    wrap(torch.multiprocessing, "spawn", spawn)


def accept_any_devices() -> None:
    """Let Lightning run on a single rank with any number of devices."""
    for package in ("lightning.fabric", "lightning_fabric"):
        with suppress(ImportError):
            environments = import_module(f"{package}.plugins.environments")
            environments.TorchElasticEnvironment.validate_settings = ignore


def synchronized_norm(_: Any, module: Any, x: Tensor) -> Tensor:
    """Normalize with the statistics of all ranks, for equal batch sizes."""
    training = module.training or module.running_mean is None
    stored = (module.weight, module.bias, module.running_mean, module.running_var)
    momentum = module.momentum or 0.1
    if not (training and dist.is_initialized()):
        return torch.native_batch_norm(x, *stored, training, momentum, module.eps)[0]
    group = module.process_group or dist.group.WORLD
    parts = all_gather(x.contiguous(), group)
    out = torch.native_batch_norm(torch.cat(parts), *stored, training, momentum, module.eps)[0]
    first = dist.get_rank(group) * len(x)
    return out[first : first + len(x)]  # not of chunk(), which forbids changes in place

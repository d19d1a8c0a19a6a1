"""What FullyShardedDataParallel refuses, before it is wrong.

**Before anything is sharded or sent**: modules, parameters and groups that cannot be wrapped, and
ranks that do not agree.

**At an optimizer's first step**: optimizers that cannot train sharded parameters.

    made before wrapping     the optimizer holds plain parameters, which the model no longer uses
    needs full tensors       the optimizer calls functions that DTensors do not have, or that give
                             another result on a slice

torch calls a hook of ours before the step of any optimizer in the process; each optimizer is
checked once. A class that is not torch's is tried on a small example, sharded and not: the results
must agree.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adafactor, Muon, Optimizer, Rprop, SparseAdam
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from manyhands._core.agreement import agree
from manyhands._core.modules import check_not_averaged_inside, plain_name
from manyhands._core.ranks import RankGroup
from manyhands._core.sharded import is_dtensor
from manyhands.sharding.fsdp._full_tensors import to_full
from manyhands.sharding.fsdp._places import Places, named_params

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

REPLACED, SHARDED = "_manyhands_replaced", "_manyhands_sharded"
NEED_WHOLE = (Adafactor, Muon, Rprop, SparseAdam)

# The number of parameters with which an optimizer was checked; add_param_group() changes it.
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_problems: dict[type, str | None] = {}  # by class; None: it works
_hook: list[RemovableHandle] = []  # the handle of the hook, once there is one


def check_module(
    module: object, wrapper: type[nn.Module], wrapped: Container[nn.Module] = ()
) -> None:
    """Raise a TypeError if a module cannot be wrapped. `wrapped` are modules in a wrap already."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"FullyShardedDataParallel needs a torch.nn.Module, got {type(module).__name__}."
        )
    check_not_averaged_inside(module)
    if isinstance(module, wrapper):
        raise TypeError("the module is wrapped already; wrap it once, or a larger one around it.")
    if module in wrapped:
        raise TypeError(
            f"this {type(module).__name__} is in a FullyShardedDataParallel already, and is "
            "sharded in place: a second wrap around it would not shard it again. Use the first "
            "wrap, wrap a larger module around that, or build the module again."
        )
    # The engine gathers in a hook of forward, and a container such as ModuleList has none.
    if type(module).forward is nn.Module.forward:
        raise TypeError(
            f"a {type(module).__name__} has no forward in which its parameters could be gathered. "
            "Wrap its members, or the module that runs them."
        )


def check_parameters(places: Places, ranks: RankGroup) -> None:
    """Raise a ValueError if the parameters at these places cannot be sharded together."""
    trained: dict[torch.dtype, str] = {}  # the first trained parameter of each type
    for name, param in named_params(places):
        if is_dtensor(param):
            raise ValueError(
                f"parameter {name} is sharded already (a DTensor, as fully_shard or tensor "
                "parallelism makes them). Wrap the plain module."
            )
        # An inner wrap has marked the plain parameter that it replaced by a sharded one.
        if getattr(param, REPLACED, False):
            raise ValueError(
                f"parameter {name} is tied to one that a wrap inside has sharded already, and the "
                "two would be trained apart. Put one wrap around all modules that share the "
                "parameter, instead of wrapping each."
            )
        if ranks.size > 1 and (param.dim() == 0 or param.numel() == 0):
            raise ValueError(
                f"parameter {name} has the shape {tuple(param.shape)}, which cannot be divided "
                "among ranks. Make a scalar a vector of one element "
                "(torch.nn.Parameter(p.view(1))), and remove empty parameters."
            )
        if param.requires_grad:
            trained.setdefault(param.dtype, name)
    # The engine reduces a wrap's gradients in one buffer, which has one type.
    if len(trained) > 1:
        listed = ", ".join(f"{name} is {dtype}" for dtype, name in trained.items())
        raise ValueError(
            f"the parameters of one wrap must be of one type, and {listed}. Wrap the modules of "
            "one type separately, or convert the module; mixed_precision=True computes in a "
            "smaller type and keeps the parameters."
        )


def check_inner_groups(ranks: RankGroup, inside: Sequence[RankGroup]) -> None:
    """Raise a ValueError if an inner wrap has other ranks, unless each rank is in its own group."""
    own = _members(ranks)
    for inner in inside:
        if inner.size > 1 and _members(inner) != own:
            raise ValueError(
                f"a wrap inside has {_describe_ranks(inner)}, and the one around it "
                f"{_describe_ranks(ranks)}. Give all wraps of a model the same process_group; only "
                "a group of one may be inside another, for parameters that each rank trains by "
                "itself."
            )


def _members(ranks: RankGroup) -> list[int] | None:
    # A group of one, or a stand-in for it, has no rank numbers to compare.
    return None if ranks.size == 1 else ranks.ranks


def _describe_ranks(ranks: RankGroup) -> str:
    members = _members(ranks)
    return "one rank" if members is None else f"the ranks {members}"


def check_root(ranks: RankGroup, were_roots: Sequence[bool | None]) -> None:
    """Raise a RuntimeError if a wrap inside has run as a root before."""
    # The engine fixes its root in the first forward, and has no way to change it.
    if any(were_roots) and ranks.size > 1:
        raise RuntimeError(
            "a wrap inside this one has run by itself before, as the outermost. Run the outermost "
            "wrap's forward first; afterwards inner wraps may run by themselves, too."
        )


def check_same_model(
    ranks: RankGroup,
    wraps: Sequence[tuple[Places, Mapping[str, object]]],
    device: torch.device,
    modules: Mapping[str, nn.Module] = MappingProxyType({}),
) -> None:
    """Raise a ValueError on every rank if ranks have different models or options.

    `wraps` are the places and options of each wrap. The buffers of `modules` are compared, too.
    """
    buffers = {
        plain_name(f"{path}.{name}" if path else name): buffer
        for path, module in modules.items()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    facts: dict[str, object] = {"numbers of wraps": len(wraps)}
    for number, (places, options) in enumerate(wraps):
        facts[f"parameters in wrap {number}"] = {
            name: f"{tuple(t.shape)} {t.dtype}{_describe_kind(t)}"
            for name, t in [*named_params(places), *buffers.items()]
        }
        facts[f"options in wrap {number}"] = {
            # Each rank may have its own GPU, so only the kind of device is compared.
            name: value.type if isinstance(value, torch.device) else str(value)
            for name, value in options.items()
        }
    advice = "Build the same model with the same options on every rank."
    agree(ranks, facts, advice, device=device)


def _describe_kind(tensor: Tensor) -> str:
    meta = " without memory" if tensor.is_meta else ""
    frozen = " frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return meta + frozen


# -- optimizers, at their first step ---------------------------------------------------------------


def guard_optimizers(before: Iterable[Tensor], after: Iterable[Tensor]) -> None:
    """Mark parameters that were replaced by sharded ones, and check optimizers from now on.

    `before` are the plain parameters, `after` the sharded ones.
    """
    # Marked on the tensors: an optimizer has no other link to the model.
    for param in before:
        setattr(param, REPLACED, True)
    for param in after:
        setattr(param, SHARDED, True)
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_check_at_step))


def _check_at_step(optimizer: Optimizer, *_: object) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if _checked.get(optimizer) == len(params):
        return
    if any(getattr(param, REPLACED, False) for param in params):
        raise RuntimeError(
            f"this {type(optimizer).__name__} was made before the model was wrapped, and holds "
            "parameters that the model no longer uses. Make it after wrapping, from "
            "model.parameters()."
        )
    if any(getattr(param, SHARDED, False) for param in params):
        _check_class(optimizer, next(p for p in params if is_dtensor(p)))
    _checked[optimizer] = len(params)


def _check_class(optimizer: Optimizer, like: DTensor) -> None:
    kind = type(optimizer)
    if isinstance(optimizer, LBFGS):
        raise TypeError(
            "LBFGS works on all parameters as one vector, and cannot train sharded ones. Train "
            "without sharding, or with another optimizer."
        )
    check_takes_dense_gradients(kind)
    # Ours check their own parameters when they are made.
    if kind.__module__.startswith("manyhands."):
        return
    if kind not in _problems:
        _problems[kind] = _problem_with(optimizer, like)
    problem = _problems[kind]
    if problem is not None:
        raise TypeError(
            f"{kind.__name__} cannot train parameters that FullyShardedDataParallel has sharded: "
            f"{problem}. Use manyhands.WholeTensorOptimizer(model.parameters(), "
            f"optim={kind.__name__}, ...), which gives each full tensor to one rank."
        )


def check_takes_dense_gradients(kind: type[Optimizer]) -> None:
    """Raise a TypeError for an optimizer of sparse gradients only."""
    if issubclass(kind, SparseAdam):
        raise TypeError(
            "SparseAdam needs sparse gradients, and those of parameters that "
            "FullyShardedDataParallel has sharded are dense. Use Adam."
        )


def _problem_with(optimizer: Optimizer, like: DTensor) -> str | None:
    """Return why a class cannot work on DTensors, or None.

    The example sends, so every rank must call this at the same step.
    """
    if isinstance(optimizer, NEED_WHOLE):
        return "it needs full tensors"
    if type(optimizer).__module__.startswith("torch.optim."):
        return None
    try:
        plain = _run_example(optimizer, like, sharded=False)
    except Exception:
        return None  # it cannot be made from its defaults, so it cannot be tried
    try:
        sharded = _run_example(optimizer, like, sharded=True)
    except Exception as error:
        return f"on a small example it raised {type(error).__name__}"
    same = torch.allclose(sharded, plain, rtol=1e-3, atol=1e-5)
    return None if same else "on a small example its steps differ from those with full tensors"


def _run_example(optimizer: Optimizer, like: DTensor, *, sharded: bool) -> Tensor:
    """Run two steps of such an optimizer on a small matrix, and return the matrix in full."""
    # Two rows of three for each rank, so that no slice is empty.
    elements = 6 * like.device_mesh.size()
    param = torch.linspace(-1, 1, elements, dtype=like.dtype, device=like.device).view(-1, 3)
    grad = param.sin() + param.square()
    if sharded:
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = like.device_mesh, like.placements
        param = distribute_tensor(param, mesh, placements, src_data_rank=None)
        grad = distribute_tensor(grad, mesh, placements, src_data_rank=None)
    matrix = torch.nn.Parameter(param)
    example = type(optimizer)([matrix], **optimizer.defaults)
    for _ in range(2):  # the second step uses the state that the first has made
        matrix.grad = grad.clone()
        example.step()
    return to_full(matrix.detach())

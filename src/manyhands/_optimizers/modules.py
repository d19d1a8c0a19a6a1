"""Find the modules around a model, and the modules of a parameter.

Wrappers add a name to the names of a model's parameters: `module.` (data
parallelism), `_orig_mod.` (torch.compile), `_fsdp_wrapped_module.` (FSDP),
`_checkpoint_wrapped_module.` (activation checkpointing). The plain model has none of them.

An optimizer does not know its modules. What needs them searches Python's garbage collector, which
is slow: at construction, or when an error is likely.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from manyhands._arguments import instance
from manyhands._optimizers.foreign import advice
from manyhands._optimizers.uneven import refuse_join
from manyhands._optimizers.wrappers import YieldingProperty

INNER = "_fsdp_wrapped_module"  # in names of parameters; torch's own tools know it, and drop it
CHECKPOINTED = "_checkpoint_wrapped_module"  # torch's wrapper takes it out of its state dict

# No user's module has these names, so they are left out wherever they occur. `module` may be a
# user's name as well, and is left out only below the classes of wrappers.
WRAPPER_NAMES = ("_orig_mod", CHECKPOINTED, INNER)
TORCH_WRAPPERS = (DistributedDataParallel, nn.DataParallel)
NAMED = 4  # tensors that a message names


class ModuleWrapper(nn.Module):
    """Base class of our modules around a model. It does not change names in the model."""

    inner_name: ClassVar[str] = "module"  # of the model, among this module's children
    averages_gradients: ClassVar[bool] = False  # of the whole parameters, as DDP does

    @YieldingProperty
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """Refuse `DistributedDataParallel`, which asks for this before its first collective."""
        asks = sys._getframe(2).f_locals.get("self")  # copy, compilers and users ask, too
        if isinstance(asks, DistributedDataParallel) and dist.get_world_size() > 1:
            raise inside_ddp(self)
        raise AttributeError("only DistributedDataParallel is refused")

    def join_hook(self, **kwargs: object) -> NoReturn:
        """Refuse torch's `Join`, which calls this when it is made."""
        raise refuse_join(type(self).__name__)

    def check_can_save(self, model: nn.Module) -> None:
        """Raise if a checkpoint could not hold the parameters of `model`, which has this inside."""


def inside_ddp(module: nn.Module) -> RuntimeError:
    """Return the error for a module that averages gradients itself."""
    return RuntimeError(
        f"{type(module).__name__} is inside DistributedDataParallel, so gradients would be averaged"
        f" twice. Use one of the two.{advice('no DDP')}"
    )


def plain_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with its plain prefix; a shared module comes once for each of its names."""
    yield prefix, module
    left_out: tuple[str, ...] = WRAPPER_NAMES
    if isinstance(module, ModuleWrapper):
        left_out += (module.inner_name,)
    elif isinstance(module, TORCH_WRAPPERS):
        left_out += ("module",)
    for name, child in module._modules.items():
        if child is not None and name in left_out:
            yield from plain_modules(child, prefix)
        elif child is not None:
            yield from plain_modules(child, f"{prefix}{name}.")


def plain_name(name: str, wrappers: tuple[str, ...] = (CHECKPOINTED, INNER)) -> str:
    """Return the name of a parameter without the names of these wrappers."""
    for wrapper in wrappers:
        name = name.replace(f"{wrapper}.", "")
    return name


def check_not_averaged_inside(module: nn.Module) -> None:
    """Raise a TypeError if a module that averages gradients is inside, or if it is no module."""
    for inside in instance("module", module, nn.Module, "a torch.nn.Module").modules():
        ours = isinstance(inside, ModuleWrapper) and inside.averages_gradients
        if ours or isinstance(inside, DistributedDataParallel):
            raise TypeError(
                f"the module contains a {type(inside).__name__} already: gradients would be "
                "averaged twice. Wrap the bare module."
            )


def check_has_memory(module: nn.Module) -> None:
    """Raise a RuntimeError if tensors are on the meta device, where nothing can be trained."""
    on_meta = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            on_meta.append(plain_name(name, WRAPPER_NAMES))
    if on_meta:
        named = ", ".join(on_meta[:NAMED])
        if len(on_meta) > NAMED:
            named += f" and {len(on_meta) - NAMED} more"
        raise RuntimeError(
            f"{named} of the model: on the meta device, without memory. "
            'Call mh.load_weights(model, path), or model.to_empty(device="cpu") and initialize it. '
            "Do so before levels 0 to 2 of mh.shard, or after level 3."
        )


def modules_holding(
    params: Sequence[Tensor], wanted: Callable[[nn.Module], bool] = lambda module: True
) -> Iterator[tuple[nn.Module, set[int]]]:
    """Yield every live module with any of these parameters, and the indices of those it has."""
    # Only `wanted` modules are looked into. Modules of before `gc.freeze()` are not found.
    index_of = {id(param): index for index, param in enumerate(params)}
    for thing in gc.get_objects():
        # type(thing), because isinstance() asks `__class__`, which runs a lazy proxy's code.
        if not issubclass(type(thing), nn.Module) or "_parameters" not in thing.__dict__:
            continue
        if wanted(thing):
            found = index_of.keys() & map(id, thing.parameters())
            if found:
                yield thing, {index_of[each] for each in found}


class ParallelModules:
    """The `DistributedDataParallel` modules around some parameters, found at the first use."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._found: list[weakref.ref[nn.Module]] | None = None  # None: not searched yet

    def _live(self) -> Iterator[nn.Module]:
        if self._found is None:
            found = modules_holding(
                self._params, lambda module: isinstance(module, DistributedDataParallel)
            )
            self._found = [weakref.ref(module) for module, _ in found]
        for reference in self._found:
            module = reference()
            if module is not None:
                yield module

    @property
    def in_no_sync(self) -> bool:
        """Whether any of them leaves the pass under way unaveraged."""
        return any(not module.require_backward_grad_sync for module in self._live())

    def check_not_joined(self, name: str) -> None:
        """Raise inside `Join`, where ranks without data would not take part in a step."""
        for module in self._live():
            # torch has no public way to ask for this, and does not clear it after the `with` block.
            join: Any = getattr(module, "_join_config", None)
            if join is not None and join.enable and not join.throw_on_early_termination:
                raise refuse_join(name)

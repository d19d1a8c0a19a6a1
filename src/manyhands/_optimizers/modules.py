"""Find the wrappers of a model and the modules of a parameter.

Wrappers insert a name into the names of a model's parameters: `module.` (data parallelism),
`_orig_mod.` (torch.compile), `_fsdp_wrapped_module.` (FSDP), `_checkpoint_wrapped_module.`
(activation checkpointing). The plain model has none of these names.

Searches for the modules of an optimizer use the garbage collector, which is slow, so they take
place at construction or for a likely error.
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
from manyhands._optimizers.wrappers import YieldingProperty, refuse_join

INNER = "_fsdp_wrapped_module"  # torch's tools remove this name from names of parameters
CHECKPOINTED = "_checkpoint_wrapped_module"  # torch's wrapper removes this name in state dicts

# No user's module has these names. `module` can be a user's name.
WRAPPER_NAMES = ("_orig_mod", CHECKPOINTED, INNER)
TORCH_WRAPPERS = (DistributedDataParallel, nn.DataParallel)


class ModuleWrapper(nn.Module):
    """Base class of our modules around a model. Subclasses preserve the model's names."""

    inner_name: ClassVar[str] = "module"  # name of the model among this module's children
    averages_gradients: ClassVar[bool] = False  # of full parameters, as DDP does

    @YieldingProperty
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """Reject `DistributedDataParallel`, which reads this before any collective."""
        asks = sys._getframe(2).f_locals.get("self")  # copy, compilers and users may read it too
        if isinstance(asks, DistributedDataParallel) and dist.get_world_size() > 1:
            raise inside_ddp(self)
        raise AttributeError("only DistributedDataParallel is rejected")

    def join_hook(self, **kwargs: object) -> NoReturn:
        """Reject torch's `Join`."""
        raise refuse_join(type(self).__name__)

    def check_can_save(self, model: nn.Module) -> None:
        """Raise if a checkpoint cannot save `model`, which contains this module."""


def inside_ddp(module: nn.Module) -> RuntimeError:
    return RuntimeError(
        f"{type(module).__name__} is inside DistributedDataParallel, so gradients would be averaged"
        f" twice. Use one of the two.{advice('no DDP')}"
    )


def plain_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with the plain prefix; shared modules under each name."""
    yield prefix, module
    left_out: tuple[str, ...] = WRAPPER_NAMES
    if isinstance(module, ModuleWrapper):
        left_out += (module.inner_name,)
    elif isinstance(module, TORCH_WRAPPERS):
        left_out += ("module",)
    for name, child in module._modules.items():
        if child is not None:
            yield from plain_modules(child, prefix if name in left_out else f"{prefix}{name}.")


def plain_name(name: str, wrappers: tuple[str, ...] = (CHECKPOINTED, INNER)) -> str:
    for wrapper in wrappers:
        name = name.replace(f"{wrapper}.", "")
    return name


def check_not_averaged_inside(module: nn.Module) -> None:
    """Raise a TypeError if a module inside averages gradients."""
    for inside in instance("module", module, nn.Module, "a torch.nn.Module").modules():
        ours = isinstance(inside, ModuleWrapper) and inside.averages_gradients
        if ours or isinstance(inside, DistributedDataParallel):
            raise TypeError(
                f"the module contains a {type(inside).__name__} already: gradients would be "
                "averaged twice. Wrap the bare module."
            )


def check_has_memory(module: nn.Module) -> None:
    on_meta = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            on_meta.append(plain_name(name, WRAPPER_NAMES))
    if on_meta:
        raise RuntimeError(
            f"{len(on_meta)} tensors of the model, such as {on_meta[0]}, are on the meta device, "
            'which has no memory. Call mh.load_weights(model, path), or model.to_empty(device="cpu"'
            ") and initialize it, before levels 0 to 2 of mh.shard or after level 3."
        )


def modules_holding(
    params: Sequence[Tensor], wanted: Callable[[nn.Module], bool] = lambda module: True
) -> Iterator[tuple[nn.Module, set[int]]]:
    """Yield every existing module with some of these parameters, with the indices."""
    # Modules created before `gc.freeze()` are not found.
    index_of = {id(param): index for index, param in enumerate(params)}
    for thing in gc.get_objects():
        # type(thing), because isinstance() reads `__class__`, which runs the code of lazy proxies.
        if not issubclass(type(thing), nn.Module) or "_parameters" not in thing.__dict__:
            continue
        if wanted(thing):
            found = index_of.keys() & map(id, thing.parameters())
            if found:
                yield thing, {index_of[each] for each in found}


class ParallelModules:
    """The `DistributedDataParallel` modules around parameters, found at the first use."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._found: list[weakref.ref[nn.Module]] | None = None

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
        return any(not module.require_backward_grad_sync for module in self._live())

    def check_not_joined(self, name: str) -> None:
        """Raise inside `Join`, where ranks without data would not take part in a step."""
        for module in self._live():
            # Private, and not reset after the `with` block.
            join: Any = getattr(module, "_join_config", None)
            if join is not None and join.enable and not join.throw_on_early_termination:
                raise refuse_join(name)

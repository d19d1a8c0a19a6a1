"""Wrap modules of a model with shared options.

`enable_wrap` sets the wrapper and options, `wrap` wraps a module, and `auto_wrap` wraps the modules
that a policy selects. A policy is a function that returns whether to visit the submodules of a
module (`recurse=True`) or whether to wrap the module (`recurse=False`). `pick_modules` asks the
policy top-down and then bottom-up, before the model changes.

(`torch.distributed.fsdp.wrap` has no `auto_wrap` and no nested contexts, and separates tied
parameters.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from manyhands.sharding.fsdp._places import children
from manyhands.sharding.fsdp._wrapper import FullyShardedDataParallel

Policy: TypeAlias = Callable[..., bool]
Classes: TypeAlias = Collection[type[nn.Module]]
Wrapper: TypeAlias = Callable[..., nn.Module]
Options: TypeAlias = Mapping[str, Any]  # keyword arguments of a wrapper


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool,
    min_num_params: float = int(1e8),
    force_leaf_modules: Classes | None = None,
    exclude_wrap_modules: Classes | None = None,
    skip_params_check_for_root: bool = False,
) -> bool:
    """The policy by size: wrap modules with enough parameters outside of wrappers.

    >>> import torch.nn as nn, manyhands as mh
    >>> from manyhands.fairscale import default_auto_wrap_policy
    >>> layer = nn.Linear(10, 10)  # 110 parameters
    >>> about = {"module": layer, "recurse": False, "module_is_root": False}
    >>> default_auto_wrap_policy(**about, unwrapped_params=110, min_num_params=100)
    True

    Args:
        module: the module to decide about. `auto_wrap` passes the first four arguments; pass the
            remaining arguments to `auto_wrap` or `enable_wrap`.
        recurse: True to decide whether to visit submodules, False whether to wrap the module.
        unwrapped_params: the module's number of parameters, without parameters in wrappers.
        module_is_root: whether `auto_wrap` was called with this module.
        min_num_params: the smallest number of parameters to wrap.
        force_leaf_modules: classes to leave alone, with all submodules; default: attention, which
            reads the weights of a submodule without calling the submodule.
        exclude_wrap_modules: classes to visit but not wrap; default: containers without `forward`.
        skip_params_check_for_root: wrap the root even if too few parameters remain.
    """
    policy: Any = default_auto_wrap_policy  # users may change the sets
    large = unwrapped_params >= min_num_params
    if recurse:
        leaves = policy.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
        return large and not isinstance(module, tuple(leaves))
    kept = policy.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    wanted = large or (module_is_root and skip_params_check_for_root)
    return wanted and not isinstance(module, tuple(kept))


default_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
default_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Scope:
    """The settings of all open `enable_wrap` contexts."""

    wrapper_cls: Wrapper
    policy: Policy
    options: Options

    def changed(
        self, policy: Policy | Classes | None, given: Options
    ) -> tuple[_Scope, dict[str, Any]]:
        """Return changed settings, and the options for the wrapper."""
        chosen = self.policy
        if policy is not None:
            chosen = _as_policy(policy)
        options = dict(given)
        wrapper_cls = options.pop("wrapper_cls", None) or self.wrapper_cls
        theirs = _keywords_of(wrapper_cls)
        of_policy = _keywords_of(chosen)
        bound = {name: options.pop(name) for name in of_policy & options.keys()}
        # The call would raise only for a module that is large enough to wrap.
        unknown = options.keys() - theirs
        if unknown and "**" not in theirs:
            raise TypeError(
                f"neither the wrapper nor the policy takes {', '.join(sorted(unknown))}. The "
                f"policy takes {', '.join(sorted(of_policy)) or 'no options'}."
            )
        return _Scope(wrapper_cls, partial(chosen, **bound), self.options), options

    def wrap(self, module: nn.Module, overrides: Options) -> nn.Module:
        """Wrap a module. `overrides` win over `module.wrapper_config`, which wins over the
        scope."""
        own = {**getattr(module, "wrapper_config", {}), **overrides}
        wrapper_cls = own.pop("wrapper_cls", self.wrapper_cls)
        return wrapper_cls(module, **{**self.options, **own})


def in_scope() -> bool:
    return _SCOPE.get() is not None


# Threads and asyncio tasks have separate settings.
_SCOPE: ContextVar[_Scope | None] = ContextVar("enable_wrap", default=None)


@contextmanager
def enable_wrap(
    auto_wrap_policy: Policy | Classes | None = None, **wrapper_kwargs: Any
) -> Iterator[None]:
    """Let `wrap` and `auto_wrap` wrap inside; outside they return the module unchanged.

    `manyhands.fairscale.enable_wrap` describes the arguments.
    """
    outer = _SCOPE.get() or _Scope(FullyShardedDataParallel, default_auto_wrap_policy, {})
    scope, options = outer.changed(auto_wrap_policy, wrapper_kwargs)
    token = _SCOPE.set(_Scope(scope.wrapper_cls, scope.policy, {**outer.options, **options}))
    try:
        yield
    finally:
        _SCOPE.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap a module inside `enable_wrap`; outside, return it unchanged.

    >>> import torch.nn as nn, manyhands as mh
    >>> from manyhands.fairscale import wrap
    >>> type(wrap(nn.Linear(5, 5)))
    <class 'torch.nn.modules.linear.Linear'>

    Args:
        module: the module to wrap.
        wrap_overrides: options for the wrapper, which may include `wrapper_cls`. They win over the
            module's attribute `wrapper_config` (a dict), which wins over `enable_wrap`.
    """
    scope = _SCOPE.get()
    if scope is None:
        return module
    return scope.wrap(module, wrap_overrides)


def auto_wrap(
    module: nn.Module, auto_wrap_policy: Policy | Classes | None = None, **kwargs: Any
) -> nn.Module:
    """Wrap the modules that a policy selects among a module and its submodules.

    >>> import torch.nn as nn, manyhands as mh
    >>> from manyhands.fairscale import auto_wrap, enable_wrap
    >>> model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 2))  # 110 and 22 parameters
    >>> with enable_wrap(wrapper_cls=mh.FSDP):
    ...     model = auto_wrap(model, min_num_params=100)
    >>> [isinstance(layer, mh.FSDP) for layer in model]
    [True, False]

    Outside of `enable_wrap` the module is returned unchanged. Inside, the model is changed in
    place; use the return value, because the root may get a wrapper. A module at two places gets a
    single wrapper, at both. A module that shares a parameter (tied weights) or an unwrapped
    submodule with modules outside gets no wrapper, whatever the policy decides. Modules inside an
    instance of `wrapper_cls` count as wrapped.

    Args:
        module: the model, or a submodule that shares no parameters with the rest.
        auto_wrap_policy: a function like `default_auto_wrap_policy`, or a set of classes to wrap.
            The default is the policy of `enable_wrap`.
        kwargs: keywords of the policy, such as `min_num_params`; options for the wrappers, as in
            `wrap`.
    """
    outer = _SCOPE.get()
    if outer is None:
        return module
    scope, overrides = outer.changed(auto_wrap_policy, kwargs)
    cls: Any = scope.wrapper_cls
    while isinstance(cls, partial):
        cls = cls.func
    wrappers = []
    if isinstance(cls, type):  # a plain function has no instances
        wrappers = [each for each in module.modules() if isinstance(each, cls)]
    chosen = set(pick_modules(module, scope.policy, wrappers))
    done: dict[nn.Module, nn.Module] = {}

    def replacement(each: nn.Module) -> nn.Module:
        if each not in done:
            for name, child in children(each):
                new = replacement(child)
                if new is not child:
                    setattr(each, name, new)
            done[each] = each
            if each in chosen:
                done[each] = scope.wrap(each, overrides)
        return done[each]

    return replacement(module)


def pick_modules(root: nn.Module, policy: Policy, wrappers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules to wrap, inner modules first. `wrappers` are already wrapped."""
    wrappers = set(wrappers)
    # Also tied parameters outside a wrapper do not count.
    wrapped_params = {param for wrapper in wrappers for param in wrapper.parameters()}

    def ask(module: nn.Module, recurse: bool, params: set[nn.Parameter]) -> bool:
        number = sum(param.numel() for param in params - wrapped_params)
        return policy(
            module=module, recurse=recurse, unwrapped_params=number, module_is_root=module is root
        )

    # Submodules of an unvisited module are not wrapped at any place: attention reads the weights of
    # a submodule without calling it.
    opened: set[nn.Module] = set()
    sealed: set[nn.Module] = set()
    seen: set[nn.Module] = set()
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        if module not in wrappers and ask(module, True, set(module.parameters())):
            opened.add(module)
            waiting += reversed(list(module.children()))
        else:
            sealed.update(module.modules())
    to_wrap = []
    # Parameters of each module outside all wrappers.
    rest: dict[nn.Module, set[nn.Parameter]] = {wrapper: set() for wrapper in wrappers}

    def rest_of(module: nn.Module) -> set[nn.Parameter]:
        if module not in rest:
            params = set(module.parameters(recurse=False))
            for child in module.children():
                params |= rest_of(child)
            wanted = module in opened and module not in sealed and ask(module, False, params)
            if wanted and params.isdisjoint(_params_outside(module, root)):
                to_wrap.append(module)
                params = set()
            rest[module] = params
        return rest[module]

    rest_of(root)
    return to_wrap


def _params_outside(module: nn.Module, root: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that `root` also reaches without passing through `module`."""
    seen = {module}
    waiting = [root]
    while waiting:
        each = waiting.pop()
        if each not in seen:
            seen.add(each)
            yield from each.parameters(recurse=False)
            waiting += each.children()


def _as_policy(policy: Policy | Classes) -> Policy:
    """Return the policy; for a set of classes, a policy that wraps their instances."""
    if not isinstance(policy, Collection):
        return policy
    classes = tuple(policy)
    return lambda *, module, recurse, **_: recurse or isinstance(module, classes)


def _keywords_of(function: Callable[..., object]) -> set[str]:
    """Return a function's options, without a policy's first four; "**" for any other."""
    names = set()
    for name, each in inspect.signature(function).parameters.items():
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            names.add(name)
        elif each.kind is each.VAR_KEYWORD:
            names.add("**")
    return names - {"module", "recurse", "unwrapped_params", "module_is_root"}

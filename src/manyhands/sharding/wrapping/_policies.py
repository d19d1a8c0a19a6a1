"""Policies: functions that decide, module by module, what to wrap; and the modules they pick.

`auto_wrap` calls a policy with the keywords in `POLICY_KEYWORDS`. With `recurse=True` the policy
returns whether to look into a module, with `recurse=False` whether to wrap it. This file has the
policy by size, the policy by mark, and the one that a set of classes is turned into.

`pick_modules` applies a policy to a model, and changes nothing. It walks over the model three
times:

    down     the policy decides which modules to look into; modules inside all others are left alone
    paths    count the paths to each module and parameter
    up       the policy decides which modules to wrap; parameters that no wrapper has taken count
             for the module around

A model need not be a tree: a module may be at two places, and two modules may hold one parameter.
A module's wrapper may take such a parameter only if all of its places are inside that module, that
is, if

    paths(root, parameter) = paths(root, module) * paths(module, parameter)
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TypeAlias

from torch import nn

Policy: TypeAlias = Callable[..., bool]
Classes: TypeAlias = Collection[type[nn.Module]]

POLICY_KEYWORDS = ("module", "recurse", "unwrapped_params", "module_is_root")


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
    """The policy by size: wrap modules with enough parameters that are in no wrapper yet.

    >>> import torch.nn as nn, manyhands as mh
    >>> layer = nn.Linear(10, 10)  # 110 parameters
    >>> about = {"module": layer, "recurse": False, "module_is_root": False}
    >>> mh.default_auto_wrap_policy(**about, unwrapped_params=110, min_num_params=100)
    True

    `auto_wrap` passes the first four arguments. Pass the others to `auto_wrap` or `enable_wrap`, or
    bind them with `functools.partial`.

    Args:
        module: the module to decide about.
        recurse: True to decide whether to look into the module, False whether to wrap it.
        unwrapped_params: its number of parameters, without those in wrappers.
        module_is_root: whether `auto_wrap` was called with this module.
        min_num_params: the smallest number of parameters to wrap.
        force_leaf_modules: classes to leave alone: neither they nor modules inside are wrapped. By
            default `default_auto_wrap_policy.FORCE_LEAF_MODULES`: attention, which reads the
            weights of a module inside it without calling that module.
        exclude_wrap_modules: classes that are looked into but not wrapped. By default
            `default_auto_wrap_policy.EXCLUDE_WRAP_MODULES`: containers that have no `forward`.
        skip_params_check_for_root: wrap the root even if few parameters are left for its wrapper.
    """
    # Read at each call, so that changes to these sets take effect.
    if force_leaf_modules is None:
        force_leaf_modules = default_auto_wrap_policy.FORCE_LEAF_MODULES  # type: ignore[attr-defined]
    if exclude_wrap_modules is None:
        exclude_wrap_modules = default_auto_wrap_policy.EXCLUDE_WRAP_MODULES  # type: ignore[attr-defined]
    large = unwrapped_params >= min_num_params
    if recurse:
        return large and not isinstance(module, tuple(force_leaf_modules))
    wanted = large or (module_is_root and skip_params_check_for_root)
    return wanted and not isinstance(module, tuple(exclude_wrap_modules))


default_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
default_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def config_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool
) -> bool:
    """The policy by mark: wrap the modules that have an attribute `wrapper_config`.

    >>> import torch.nn as nn, manyhands as mh
    >>> layer = nn.Linear(10, 10)
    >>> layer.wrapper_config = {"mixed_precision": False}
    >>> mh.config_auto_wrap_policy(layer, False, unwrapped_params=110, module_is_root=False)
    True

    It is a dict of options for this module's wrapper, which may include `wrapper_cls` and may be
    empty. `auto_wrap` passes the arguments; `default_auto_wrap_policy` describes them.
    """
    # A marked module may be anywhere, so look into every module.
    return recurse or hasattr(module, "wrapper_config")


def as_policy(policy: Policy | Classes) -> Policy:
    """Return a policy function for a function or a set of classes, or raise a TypeError."""
    if isinstance(policy, set | frozenset | tuple | list):
        classes = tuple(policy)
        if not all(isinstance(cls, type) for cls in classes):
            raise TypeError(
                f"auto_wrap_policy must be a set of classes or a function, got {policy!r}. Name "
                "the classes whose instances are to be wrapped, as in {nn.TransformerEncoderLayer}."
            )
        return lambda *, module, recurse, **_: recurse or isinstance(module, classes)
    if not callable(policy) or isinstance(policy, type):
        raise TypeError(
            f"auto_wrap_policy must be a function or a set of classes, got {policy!r}. Give a "
            f"function that takes the keywords {', '.join(POLICY_KEYWORDS)}, or "
            "classes in braces, as in {nn.TransformerEncoderLayer}."
        )
    # Tried without calling it, so that a wrong signature is found before the model is changed.
    try:
        inspect.signature(policy).bind(**dict.fromkeys(POLICY_KEYWORDS))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"auto_wrap_policy is called with the keywords {', '.join(POLICY_KEYWORDS)}, and "
            f"{name_of(policy)} cannot be: {error}. Add the missing keywords, or **kwargs, and "
            "bind other required arguments with functools.partial."
        ) from None
    return policy


def keywords_of(function: Callable[..., object]) -> tuple[set[str], bool]:
    """Return a function's keyword arguments, and whether it takes any other."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        return set(), True
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return (
        {p.name for p in parameters if p.kind in by_name},
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def name_of(function: object) -> str:
    """Return a function's name for an error message; a partial has the name of its function."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", repr(function))


# -- applying a policy -----------------------------------------------------------------------------


def pick_modules(root: nn.Module, policy: Policy, wrappers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules to wrap, inner ones first. `wrappers` are wrapped already."""
    wrappers = set(wrappers)
    # A parameter that is in a wrapper counts nowhere else, even if it is tied to one outside.
    wrapped_params = {param for wrapper in wrappers for param in wrapper.parameters()}

    def ask(module: nn.Module, recurse: bool, params: set[nn.Parameter]) -> bool:
        number = sum(param.numel() for param in params - wrapped_params)
        arguments = (module, recurse, number, module is root)
        return policy(**dict(zip(POLICY_KEYWORDS, arguments, strict=True)))

    paths = _PathCounts()
    entered = _find_entered(root, lambda m: m not in wrappers and ask(m, True, {*m.parameters()}))
    to_wrap = []
    # The parameters in each module that no wrapper inside it has taken. Filled bottom up, once for
    # each module, however many paths lead to it.
    rest: dict[nn.Module, set[nn.Parameter]] = {wrapper: set() for wrapper in wrappers}

    def rest_of(module: nn.Module) -> set[nn.Parameter]:
        if module not in rest:
            params = set(_own(module)).union(*(rest_of(child) for _, child in children(module)))
            wanted = module in entered and ask(module, False, params)
            if wanted and all(paths.all_lead_through(module, param, root) for param in params):
                to_wrap.append(module)
                params = set()
            rest[module] = params
        return rest[module]

    rest_of(root)
    return to_wrap


def children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all children by name. `named_children` would leave out a child's second name."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module._parameters.values() if param is not None]


def _find_entered(root: nn.Module, enters: Callable[[nn.Module], bool]) -> set[nn.Module]:
    """Return the modules that the policy looks into."""
    entered: dict[nn.Module, bool] = {}
    # Modules inside one that is not entered. They are left alone even if they are elsewhere, too:
    # attention reads the weights of a module inside it without calling that module.
    sealed: set[nn.Module] = set()

    def walk(module: nn.Module) -> None:
        if module in entered:
            return
        entered[module] = enters(module)
        if entered[module]:
            for _, child in children(module):
                walk(child)
        else:
            sealed.update(inner for inner in module.modules() if inner is not module)

    walk(root)
    return {module for module, yes in entered.items() if yes} - sealed


class _PathCounts:
    """Counts the paths from a module down to each module and parameter in it."""

    def __init__(self) -> None:
        self._known: dict[nn.Module, Counter[nn.Module | nn.Parameter]] = {}

    def below(self, module: nn.Module) -> Counter[nn.Module | nn.Parameter]:
        if module not in self._known:
            # One path from the module to itself and to each of its own parameters.
            counts: Counter[nn.Module | nn.Parameter] = Counter([module, *_own(module)])
            for _, child in children(module):
                counts.update(self.below(child))
            self._known[module] = counts
        return self._known[module]

    def all_lead_through(self, module: nn.Module, param: nn.Parameter, root: nn.Module) -> bool:
        """Return whether every path from the root to the parameter passes through the module."""
        from_root = self.below(root)
        return from_root[param] == from_root[module] * self.below(module)[param]

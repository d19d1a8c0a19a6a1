"""Policies: functions that decide, module by module, what to wrap.

`auto_wrap` calls a policy with the keywords in `POLICY_KEYWORDS`. With `recurse=True` the policy
returns whether to look into a module, with `recurse=False` whether to wrap it. This file has the
policy by size, the policy by mark, and the one that a set of classes is turned into.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
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

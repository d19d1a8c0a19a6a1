"""What is to be wrapped? A policy answers, module by module.

A policy is a function that `auto_wrap` calls with the keywords in `ASKED`: with `recurse=True`
it says whether to look into a module, with `recurse=False` whether to wrap it. Here are that by
size, that by mark, and how a set of classes becomes one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeAlias

from torch import nn

Policy: TypeAlias = Callable[..., bool]
Classes: TypeAlias = Collection[type[nn.Module]]

ASKED = ("module", "recurse", "unwrapped_params", "module_is_root")


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
    """The policy by size: wrap what has so many parameters that are in no wrapper yet.

    >>> import torch.nn as nn, manyhands as mh
    >>> layer = nn.Linear(10, 10)  # 110 parameters
    >>> about = {"module": layer, "recurse": False, "module_is_root": False}
    >>> mh.default_auto_wrap_policy(**about, unwrapped_params=110, min_num_params=100)
    True

    `auto_wrap` passes the first four arguments; give the others to `auto_wrap` or `enable_wrap`,
    or bind them with `functools.partial`.

    Args:
        module: the one that is asked about.
        recurse: whether the question is to look into the module, or to wrap it.
        unwrapped_params: its parameters, without those in wrappers.
        module_is_root: whether it is the one that `auto_wrap` was called with.
        min_num_params: the fewest parameters that make a wrapper.
        force_leaf_modules: classes that are left whole: neither they nor modules in them are
            wrapped. By default `default_auto_wrap_policy.FORCE_LEAF_MODULES`: attention, which
            reads the weights of a module in it without calling that module.
        exclude_wrap_modules: classes that are looked into and not wrapped. By default
            `default_auto_wrap_policy.EXCLUDE_WRAP_MODULES`: containers that have no `forward`.
        skip_params_check_for_root: wrap the root however few parameters are left to it.
    """
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

    It is a dict of options for this module's wrapper, `wrapper_cls` among them, and may be empty.
    The arguments are those that every policy is given; see `default_auto_wrap_policy`.
    """
    return recurse or hasattr(module, "wrapper_config")


def as_policy(given: Any) -> Policy:
    """A function, whether a function or a set of classes was given."""
    if isinstance(given, set | frozenset | tuple | list):
        classes = tuple(given)
        if not all(isinstance(cls, type) for cls in classes):
            raise TypeError(
                f"auto_wrap_policy must be a set of classes or a function, got {given!r}. Name the "
                "classes whose instances are to be wrapped, as in {nn.TransformerEncoderLayer}."
            )
        return lambda *, module, recurse, **_: recurse or isinstance(module, classes)
    if not callable(given) or isinstance(given, type):
        raise TypeError(
            f"auto_wrap_policy must be a function or a set of classes, got {given!r}. Give a "
            f"function that takes the keywords {', '.join(ASKED)}, or "
            "classes in braces, as in {nn.TransformerEncoderLayer}."
        )
    try:
        inspect.signature(given).bind(**dict.fromkeys(ASKED))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"auto_wrap_policy is called with the keywords {', '.join(ASKED)}, and "
            f"{name_of(given)} cannot be: {error}. Add what is missing, or **kwargs; what else it "
            "needs, bind with functools.partial."
        ) from None
    return given


def keywords_of(function: Any) -> tuple[set[str], bool]:
    """The arguments that can be given by name, and whether any other can."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # no signature to look at
        return set(), True
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return (
        {p.name for p in parameters if p.kind in by_name},
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", repr(function))

"""Which modules get a wrapper of their own, said once for a whole model.

A wrapper, such as `FullyShardedDataParallel`, takes a module and stands in its place. What is
wrapped together is gathered together, so a large model wants several.

    enable_wrap   the wrapper and its options, for all that follows inside it
    wrap          this module
    auto_wrap     of this module and those in it, the ones that a policy picks

`auto_wrap` first asks the policy about every module, then checks what the wrappers will be
given, and only then changes the model, the innermost modules first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from manyhands.sharding.wrapping._pick import children, picked
from manyhands.sharding.wrapping._policies import (
    ASKED,
    Classes,
    Policy,
    as_policy,
    default_auto_wrap_policy,
    keywords_of,
    name_of,
)

Wrapper: TypeAlias = Callable[..., nn.Module]


@dataclass(frozen=True)
class _Scope:
    wrapper_cls: Wrapper
    policy: Policy
    options: Mapping[str, Any]


_SCOPE: ContextVar[_Scope | None] = ContextVar("enable_wrap", default=None)


@contextmanager
def enable_wrap(
    auto_wrap_policy: Policy | Classes | None = None, **wrapper_kwargs: Any
) -> Iterator[None]:
    """Inside it `wrap` and `auto_wrap` wrap; outside they return the module as it is.

    >>> import torch.nn as nn, manyhands as mh
    >>> group = mh.DummyProcessGroup(rank=0, size=1)
    >>> with mh.enable_wrap(wrapper_cls=mh.FSDP, process_group=group, flatten_parameters=True):
    ...     layer = mh.wrap(nn.Linear(5, 5))
    >>> isinstance(layer, mh.FSDP)
    True

    An `enable_wrap` inside another adds to it: what it does not set is as outside, and on leaving
    it, be it by an exception, all is as before. Threads have each their own. It is a decorator too:
    `@mh.enable_wrap(...)` above a function that builds a model.

    Args:
        auto_wrap_policy: for `auto_wrap`, which describes it; by default that by size.
        wrapper_kwargs: `wrapper_cls` is the class that wraps, or a function that takes a module and
            options (by default `FullyShardedDataParallel`); keywords that the policy has are
            for it (`min_num_params=1e6`); all others go to the wrapper as they are. Another
            `wrapper_cls` inside gets those of the outer options that it takes.
    """
    outer = _SCOPE.get()
    wrapper_cls = _wrapper_among(wrapper_kwargs)
    if wrapper_cls is None:
        wrapper_cls = _default_wrapper() if outer is None else outer.wrapper_cls
    if auto_wrap_policy is not None:
        policy = as_policy(auto_wrap_policy)
    else:
        policy = default_auto_wrap_policy if outer is None else outer.policy
    policy, options = _divide(policy, wrapper_kwargs)
    _check_taken(wrapper_cls, options, policy)
    inherited = {} if outer is None else outer.options
    token = _SCOPE.set(_Scope(wrapper_cls, policy, {**inherited, **options}))
    try:
        yield
    finally:
        _SCOPE.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap a module, if inside `enable_wrap`; otherwise return it as it is.

    >>> import torch.nn as nn, manyhands as mh
    >>> type(mh.wrap(nn.Linear(5, 5)))
    <class 'torch.nn.modules.linear.Linear'>

    So a model's code can say once what is to be wrapped, and be used with and without.

    Args:
        module: the module.
        wrap_overrides: options for its wrapper, and `wrapper_cls`. They win over those in the
            module's attribute `wrapper_config` (a dict), and these over `enable_wrap`'s.
    """
    scope = _SCOPE.get()
    return module if scope is None else _wrapped(module, *_call_of(module, scope, wrap_overrides))


def auto_wrap(
    module: nn.Module, auto_wrap_policy: Policy | Classes | None = None, **kwargs: Any
) -> nn.Module:
    """Wrap those that a policy picks among a module and all in it, if inside `enable_wrap`.

    >>> import torch.nn as nn, manyhands as mh
    >>> model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 2))  # 110 and 22 parameters
    >>> with mh.enable_wrap(wrapper_cls=mh.FSDP, process_group=mh.DummyProcessGroup(0, 1)):
    ...     model = mh.auto_wrap(model, min_num_params=100)
    >>> [isinstance(layer, mh.FSDP) for layer in model]
    [True, False]

    The model is changed in place; use what is returned, because the module itself may have got a
    wrapper. A module at two places gets one wrapper, at both. A module that shares a parameter
    (tied weights) or an unwrapped module with others outside of it gets none, whatever the
    policy says: what is shared stays with a module that has all of it inside. What is inside an
    instance of `wrapper_cls` already counts as wrapped and is left alone.

    Args:
        module: the model, or a part of it that shares no parameters with the rest.
        auto_wrap_policy: a function that is called with the keywords `module`, `recurse`,
            `unwrapped_params` and `module_is_root`, as `default_auto_wrap_policy` is; or a set of
            classes, whose instances are wrapped, and nothing else. By default `enable_wrap`'s.
        kwargs: keywords that the policy has (by default `min_num_params`, `force_leaf_modules`,
            `exclude_wrap_modules`, `skip_params_check_for_root`) are for it; all others are
            options for the wrappers, as in `wrap`.
    """
    scope = _SCOPE.get()
    if scope is None:
        return module
    policy = scope.policy if auto_wrap_policy is None else as_policy(auto_wrap_policy)
    policy, overrides = _divide(policy, kwargs)
    options = dict(overrides)
    wrapper_cls = _wrapper_among(options) or scope.wrapper_cls
    _check_taken(wrapper_cls, options, policy)
    wrappers = [m for m in module.modules() if _is_instance(m, wrapper_cls)]
    calls = {m: _call_of(m, scope, overrides) for m in picked(module, policy, wrappers)}
    return _replaced(module, calls, {})


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: Any = None,
    fsdp_config: Mapping[str, Any] | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Wrap each BatchNorm by itself, in full precision, for a model that is not.

    >>> import torch.nn as nn, manyhands as mh
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> model = mh.auto_wrap_bn(model, process_group=mh.DummyProcessGroup(rank=0, size=1))
    >>> isinstance(model[1], mh.FSDP)
    True

    Call it before the model, or the parts that hold the BatchNorms, are wrapped. Inside
    `enable_wrap` its wrapper and its other options are used.

    Args:
        module: the model.
        single_rank_pg: accepted, and of no effect. In a group of one the workers would not average
            the gradients of BatchNorms, and each would train its own.
        process_group: the workers that share them, if not `enable_wrap`'s, or all.
        fsdp_config: options that win over those for full precision.
        wrap_it: False only writes the options into each BatchNorm's `wrapper_config`, for
            `config_auto_wrap_policy`.
        assert_on_collision: whether a BatchNorm that has a `wrapper_config` already is an error;
            otherwise it gets another.
    """
    config = {
        "mixed_precision": False,
        "fp32_reduce_scatter": False,  # gradients are float32 as they are
        "compute_dtype": torch.float32,
        "buffer_dtype": torch.float32,
        "force_input_to_fp32": False,
        "flatten_parameters": False,
        "reshard_after_forward": False,
        "bucket_cap_mb": 0,
        **({} if process_group is None else {"process_group": process_group}),
        **(fsdp_config or {}),
    }
    found: dict[str, Any] = {
        name: each for name, each in module.named_modules() if isinstance(each, _BatchNorm)
    }
    marked = [name for name, norm in found.items() if hasattr(norm, "wrapper_config")]
    if marked and assert_on_collision:
        raise ValueError(
            f"auto_wrap_bn needs BatchNorms without a wrapper_config, and these have one: {marked}."
            " Call it once, or with assert_on_collision=False to give them another."
        )
    for norm in found.values():
        norm.wrapper_config = dict(config)
    if not wrap_it:
        return module
    with enable_wrap():
        return auto_wrap(module, (_BatchNorm,))


def _wrapper_among(options: dict[str, Any]) -> Wrapper | None:
    """Takes `wrapper_cls` out of the options."""
    wrapper_cls = options.pop("wrapper_cls", None)
    if wrapper_cls is not None and not callable(wrapper_cls):
        raise TypeError(
            "wrapper_cls must be a class, or a function that takes a module and options and "
            f"returns the module wrapped, got {wrapper_cls!r}. Give the class itself, as in "
            "enable_wrap(wrapper_cls=FullyShardedDataParallel)."
        )
    return wrapper_cls


def _is_instance(module: nn.Module, wrapper_cls: Wrapper) -> bool:
    cls: Any = wrapper_cls
    while isinstance(cls, partial):
        cls = cls.func
    return isinstance(cls, type) and isinstance(module, cls)


def _default_wrapper() -> Wrapper:
    from manyhands.sharding.fsdp._wrapper import FullyShardedDataParallel

    return FullyShardedDataParallel


def _divide(policy: Policy, options: dict[str, Any]) -> tuple[Policy, dict[str, Any]]:
    """The policy with its options bound, and the wrapper's options."""
    names = keywords_of(policy)[0] - set(ASKED)
    bound = {name: value for name, value in options.items() if name in names}
    rest = {name: value for name, value in options.items() if name not in names}
    return (partial(policy, **bound) if bound else policy), rest


def _check_taken(
    wrapper_cls: Wrapper, options: Mapping[str, Any], policy: Policy | None = None
) -> None:
    names, any_other = keywords_of(wrapper_cls)
    unknown = [name for name in options if name not in names]
    if unknown and not any_other:
        theirs = ", ".join(sorted(names - {*ASKED})) or "none"
        of_policy = sorted(keywords_of(policy)[0] - {*ASKED}) if policy is not None else []
        also = f"; {name_of(policy)}, the policy, takes {', '.join(of_policy)}" if of_policy else ""
        raise TypeError(
            f"Options must be known to the wrapper, and {name_of(wrapper_cls)} takes no "
            f"{', '.join(unknown)}. It takes {theirs}{also}. Correct the name, or leave it out."
        )


def _call_of(
    module: nn.Module, scope: _Scope, overrides: Mapping[str, Any]
) -> tuple[Wrapper, dict[str, Any]]:
    """What wraps a module, and with which options."""
    config = getattr(module, "wrapper_config", {})
    if not isinstance(config, dict):
        raise TypeError(
            f"wrapper_config must be a dict of options for the wrapper, got {config!r} on a "
            f"{type(module).__name__}. An empty dict marks a module without changing an option."
        )
    own = {**config, **overrides}
    wrapper_cls = _wrapper_among(own) or scope.wrapper_cls
    _check_taken(wrapper_cls, own)
    names, any_other = keywords_of(wrapper_cls)
    context = {k: value for k, value in scope.options.items() if any_other or k in names}
    return wrapper_cls, {**context, **own}


def _wrapped(module: nn.Module, wrapper_cls: Wrapper, options: dict[str, Any]) -> nn.Module:
    wrapper = wrapper_cls(module, **options)
    if not isinstance(wrapper, nn.Module):
        raise TypeError(
            f"wrapper_cls must return a module, and {name_of(wrapper_cls)} returned {wrapper!r}. "
            "Return the wrapped module from it."
        )
    return wrapper


def _replaced(
    module: nn.Module,
    calls: Mapping[nn.Module, tuple[Wrapper, dict[str, Any]]],
    done: dict[nn.Module, nn.Module],
) -> nn.Module:
    """The module with wrappers in and around it; `done` gives a shared one the same wrapper."""
    if module not in done:
        for name, child in children(module):
            new = _replaced(child, calls, done)
            if new is not child:
                setattr(module, name, new)
        done[module] = _wrapped(module, *calls[module]) if module in calls else module
    return done[module]

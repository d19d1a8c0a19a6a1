"""Wrap modules of a model, with the wrapper and its options given once.

A wrapper, such as `FullyShardedDataParallel`, takes a module and replaces it in the model. The
parameters in one wrapper are gathered together, so a large model needs several wrappers.

    enable_wrap   sets the wrapper and its options for all calls inside the context
    wrap          wraps one module
    auto_wrap     wraps the modules that a policy picks among a module and those inside it

`auto_wrap` first asks the policy about every module, then checks the wrappers' options, and only
then changes the model, inner modules first.
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

from manyhands.sharding._agreement import GroupLike
from manyhands.sharding.fsdp._wrapper import FullyShardedDataParallel
from manyhands.sharding.wrapping._policies import (
    POLICY_KEYWORDS,
    Classes,
    Policy,
    as_policy,
    children,
    default_auto_wrap_policy,
    keywords_of,
    name_of,
    pick_modules,
)

Wrapper: TypeAlias = Callable[..., nn.Module]
Options: TypeAlias = Mapping[str, object]  # keyword arguments of a wrapper


@dataclass(frozen=True)
class _Scope:
    """The settings of the innermost `enable_wrap`, with those of outer ones merged in."""

    wrapper_cls: Wrapper
    policy: Policy
    options: Options


# A context variable, so that threads and asyncio tasks do not see each other's settings.
_SCOPE: ContextVar[_Scope | None] = ContextVar("enable_wrap", default=None)


@contextmanager
def enable_wrap(
    auto_wrap_policy: Policy | Classes | None = None, **wrapper_kwargs: object
) -> Iterator[None]:
    """Let `wrap` and `auto_wrap` wrap inside; outside they return the module unchanged.

    >>> import torch.nn as nn, manyhands as mh
    >>> group = mh.DummyProcessGroup(rank=0, size=1)
    >>> with mh.enable_wrap(wrapper_cls=mh.FSDP, process_group=group, flatten_parameters=True):
    ...     layer = mh.wrap(nn.Linear(5, 5))
    >>> isinstance(layer, mh.FSDP)
    True

    An `enable_wrap` inside another inherits all settings that it does not change. When it ends,
    also by an exception, the outer settings are back. Each thread has its own settings. It is a
    decorator, too: `@mh.enable_wrap(...)` above a function that builds a model.

    Args:
        auto_wrap_policy: the policy of `auto_wrap`, described there; by default by size.
        wrapper_kwargs: `wrapper_cls` is the class that wraps, or a function that takes a module and
            options (by default `FullyShardedDataParallel`). Keywords of the policy go to the
            policy (`min_num_params=1e6`). All others go to the wrapper unchanged. If an inner
            context sets another `wrapper_cls`, that gets the outer options that it takes.
    """
    outer = _SCOPE.get()
    wrapper_cls = _pop_wrapper_cls(wrapper_kwargs)
    if wrapper_cls is None:
        wrapper_cls = FullyShardedDataParallel if outer is None else outer.wrapper_cls
    if auto_wrap_policy is not None:
        policy = as_policy(auto_wrap_policy)
    else:
        policy = default_auto_wrap_policy if outer is None else outer.policy
    policy, options = _bind_policy(policy, wrapper_kwargs)
    _check_wrapper_takes(wrapper_cls, options, policy)
    inherited = {} if outer is None else outer.options
    token = _SCOPE.set(_Scope(wrapper_cls, policy, {**inherited, **options}))
    try:
        yield
    finally:
        _SCOPE.reset(token)


def wrap(module: nn.Module, **wrap_overrides: object) -> nn.Module:
    """Wrap a module inside `enable_wrap`; outside return it unchanged.

    >>> import torch.nn as nn, manyhands as mh
    >>> type(mh.wrap(nn.Linear(5, 5)))
    <class 'torch.nn.modules.linear.Linear'>

    So the code of a model can mark what to wrap, and build the plain model as well.

    Args:
        module: the module to wrap.
        wrap_overrides: options for its wrapper, which may include `wrapper_cls`. They win over
            those in the module's attribute `wrapper_config` (a dict), which win over those of
            `enable_wrap`.
    """
    scope = _SCOPE.get()
    return (
        module
        if scope is None
        else _make_wrapper(module, *_find_call(module, scope, wrap_overrides))
    )


def auto_wrap(
    module: nn.Module, auto_wrap_policy: Policy | Classes | None = None, **kwargs: object
) -> nn.Module:
    """Wrap the modules that a policy picks among a module and those inside it.

    >>> import torch.nn as nn, manyhands as mh
    >>> model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 2))  # 110 and 22 parameters
    >>> with mh.enable_wrap(wrapper_cls=mh.FSDP, process_group=mh.DummyProcessGroup(0, 1)):
    ...     model = mh.auto_wrap(model, min_num_params=100)
    >>> [isinstance(layer, mh.FSDP) for layer in model]
    [True, False]

    Outside of `enable_wrap` the module is returned unchanged. Inside, the model is changed in
    place; use the return value, because the module itself may have got a wrapper. A module at two
    places gets one wrapper, at both. A module that shares a parameter (tied weights) or an
    unwrapped module with modules outside it gets none, whatever the policy decides: what is shared
    is wrapped with a module that has all places of it inside. Modules inside an instance of
    `wrapper_cls` count as wrapped and are left alone.

    Args:
        module: the model, or a module in it that shares no parameters with the rest.
        auto_wrap_policy: a function that is called with the keywords `module`, `recurse`,
            `unwrapped_params` and `module_is_root`, like `default_auto_wrap_policy`; or a set of
            classes, whose instances alone are wrapped. By default the policy of `enable_wrap`.
        kwargs: keywords of the policy (by default `min_num_params`, `force_leaf_modules`,
            `exclude_wrap_modules`, `skip_params_check_for_root`) go to the policy. All others are
            options for the wrappers, as in `wrap`.
    """
    scope = _SCOPE.get()
    if scope is None:
        return module
    policy = scope.policy if auto_wrap_policy is None else as_policy(auto_wrap_policy)
    policy, overrides = _bind_policy(policy, kwargs)
    options = dict(overrides)
    wrapper_cls = _pop_wrapper_cls(options) or scope.wrapper_cls
    _check_wrapper_takes(wrapper_cls, options, policy)
    wrappers = [m for m in module.modules() if _is_instance(m, wrapper_cls)]
    # All calls are checked here, before the first module is replaced.
    calls = {m: _find_call(m, scope, overrides) for m in pick_modules(module, policy, wrappers)}
    return _replace(module, calls, {})


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: GroupLike | None = None,
    fsdp_config: Options | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Wrap each BatchNorm by itself in full precision, in a model of lower precision.

    >>> import torch.nn as nn, manyhands as mh
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> model = mh.auto_wrap_bn(model, process_group=mh.DummyProcessGroup(rank=0, size=1))
    >>> isinstance(model[1], mh.FSDP)
    True

    Call it before the model, or a module that contains BatchNorms, is wrapped. Inside `enable_wrap`
    that context's wrapper and other options are used.

    Args:
        module: the model.
        single_rank_pg: has no effect. In groups of one the ranks would not average the gradients
            of BatchNorms, and each would train its own.
        process_group: the ranks that share them, by default those of `enable_wrap`, or all.
        fsdp_config: options that win over those for full precision.
        wrap_it: False only writes the options into each BatchNorm's `wrapper_config`, for
            `config_auto_wrap_policy`.
        assert_on_collision: raise an error if a BatchNorm has a `wrapper_config` already; False
            replaces it.
    """
    config = {
        "mixed_precision": False,
        "fp32_reduce_scatter": False,  # the gradients of float32 parameters are float32 anyway
        "compute_dtype": torch.float32,
        "buffer_dtype": torch.float32,
        "force_input_to_fp32": False,
        "flatten_parameters": False,
        "reshard_after_forward": False,
        "bucket_cap_mb": 0,
        **({} if process_group is None else {"process_group": process_group}),
        **(fsdp_config or {}),
    }
    # BatchNorm1d to 3d and SyncBatchNorm have this private base class in common.
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
    # Also outside of `enable_wrap`; inside, its settings are inherited.
    with enable_wrap():
        return auto_wrap(module, (_BatchNorm,))


def _pop_wrapper_cls(options: dict[str, object]) -> Wrapper | None:
    """Remove `wrapper_cls` from the options and return it, or None."""
    wrapper_cls = options.pop("wrapper_cls", None)
    if wrapper_cls is not None and not callable(wrapper_cls):
        raise TypeError(
            "wrapper_cls must be a class, or a function that takes a module and options and "
            f"returns the module wrapped, got {wrapper_cls!r}. Give the class itself, as in "
            "enable_wrap(wrapper_cls=FullyShardedDataParallel)."
        )
    return wrapper_cls


def _is_instance(module: nn.Module, wrapper_cls: Wrapper) -> bool:
    # A wrapper that is a plain function has no instances, so nothing counts as wrapped by it.
    cls: object = wrapper_cls
    while isinstance(cls, partial):
        cls = cls.func
    return isinstance(cls, type) and isinstance(module, cls)


def _bind_policy(policy: Policy, options: Options) -> tuple[Policy, dict[str, object]]:
    """Return the policy with its options bound, and the options left for the wrapper."""
    names = keywords_of(policy)[0] - set(POLICY_KEYWORDS)
    bound = {name: value for name, value in options.items() if name in names}
    rest = {name: value for name, value in options.items() if name not in names}
    return (partial(policy, **bound) if bound else policy), rest


def _check_wrapper_takes(
    wrapper_cls: Wrapper, options: Options, policy: Policy | None = None
) -> None:
    """Raise a TypeError if the wrapper does not take one of the options."""
    names, any_other = keywords_of(wrapper_cls)
    unknown = [name for name in options if name not in names]
    if unknown and not any_other:
        theirs = ", ".join(sorted(names - {*POLICY_KEYWORDS})) or "none"
        of_policy = (
            sorted(keywords_of(policy)[0] - {*POLICY_KEYWORDS}) if policy is not None else []
        )
        also = f"; {name_of(policy)}, the policy, takes {', '.join(of_policy)}" if of_policy else ""
        raise TypeError(
            f"Options must be known to the wrapper, and {name_of(wrapper_cls)} takes no "
            f"{', '.join(unknown)}. It takes {theirs}{also}. Correct the name, or leave it out."
        )


def _find_call(module: nn.Module, scope: _Scope, overrides: Options) -> tuple[Wrapper, Options]:
    """Return the wrapper of a module, and its options."""
    config = getattr(module, "wrapper_config", {})
    if not isinstance(config, dict):
        raise TypeError(
            f"wrapper_config must be a dict of options for the wrapper, got {config!r} on a "
            f"{type(module).__name__}. An empty dict marks a module without changing an option."
        )
    own = {**config, **overrides}
    wrapper_cls = _pop_wrapper_cls(own) or scope.wrapper_cls
    _check_wrapper_takes(wrapper_cls, own)
    # The context's options may be meant for another wrapper: pass those that this one takes.
    names, any_other = keywords_of(wrapper_cls)
    context = {k: value for k, value in scope.options.items() if any_other or k in names}
    return wrapper_cls, {**context, **own}


def _make_wrapper(module: nn.Module, wrapper_cls: Wrapper, options: Options) -> nn.Module:
    wrapper = wrapper_cls(module, **options)
    if not isinstance(wrapper, nn.Module):
        raise TypeError(
            f"wrapper_cls must return a module, and {name_of(wrapper_cls)} returned {wrapper!r}. "
            "Return the wrapped module from it."
        )
    return wrapper


def _replace(
    module: nn.Module,
    calls: Mapping[nn.Module, tuple[Wrapper, Options]],
    done: dict[nn.Module, nn.Module],
) -> nn.Module:
    """Wrap a module and those inside it as `calls` say, and return its replacement.

    `done` has the replacements so far: a module at two places gets one wrapper.
    """
    if module not in done:
        for name, child in children(module):
            new = _replace(child, calls, done)
            if new is not child:
                setattr(module, name, new)
        done[module] = _make_wrapper(module, *calls[module]) if module in calls else module
    return done[module]

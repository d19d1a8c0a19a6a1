"""Make a wrap look like the wrapped module: attributes, parameter names, state dict.

Names are the plain model's. State dicts contain full tensors. torch calls these hooks for every
wrap and module, inner wraps first. Each hook converts only a single wrap's entries:

    _begin_state   before the module's state_dict(): free full parameters, wait for all ranks
    _show_full     after the module's state_dict(): full tensors (or slices, if requested)
    _show_plain    after the wrap's state_dict(): plain names
    _take_plain    before the wrap's load_state_dict(): our names
    _take_slices   before the module's load_state_dict(): this rank's slices
    _after_load    after load_state_dict(): look the parameters up again

Hooks on the module support methods that call `self.state_dict()`, such as `save_pretrained`.

Sharded parameters, gradients and optimizer state are DTensors with the full shape and this rank's
slice.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._optimizers.modules import INNER, ModuleWrapper, plain_name
from manyhands._optimizers.wrappers import params_of, wrapped_attribute
from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.flat import is_dtensor, local_shard
from manyhands._tensors.profiler import Range
from manyhands._tensors.trees import tree_map_tensors
from manyhands.sharding._agreement import wait_for_all_ranks
from manyhands.sharding.fsdp._engine import Engine
from manyhands.sharding.fsdp._places import Place, Places, children, distinct_params, named_params

# Options that must agree between ranks; `print(model)` shows these.
COMPARED = (
    "reshard_after_forward",
    "disable_reshard_on_root",
    "mixed_precision",
    "fp32_reduce_scatter",
    "move_params_to_cpu",
    "compute_dtype",
    "buffer_dtype",
    "compute_device",
    "state_dict_device",
    "clear_autocast_cache",
    "force_input_to_fp32",
    "state_dict_on_rank_0_only",
    "gradient_predivide_factor",
    "overlap",
)

W = TypeVar("W", bound="Wrap")
V = TypeVar("V")
WrapReference: TypeAlias = "Callable[[], Wrap | None]"


class Wrap(ModuleWrapper):
    """Base class of `FullyShardedDataParallel`.

    Missing attributes are looked up in the wrapped module.
    """

    inner_name = INNER

    rank: int
    world_size: int
    compute_device: torch.device
    state_dict_device: torch.device
    state_dict_on_rank_0_only: bool
    _ranks: RankGroup
    _places: Places  # of the parameters outside inner wraps
    _engine: Engine | None  # None on one rank
    _is_root: bool | None = None  # None until a forward has decided
    _has_full_params = False  # while summon_full_params is open
    _in_local_state = False  # during local_state_dict and load_local_state_dict
    _in_state_dict = False  # during the state_dict of an outer wrap
    _former_buffer_dtypes: dict[str, torch.dtype]  # of buffers that were cast, by name

    def _register_inner(self, module: nn.Module) -> None:
        self.register_module(INNER, module)
        self._register_state_dict_hook(_show_plain)
        self._register_load_state_dict_pre_hook(_take_plain)
        self.register_load_state_dict_post_hook(_after_load)
        wrap = weakref.ref(self)  # avoids a cycle
        module.register_state_dict_pre_hook(partial(_begin_state, wrap))
        module._register_state_dict_hook(partial(_show_full, wrap))
        handle = module._register_load_state_dict_pre_hook(partial(_take_slices, wrap))
        # Before torch's checkpoint wrapper adds its prefix to the keys.
        module._load_state_dict_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]

    @property
    def module(self) -> nn.Module:
        inner = self._modules[INNER]
        assert inner is not None
        return inner

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules by the plain model's names."""
        if memo is None:
            memo = set()
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, module in self.module.named_modules(memo, prefix, remove_duplicate):
            yield plain_name(name + ".")[:-1], module

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell torch's distributed checkpoints which child's name state dicts omit."""
        return {"": INNER}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by the plain model's names, always the sharded parameters."""
        # Between forward and backward, a root's module may have full parameters.
        sharded: dict[int, nn.Parameter] = {}
        for wrap in wraps_in(self, Wrap):
            if wrap._engine is not None and not wrap._has_full_params:
                sharded.update(wrap._engine.sharded_by_full())
        for name, param in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name, sharded.get(id(param), param)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Wrap:
        super()._apply(fn, recurse)
        for wrap in wraps_in(self, Wrap):
            wrap._find_params_again()
        return self

    def _find_params_again(self) -> None:
        if self._engine is not None and not self._has_full_params:
            self._engine.find_params()

    def _reshard(self) -> None:
        for wrap in wraps_in(self, Wrap):
            if wrap._engine is not None:
                wrap._engine.module.reshard()

    def _compared_options(self) -> Mapping[str, object]:
        return {name: getattr(self, name) for name in COMPARED}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Before the module is registered, `self.module` would recurse.
            if INNER not in self.__dict__.get("_modules", {}):
                raise
            return wrapped_attribute(self, self.module, name)

    # Python looks up these methods on the class, bypassing __getattr__.

    def __getitem__(self, key: object) -> Any:
        return self.module[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True  # otherwise Python calls __len__

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it belongs to a process group. "
            "Save its state_dict(). For a copy, as in AveragedModel, copy the plain model before "
            "wrapping, and wrap the copy."
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce_ex__(4)  # else __getattr__ finds the module's

    # -- state dicts ---------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the plain model's state dict, with full tensors. Call it on every rank."""
        self._begin_state_dict()
        with _flag_on_wraps(self, "_in_state_dict"):
            return super().state_dict(*args, **kwargs)

    def _begin_state_dict(self) -> None:
        if self._in_state_dict:
            return
        self._reshard()
        if not self._in_local_state and self._engine is not None:
            wait_for_all_ranks(self._ranks, "state_dict()")

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load the plain model's state dict, without communication."""
        return super().load_state_dict(_add_our_versions(self, state_dict), strict, assign)

    # A subclass may call these in state_dict(), so they call Wrap's methods.

    def local_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's slices, by the plain model's names, without communication."""
        with _flag_on_wraps(self, "_in_local_state"):
            return Wrap.state_dict(self, *args, **kwargs)

    def load_local_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> _IncompatibleKeys:
        """Load the `local_state_dict()` of this rank, from a run of equal size."""
        with _flag_on_wraps(self, "_in_local_state"):
            return Wrap.load_state_dict(self, state_dict, strict=strict)

    def local_metadata_dict(self) -> dict[str, Any]:
        """Return facts about this rank's slices, for `consolidate_shard_weights`."""
        self._reshard()
        first_names: dict[int, str] = {}
        facts = {}
        for name, param in self.named_parameters(remove_duplicate=False):
            shards = 1
            if is_dtensor(param):
                # In a two-dimensional mesh, use only the first copy.
                shards = param.device_mesh.shape[-1]
            facts[name] = {
                "shape": list(param.shape),
                "same_as": first_names.setdefault(
                    id(param), name
                ),  # first name of a tied parameter
                "sharded": is_dtensor(param),
                "shards": shards,
            }
        buffers = [plain_name(name) for name, _ in self.named_buffers()]
        return {"param_metadata": facts, "buffer_names": buffers}

    @staticmethod
    def consolidate_shard_weights(
        shard_weights: Sequence[Mapping[str, Tensor]],
        shard_metadata: Sequence[Mapping[str, Any]],
        with_module_buffers: bool = True,
        strict: bool = True,
    ) -> dict[str, Tensor]:
        """Return the plain model's state dict from the `local_state_dict()` of every rank.

        `shard_metadata` are the ranks' `local_metadata_dict()`, in rank order. Buffers are rank
        0's. Without `strict`, missing parameters are omitted. Needs no process group.
        """
        result: dict[str, Tensor] = {}
        described = shard_metadata[0]["param_metadata"]
        if not isinstance(described, Mapping):
            raise ValueError(
                "these slices are from fairscale: consolidate them there, and load the result."
            )
        for name, facts in described.items():
            missing = [rank for rank, each in enumerate(shard_weights) if name not in each]
            if missing and strict:
                raise ValueError(f"parameter {name} is not in the weights of rank(s) {missing}.")
            if missing:
                continue
            if facts["same_as"] in result:
                result[name] = result[facts["same_as"]]
                continue
            # Unsharded parameters are equal on all ranks.
            tensor = shard_weights[0][name]
            if facts["sharded"]:  # by fully_shard, in dimension 0
                tensor = torch.cat([each[name] for each in shard_weights[: facts["shards"]]])
            if list(tensor.shape) != facts["shape"]:
                raise ValueError(
                    f"the slices of parameter {name} have shape {tuple(tensor.shape)} together, "
                    f"not {tuple(facts['shape'])}. Pass the slices of all ranks, in rank order."
                )
            result[name] = tensor
        if with_module_buffers:
            for name in shard_metadata[0]["buffer_names"]:
                if name in shard_weights[0]:
                    result[name] = shard_weights[0][name]
        return result

    # -- optimizer state -----------------------------------------------------------------------

    def gather_full_optim_state_dict(self, optim: Optimizer, **ignored: object) -> StateDict | None:
        """Return the plain optimizer's state dict on rank 0, and None on other ranks.

        Call it on every rank.
        """
        for wrap in wraps_in(self, Wrap):
            wrap.check_can_save(self)
        self._reshard()
        keep = self.rank == 0

        def collect(tensor: Tensor) -> Tensor | None:
            full = to_full(tensor.detach())
            return full.cpu().clone() if keep else None

        # All ranks take part in each gather.
        state = tree_map_tensors(collect, optim.state_dict())
        if not keep:
            return None
        # Changes of the result must not change the optimizer.
        state["state"] = {index: dict(each) for index, each in state["state"].items()}
        names = {id(param): name for name, param in self.named_parameters()}
        state["param_id_map"] = {}
        for i, param in enumerate(params_of(optim.param_groups)):
            if id(param) in names:
                state["param_id_map"][names[id(param)]] = i
        return state

    def get_shard_from_optim_state_dict(
        self, full_optim_state_dict: Mapping[str, Any]
    ) -> StateDict:
        """Return this rank's slices of the plain optimizer's state, for `load_state_dict`."""
        self._reshard()
        result = dict(full_optim_state_dict)
        params = dict(self.named_parameters())
        # A plain optimizer's state numbers parameters in model order.
        named = result.pop("param_id_map", None) or {name: i for i, name in enumerate(params)}
        of = {index: params[name] for name, index in named.items() if name in params}
        result["param_groups"] = copy.deepcopy(result["param_groups"])
        result["state"] = {}
        for i, state in full_optim_state_dict["state"].items():
            shard = partial(_shard_state, i, of[i])
            result["state"][i] = tree_map_tensors(shard, dict(state))
        return result

    def check_can_save(self, model: nn.Module) -> None:
        """Raise a ValueError if ranks train different parameters."""
        sharded = any(wrap.world_size > 1 for wrap in wraps_in(model, Wrap))
        if sharded and self.world_size == 1 and self.params:
            raise ValueError(
                f"a {type(self.module).__name__} is wrapped in a single-rank process group, so "
                "parameters differ between ranks, and a checkpoint would contain only a single "
                "rank's. Save each rank's state dicts in a separate file."
            )

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of this wrap outside inner wraps, without duplicates."""
        if self._engine is not None and not self._has_full_params:
            return list(self._engine.params)
        return distinct_params(self._places)


def wraps_in(module: nn.Module, kind: type[W]) -> list[W]:
    return [each for each in module.modules() if isinstance(each, kind)]


# -- state dicts -----------------------------------------------------------------------------------


def _begin_state(reference: WrapReference, *_: object) -> None:
    wrap = reference()
    if wrap is not None:
        wrap._begin_state_dict()


def _show_plain(wrap: Wrap, state: dict[str, object], prefix: str, _: object) -> None:
    for key, value in _pop_entries(state, prefix).items():
        state[key.replace(f"{prefix}{INNER}.", prefix, 1)] = value
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        for key, version in _pop_entries(versions, prefix[:-1]).items():
            versions[key] = version  # for loading a wrap inside a plain container
            # The module's version follows and replaces the wrap's.
            versions[plain_name(key + ".")[:-1]] = version


def _show_full(
    reference: WrapReference, _: object, state: dict[str, object], prefix: str, __: object
) -> None:
    wrap = reference()
    if wrap is None:
        return
    own = _pop_entries(state, prefix)
    if wrap._in_local_state:
        for key, value in own.items():
            state[key] = local_shard(value) if isinstance(value, Tensor) else value
        return
    keep = not wrap.state_dict_on_rank_0_only or wrap.rank == 0
    tied = {prefix + name: id(param) for name, param in named_params(wrap._places)}
    done: dict[int | str, Tensor | None] = {}  # gathers a tied parameter only once
    for key, value in own.items():
        parameter = tied.get(key, key)
        if isinstance(value, Tensor) and is_dtensor(value):
            if parameter not in done:
                # A collective: all ranks take part.
                full = to_full(value.detach())
                done[parameter] = full.to(wrap.state_dict_device) if keep else None
            value = done[parameter]
        elif isinstance(value, Tensor):
            value = value.to(wrap._former_buffer_dtypes.get(key[len(prefix) :], value.dtype))
        if keep:
            state[key] = value


def _pop_entries(entries: dict[str, V], prefix: str) -> dict[str, V]:
    """Remove and return the entries with the prefix."""
    return {key: entries.pop(key) for key in list(entries) if key.startswith(prefix)}


def _take_plain(state: dict[str, object], prefix: str, *_: object) -> None:
    items = list(state.items())
    state.clear()
    for key, value in items:
        if key.startswith(prefix):
            key = f"{prefix}{INNER}.{key[len(prefix) :]}"
        state[key] = value


def _take_slices(
    reference: WrapReference, state: dict[str, object], prefix: str, *_: object
) -> None:
    wrap = reference()
    if wrap is None:
        return
    wrap._reshard()
    convert = from_local if wrap._in_local_state else shard_like
    for name, param in named_params(wrap._places):
        value = state.get(prefix + name)
        # For other shapes, torch's error names the parameter.
        if isinstance(value, Tensor) and (wrap._in_local_state or value.shape == param.shape):
            state[prefix + name] = convert(value, param)


def _add_our_versions(wrap: nn.Module, state: Mapping[str, V]) -> Mapping[str, V]:
    """Add the modules' versions under our names, for torch's lookups."""
    versions = getattr(state, "_metadata", None)
    if versions is None:
        return state
    copied = OrderedDict(state)
    ours = dict(versions)
    for path in _state_dict_paths(wrap):
        version = versions.get(plain_name(path)[:-1])
        if version is not None:
            ours[path[:-1]] = version
    copied._metadata = ours  # type: ignore[attr-defined]
    return copied


def _state_dict_paths(module: nn.Module, path: str = "") -> Iterator[str]:
    yield path
    for name, child in children(module):
        yield from _state_dict_paths(child, f"{path}{name}.")


def _after_load(wrap: Wrap, keys: _IncompatibleKeys) -> None:
    wrap._find_params_again()
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = [plain_name(name) for name in names]


@contextmanager
def _flag_on_wraps(outer: Wrap, flag: str) -> Iterator[None]:
    former = [(wrap, getattr(wrap, flag)) for wrap in wraps_in(outer, Wrap)]
    try:
        for wrap, _ in former:
            setattr(wrap, flag, True)
        yield
    finally:
        for wrap, value in former:
            setattr(wrap, flag, value)


# -- from slices to full tensors and back ----------------------------------------------------------


def to_full(tensor: Any) -> Any:
    if is_dtensor(tensor):
        return tensor.full_tensor()
    return tensor


def shard_like(tensor: Tensor, like: Any) -> Tensor:
    """Shard a full tensor like `like`, without communication."""
    if not is_dtensor(like) or is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    full = tensor.detach().to(like.device)
    # Every rank cuts a slice locally (src_data_rank=None).
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def from_local(tensor: Tensor, like: Any) -> Tensor:
    """Return a tensor sharded like `like`, with `tensor` as this rank's slice."""
    if not is_dtensor(like) or is_dtensor(tensor):
        return tensor
    if tensor.shape != like.to_local().shape:
        raise ValueError(
            f"got a slice of shape {tuple(tensor.shape)}, but this rank's slice has shape "
            f"{tuple(like.to_local().shape)}. local_state_dict() needs an equal number of ranks; "
            "use state_dict() or manyhands.save instead."
        )
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,  # the check is a collective per parameter
        shape=like.shape,
        stride=like.stride(),
    )


@contextmanager
def summon_parameters(places: Sequence[Place], *, keep: bool) -> Iterator[None]:
    """Put full parameters at these places; with `keep`, write changes back."""
    former = [(module, name, module._parameters[name]) for module, name in places]
    full: dict[object, nn.Parameter] = {}  # tied parameters stay tied
    with torch.no_grad(), Range("manyhands::gather parameters"):
        for _, _, param in former:
            if param is not None and param not in full:
                full[param] = nn.Parameter(to_full(param).clone(), param.requires_grad)
    for module, name, param in former:
        module._parameters[name] = full.get(param)
    try:
        yield
    finally:
        with torch.no_grad(), Range("manyhands::free parameters"):
            for module, name, param in former:
                now = module._parameters[name]
                module._parameters[name] = param
                if keep and param is not None and now is not None:
                    param.copy_(shard_like(now.detach(), param))


def _shard_state(index: int, param: Tensor, tensor: Tensor) -> Tensor:
    if tensor.shape == param.shape:
        return shard_like(tensor, param)
    # A single number (a step count) is equal on all ranks.
    if tensor.numel() > 1:
        raise ValueError(
            f"the state of parameter {index} has shape {tuple(tensor.shape)}, but the parameter "
            f"has shape {tuple(param.shape)}: the state belongs to a different model."
        )
    return tensor.clone()

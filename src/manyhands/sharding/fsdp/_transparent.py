"""Show a wrap as the module inside: attributes, names of parameters, state dict.

Names are the plain model's, and a state dict has the plain model's full tensors. torch calls these
hooks for every wrap and its module, inner ones first, so each converts only its own entries:

    _begin_state   before state_dict() of the module: free full parameters, wait for all ranks
    _show_full     after it: full tensors (or slices, if asked for)
    _show_plain    after state_dict() of the wrap: plain names
    _take_plain    before load_state_dict() of the wrap: our names
    _take_slices   before that of the module: this rank's slices
    _after_load    after load_state_dict(): look the parameters up again

The module's own hooks are there for methods that call `self.state_dict()`, such as
`save_pretrained`.

A sharded tensor (a parameter, its gradient, its optimizer state) is a DTensor: it has the shape of
the full tensor and holds this rank's slice. Tensors that are not sharded pass through unchanged.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._optimizers.modules import INNER, ModuleWrapper, plain_name
from manyhands._optimizers.wrappers import wrapped_attribute
from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.flat import is_dtensor, local_shard
from manyhands._tensors.trees import tree_map_tensors
from manyhands.sharding._agreement import params_in, wait_for_all_ranks
from manyhands.sharding.fsdp._engine import Engine
from manyhands.sharding.fsdp._places import Place, Places, children, distinct_params, named_params

# Options that must be the same on every rank, and are shown by `print(model)`.
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
    """Base class of `FullyShardedDataParallel`. It is used in place of the module inside.

    Attributes that a wrap lacks are looked up in the module registered as `INNER`.
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
    _holds_full = False  # while summon_full_params is open
    _in_local_state = False  # while local_state_dict or load_local_state_dict run
    _in_state_dict = False  # while state_dict of a wrap around this one runs
    _former_buffer_dtypes: dict[str, torch.dtype]  # of buffers that were cast, by name

    def _hold(self, module: nn.Module) -> None:
        self.register_module(INNER, module)
        self._register_state_dict_hook(_show_plain)
        self._register_load_state_dict_pre_hook(_take_plain)
        self.register_load_state_dict_post_hook(_after_load)
        wrap = weakref.ref(self)  # the module must not keep its wrap alive
        module.register_state_dict_pre_hook(partial(_begin_state, wrap))
        module._register_state_dict_hook(partial(_show_full, wrap))
        handle = module._register_load_state_dict_pre_hook(partial(_take_slices, wrap))
        # Before torch's checkpoint wrapper puts another name into the keys.
        module._load_state_dict_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        inner = self._modules[INNER]
        assert inner is not None
        return inner

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules by the plain model's names. A wrap comes before its module, of one name."""
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
        """Tell torch's distributed checkpoints which child's name is in no state dict."""
        return {"": INNER}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by the plain model's names, always the sharded ones."""
        # Between a forward and its backward, a root's module may hold full parameters. An
        # optimizer made then must get the sharded ones.
        sharded: dict[int, nn.Parameter] = {}
        for wrap in wraps_in(self, Wrap):
            if wrap._engine is not None and not wrap._holds_full:
                sharded.update(wrap._engine.sharded_by_full())
        for name, param in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name, sharded.get(id(param), param)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Wrap:
        """Convert or move the module (`to`, `half`), and look up replaced parameters."""
        super()._apply(fn, recurse)
        for wrap in wraps_in(self, Wrap):
            wrap._find_params_again()
        return self

    def _find_params_again(self) -> None:
        if self._engine is not None and not self._holds_full:
            self._engine.find_params()

    def _reshard(self) -> None:
        for wrap in wraps_in(self, Wrap):
            if wrap._engine is not None:
                wrap._engine.module.reshard()

    def _compared_options(self) -> Mapping[str, object]:
        return {name: getattr(self, name) for name in COMPARED}

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped module's attribute."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            # While __init__ runs there is no wrapped module, and `self.module` would recurse.
            if INNER not in self.__dict__.get("_modules", {}):
                raise
            return wrapped_attribute(self, self.module, name)

    # Python looks these up on the class, so __getattr__ does not reach them.

    def __getitem__(self, key: object) -> Any:
        return self.module[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True  # otherwise Python would call __len__, and most modules have no length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is not copied or pickled: it is tied to its process group. "
            "Save its state_dict(). For a copy, as AveragedModel makes it, copy the plain model "
            "before wrapping, and wrap the copy in the same way."
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce_ex__(4)  # without this method, that of the module inside would be found

    # -- state dicts ---------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the plain model's state dict, with full tensors. Call it on every rank."""
        self._begin_state_dict()
        with _set_flag_on_wraps(wraps_in(self, Wrap), "_in_state_dict"):
            return super().state_dict(*args, **kwargs)

    def _begin_state_dict(self) -> None:
        """Before a state dict: free gathered parameters, and wait until all ranks are here."""
        if self._in_state_dict:
            return
        self._reshard()
        if not self._in_local_state and self._engine is not None:
            # An error, not a hang, if a rank is missing.
            wait_for_all_ranks(self._ranks, "state_dict()")

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load the plain model's state dict: every rank takes its slices. Nothing is sent."""
        return super().load_state_dict(_add_our_versions(self, state_dict), strict, assign)

    # The next two name the class: a subclass may define state_dict() by way of them.

    def local_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's slices, by the plain model's names. Nothing is sent."""
        with _set_flag_on_wraps(wraps_in(self, Wrap), "_in_local_state"):
            return Wrap.state_dict(self, *args, **kwargs)

    def load_local_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> _IncompatibleKeys:
        """Load the `local_state_dict()` of this rank, from a run with the same number of ranks."""
        with _set_flag_on_wraps(wraps_in(self, Wrap), "_in_local_state"):
            return Wrap.load_state_dict(self, state_dict, strict=strict)

    def local_metadata_dict(self) -> dict[str, Any]:
        """Return facts about this rank's slices, for `consolidate_shard_weights`."""
        self._reshard()
        first_names: dict[int, str] = {}
        facts = {}
        for name, param in self.named_parameters(remove_duplicate=False):
            shards = 1
            if is_dtensor(param):
                # A mesh of two dimensions has copies of the shards, the first one's first.
                shards = param.device_mesh.shape[-1]
            facts[name] = {
                "shape": list(param.shape),
                "same_as": first_names.setdefault(id(param), name),  # the first name of a tied one
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

        `shard_metadata` are the ranks' `local_metadata_dict()`. Both are in rank order. Buffers
        are rank 0's. Without `strict`, missing parameters are left out. Needs no process group.
        """
        result: dict[str, Tensor] = {}
        described = shard_metadata[0]["param_metadata"]
        if not isinstance(described, Mapping):
            raise ValueError(
                "these slices are fairscale's: put them together there, and load that."
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
            # An unsharded parameter is the same on all ranks.
            tensor = shard_weights[0][name]
            if facts["sharded"]:  # by fully_shard, in dimension 0
                tensor = torch.cat([each[name] for each in shard_weights[: facts["shards"]]])
            if list(tensor.shape) != facts["shape"]:
                raise ValueError(
                    f"the slices of parameter {name} make {tuple(tensor.shape)}, and it is "
                    f"{tuple(facts['shape'])}. Give those of all ranks, in rank order."
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

        Call it on every rank. Parameters in a group of one, listed as `uncollected_local_ids`, get
        rank 0's own state: other ranks have to save theirs.
        """
        self._reshard()
        keep = self.rank == 0

        def collect(tensor: Tensor) -> Tensor | None:
            full = to_full(tensor.detach())  # on every rank
            return full.cpu().clone() if keep else None

        # Ranks that keep nothing take part in each gather, and free each tensor at once.
        state = tree_map_tensors(collect, optim.state_dict())
        if not keep:
            return None
        # New dicts, so that the caller may change the result without changing the optimizer.
        state["state"] = {index: dict(each) for index, each in state["state"].items()}
        names = {id(param): name for name, param in self.named_parameters()}
        private = self._private_params()
        state["param_id_map"] = {}
        local_ids = []
        for i, param in enumerate(params_in(optim.param_groups)):
            if id(param) in names:
                state["param_id_map"][names[id(param)]] = i
            if id(param) in private:
                local_ids.append(i)
        if private:
            state["uncollected_local_ids"] = local_ids
        return state

    def get_shard_from_optim_state_dict(
        self, full_optim_state_dict: Mapping[str, Any]
    ) -> StateDict:
        """Return this rank's slices of the plain optimizer's state, for `load_state_dict`.

        Rank 0's own state of parameters in a group of one is left out on other ranks.
        """
        self._reshard()
        result = dict(full_optim_state_dict)
        result.pop("uncollected_local_ids", None)
        left_out: set[int] = set()
        if self.rank > 0:
            left_out = self._private_params()
        params = dict(self.named_parameters())
        # A state without names, such as a plain optimizer's, numbers parameters in the model's
        # order.
        named = result.pop("param_id_map", None) or {name: i for i, name in enumerate(params)}
        of = {index: params[name] for name, index in named.items() if name in params}
        result["param_groups"] = copy.deepcopy(result["param_groups"])
        result["state"] = {}
        for i, state in full_optim_state_dict["state"].items():
            if id(of[i]) not in left_out:
                shard = partial(_shard_state, i, of[i])
                result["state"][i] = tree_map_tensors(shard, dict(state))
        return result

    def _private_params(self) -> set[int]:
        """Return the ids of parameters that each rank has for itself, in inner groups of one."""
        if self.world_size == 1:
            return set()
        found: set[int] = set()
        for wrap in wraps_in(self, Wrap):
            if wrap.world_size == 1:
                found.update(id(param) for param in wrap.params)
        return found

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of this wrap, without those of wraps inside; each once."""
        if self._engine is not None and not self._holds_full:
            return list(self._engine.params)
        return distinct_params(self._places)


def wraps_in(module: nn.Module, kind: type[W]) -> list[W]:
    """Return the wraps of this class among a module and those inside, each once."""
    return [each for each in module.modules() if isinstance(each, kind)]


# -- state dicts -----------------------------------------------------------------------------------


def _begin_state(reference: WrapReference, *_: object) -> None:
    """Before the module's state_dict(): begin it, unless a wrap's state_dict() has done so."""
    wrap = reference()
    if wrap is not None:
        wrap._begin_state_dict()


def _show_plain(wrap: Wrap, state: dict[str, object], prefix: str, _: object) -> None:
    for key, value in _pop_last_entries(state, prefix).items():
        state[key.replace(f"{prefix}{INNER}.", prefix, 1)] = value
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        for key, version in _pop_last_entries(versions, prefix[:-1]).items():
            versions[key] = version  # for loading a wrap inside a plain container
            # The wrapped module comes after its wrap, so its version replaces the wrap's.
            versions[plain_name(key + ".")[:-1]] = version


def _show_full(
    reference: WrapReference, _: object, state: dict[str, object], prefix: str, __: object
) -> None:
    wrap = reference()
    if wrap is None:
        return
    own = _pop_last_entries(state, prefix)
    if wrap._in_local_state:
        for key, value in own.items():
            state[key] = local_shard(value) if isinstance(value, Tensor) else value
        return
    keep = not wrap.state_dict_on_rank_0_only or wrap.rank == 0
    tied = {prefix + name: id(param) for name, param in named_params(wrap._places)}
    done: dict[int | str, Tensor | None] = {}  # a tied parameter is gathered once
    for key, value in own.items():
        parameter = tied.get(key, key)
        if isinstance(value, Tensor) and is_dtensor(value):
            if parameter not in done:
                # A collective, also on ranks that keep nothing.
                full = to_full(value.detach())
                done[parameter] = full.to(wrap.state_dict_device) if keep else None
            value = done[parameter]
        elif isinstance(value, Tensor):
            value = value.to(wrap._former_buffer_dtypes.get(key[len(prefix) :], value.dtype))
        if keep:
            state[key] = value


def _pop_last_entries(entries: dict[str, V], prefix: str) -> dict[str, V]:
    """Take out the last entries, as far as their keys have the prefix, and keep their order."""
    # A wrap's entries were added last. Popping from the end avoids a scan of the whole dict for
    # each wrap.
    popped = []
    while entries:
        key, value = entries.popitem()
        if not key.startswith(prefix):
            entries[key] = value
            break
        popped.append((key, value))
    return dict(reversed(popped))


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
        # A tensor of another shape is left as it is: torch's error names the parameter.
        if isinstance(value, Tensor) and (wrap._in_local_state or value.shape == param.shape):
            state[prefix + name] = convert(value, param)


def _add_our_versions(wrap: nn.Module, state: Mapping[str, V]) -> Mapping[str, V]:
    """Return a state dict that has the modules' versions, if any, under our names as well."""
    # torch looks a module's version up by its path, and ours contain `INNER`.
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
    """Yield the prefix of each module in torch's state dicts, with our names in it."""
    yield path
    for name, child in children(module):
        yield from _state_dict_paths(child, f"{path}{name}.")


def _after_load(wrap: Wrap, keys: _IncompatibleKeys) -> None:
    """Look up parameters that loading may have assigned, and report keys by plain names."""
    wrap._find_params_again()
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = [plain_name(name) for name in names]


@contextmanager
def _set_flag_on_wraps(wraps: Iterable[Wrap], flag: str) -> Iterator[None]:
    """Set this attribute of all wraps to True inside, and restore it afterwards."""
    former = [(wrap, getattr(wrap, flag)) for wrap in wraps]
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
    """Shard a full tensor in the same way as `like`. Nothing is sent."""
    if not is_dtensor(like) or is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    full = tensor.detach().to(like.device)
    # Every rank has the full tensor, so each cuts a slice (src_data_rank=None).
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def from_local(tensor: Tensor, like: Any) -> Tensor:
    """Return a tensor sharded as `like` is, with `tensor` as this rank's slice."""
    if not is_dtensor(like) or is_dtensor(tensor):
        return tensor
    if tensor.shape != like.to_local().shape:
        raise ValueError(
            f"got a slice of shape {tuple(tensor.shape)}, and this rank's has the shape "
            f"{tuple(like.to_local().shape)}. local_state_dict() fits only as many ranks; use "
            "state_dict() or manyhands.save."
        )
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,  # the check would be a collective for each parameter
        shape=like.shape,
        stride=like.stride(),
    )


@contextmanager
def hold_full_parameters(places: Sequence[Place], *, keep: bool) -> Iterator[None]:
    """Give modules full parameters at these places; with `keep`, changes stay afterwards."""
    former = [(module, name, module._parameters[name]) for module, name in places]
    full: dict[object, nn.Parameter] = {}  # by sharded one: tied parameters stay tied
    with torch.no_grad():
        for _, _, param in former:
            if param is not None and param not in full:
                full[param] = nn.Parameter(to_full(param).clone(), param.requires_grad)
    for module, name, param in former:
        module._parameters[name] = full.get(param)
    try:
        yield
    finally:
        for module, name, param in former:
            # The user may have assigned another parameter.
            now = module._parameters[name]
            module._parameters[name] = param
            if keep and param is not None and now is not None:
                with torch.no_grad():
                    param.copy_(shard_like(now.detach(), param))


def _shard_state(index: int, param: Tensor, tensor: Tensor) -> Tensor:
    if tensor.shape == param.shape:
        return shard_like(tensor, param)
    # A single number, such as Adam's step count, is the same on all ranks.
    if tensor.numel() > 1:
        raise ValueError(
            f"the state of parameter {index} has the shape {tuple(tensor.shape)}, and the "
            f"parameter {tuple(param.shape)}: it is another model's."
        )
    return tensor.clone()

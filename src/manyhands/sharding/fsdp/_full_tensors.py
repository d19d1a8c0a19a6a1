"""Slices and wholes: tensors of the plain model put together from the workers', and taken apart.

A sharded tensor (a parameter, its gradient, its optimizer state) is a DTensor: it has the shape of
the whole and holds this worker's slice. Where nothing is sharded all of this leaves tensors as
they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._core.dtensor import is_dtensor
from manyhands._core.trees import tree_map_tensors
from manyhands.sharding.fsdp._used_params import Place


def whole(tensor: Any) -> Any:
    """All of a sharded tensor, on every worker; to be called on each."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def sliced(tensor: Tensor, like: Any) -> Tensor:
    """A whole tensor, sharded as another one is; nothing is sent."""
    if not is_dtensor(like) or is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    there = tensor.detach().to(like.device)
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)


def from_local(tensor: Tensor, like: Any) -> Tensor:
    """A sharded tensor of which `tensor` is this worker's slice."""
    if not is_dtensor(like) or is_dtensor(tensor):
        return tensor
    if tensor.shape != like.to_local().shape:
        raise ValueError(
            f"a slice of shape {tuple(tensor.shape)} came for a parameter of which this worker "
            f"holds {tuple(like.to_local().shape)}. local_state_dict() fits the same number of "
            "workers only; use state_dict() or manyhands.save to change it."
        )
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


@contextmanager
def whole_parameters(places: Sequence[Place], *, keep: bool) -> Iterator[None]:
    """Modules hold whole parameters at these places; with `keep`, changes stay afterwards."""
    held = [(module, name, module._parameters[name]) for module, name in places]
    wholes: dict[int, nn.Parameter] = {}  # tied ones are one
    with torch.no_grad():
        for _, _, param in held:
            if param is not None and id(param) not in wholes:
                wholes[id(param)] = nn.Parameter(whole(param).clone(), param.requires_grad)
    for module, name, param in held:
        if param is not None:
            module._parameters[name] = wholes[id(param)]
    try:
        yield
    finally:
        for module, name, param in held:
            now, module._parameters[name] = module._parameters[name], param
            if keep and param is not None and now is not None:
                with torch.no_grad():
                    param.copy_(sliced(now.detach(), param))


# -- state dicts of models --------------------------------------------------------------------


def gathered(
    state: dict[str, Any], tied: Mapping[str, int], device: torch.device, *, here: bool
) -> None:
    """Replace sharded tensors by whole ones, on the device; or, if not `here`, only help to.

    `tied` says which keys are of one parameter, and stay one tensor.
    """
    done: dict[Any, Any] = {}
    for key, value in list(state.items()):
        if is_dtensor(value):
            which = tied.get(key, key)
            if which not in done:
                full = whole(value.detach())
                done[which] = full.to(device) if here else None
            state[key] = done[which]


def rename(state: dict[str, Any], prefix: str, *, without: str = "", within: str = "") -> None:
    """Take a name out of, or put one in, all keys that begin with the prefix, in their order."""
    items = list(state.items())
    state.clear()
    for key, value in items:
        if key.startswith(prefix + without):
            key = prefix + within + key[len(prefix + without) :]
        state[key] = value


def consolidated(
    weights: Sequence[Mapping[str, Tensor]],
    metadata: Sequence[Mapping[str, Any]],
    with_buffers: bool,
    strict: bool,
) -> dict[str, Tensor]:
    """The plain model's state dict from each worker's slices."""
    if not weights or len(weights) != len(metadata):
        raise ValueError(
            f"{len(weights)} dict(s) of weights and {len(metadata)} of metadata came. Give each "
            "worker's, in rank order."
        )
    if isinstance(metadata[0].get("param_metadata"), list):
        return from_fairscale(weights, metadata, with_buffers, strict)
    result: dict[str, Tensor] = {}
    for name, facts in metadata[0]["param_metadata"].items():
        if missing := [rank for rank, each in enumerate(weights) if name not in each]:
            if strict:
                raise ValueError(
                    f"parameter {name} is not in the weights of rank(s) {missing}. Give all, or "
                    "strict=False to leave it out."
                )
            continue
        if facts["same_as"] != name and facts["same_as"] in result:
            result[name] = result[facts["same_as"]]
            continue
        slices = [each[name] for each in weights]
        tensor = torch.cat(slices) if facts["sharded"] else slices[0]
        if list(tensor.shape) != facts["shape"]:
            raise ValueError(
                f"the slices of parameter {name} make {tuple(tensor.shape)}, and it is "
                f"{tuple(facts['shape'])}. Give the slices of all workers, in rank order."
            )
        result[name] = tensor
    if with_buffers:
        result.update({n: weights[0][n] for n in metadata[0]["buffer_names"] if n in weights[0]})
    return result


# -- the optimizer's state --------------------------------------------------------------------


def full_optimizer_state(
    optimizer: Optimizer, names: Mapping[int, str], own: set[int], *, here: bool
) -> dict[str, Any] | None:
    """The plain optimizer's state dict, whole and on the CPU; on workers that are not `here`, None.

    `names` are those of parameters, by id; `own` are ids of those that each worker has for itself.
    """
    state = tree_map_tensors(
        lambda tensor: _to_cpu(whole(tensor.detach()), here=here), optimizer.state_dict()
    )
    if not here:
        return None
    state["state"] = {index: dict(each) for index, each in state["state"].items()}  # not its own
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state["param_id_map"] = {names[id(p)]: i for i, p in enumerate(params) if id(p) in names}
    if own:
        state["uncollected_local_ids"] = [i for i, p in enumerate(params) if id(p) in own]
    return state


def _to_cpu(tensor: Tensor, *, here: bool) -> Tensor | None:
    return tensor.cpu().clone() if here else None


def sharded_optimizer_state(
    state: Mapping[str, Any], params: Mapping[str, Tensor], left_out: set[int]
) -> dict[str, Any]:
    """This worker's slices of the state, which `optimizer.load_state_dict` is to be given.

    `params` are the model's by name, in their order, which a state without names has, too;
    `left_out` are ids of those whose state is not this worker's.
    """
    named = state.get("param_id_map") or {name: i for i, name in enumerate(params)}
    of = {index: params[name] for name, index in named.items() if name in params}
    known = {index for group in state["param_groups"] for index in group["params"]}
    if missing := sorted(known - of.keys()):
        raise ValueError(
            f"the optimizer's state has {len(known)} parameters and the model {len(params)}; "
            f"there is none for number {missing[0]}. Give the state of the same model."
        )
    ours = ("param_id_map", "uncollected_local_ids", "state")
    result = {k: v for k, v in state.items() if k not in ours}
    result["param_groups"] = copy.deepcopy(state["param_groups"])
    result["state"] = {
        i: _sliced_state(i, s, of[i])
        for i, s in state["state"].items()
        if id(of[i]) not in left_out
    }
    return result


def _sliced_state(index: int, state: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    def change(tensor: Tensor) -> Tensor:
        if tensor.shape == param.shape:
            return sliced(tensor, param)
        if tensor.numel() > 1:
            raise ValueError(
                f"the state of parameter {index} has a tensor of shape {tuple(tensor.shape)}, and "
                f"the parameter is {tuple(param.shape)}. Give the state of the same model."
            )
        return tensor.clone()

    return {name: tree_map_tensors(change, value) for name, value in state.items()}


def from_fairscale(
    weights: Sequence[Mapping[str, Tensor]],
    metadata: Sequence[Mapping[str, Any]],
    with_buffers: bool,
    strict: bool,
) -> dict[str, Tensor]:
    """The plain model's state dict from each worker's `local_state_dict()` of fairscale."""
    result: dict[str, Tensor] = {}
    wraps = metadata[0]["param_metadata"]
    counts = [len(each["param_metadata"]) for each in metadata]
    if len(set(counts)) > 1:
        raise ValueError(f"the ranks' metadata are of different models: {counts} wraps.")
    for number, wrap in enumerate(wraps):
        paddings = [each["param_metadata"][number]["params"] for each in metadata]
        ranks = 1 if wrap["no_broadcast_optim_state"] else len(weights)
        for vector, facts in wrap["params"].items():
            key = _joined(wrap["fsdp_path"], vector)
            if missing := [rank for rank in range(ranks) if key not in weights[rank]]:
                if strict:
                    raise ValueError(
                        f"{key} is not in the weights of rank(s) {missing}. Give all, or "
                        "strict=False to leave it out."
                    )
                continue
            slices = [
                _unpadded(weights[rank][key], paddings[rank][vector]["padding"])
                for rank in range(ranks)
            ]
            whole = torch.cat(slices)
            if whole.numel() != sum(facts["numels"]):
                raise ValueError(
                    f"the slices of {key} have {whole.numel()} elements, and its parameters "
                    f"{sum(facts['numels'])}. Give the slices of all workers, in rank order."
                )
            parts = whole.split(list(facts["numels"]))
            for name, shape, part in zip(facts["names"], facts["shapes"], parts, strict=True):
                result[_joined(wrap["fsdp_path"], name)] = part.view(shape)
    for wrap in wraps:
        for there, other in wrap["shared_param_info"]:
            tied = _joined(wrap["fsdp_path"], there)
            if tied in result:
                result[_joined(wrap["fsdp_path"], other)] = result[tied]
    _add_unlisted_ties(result, weights, metadata[0])
    if with_buffers:
        names = metadata[0]["buffer_names"]
        if strict and (missing_buffers := [name for name in names if name not in weights[0]]):
            raise ValueError(
                f"buffers {missing_buffers} are not in rank 0's weights. Give all, or strict=False "
                "or with_module_buffers=False to leave them out."
            )
        result.update({name: weights[0][name] for name in names if name in weights[0]})
    return result


def _add_unlisted_ties(
    result: dict[str, Tensor], weights: Sequence[Mapping[str, Tensor]], metadata: Mapping[str, Any]
) -> None:
    """Add tied parameters of wraps that do not flatten: their metadata do not say which they are.

    Each name of one is in the weights, with the same slices as the name that is listed.
    """
    listed = {
        _joined(wrap["fsdp_path"], vector)
        for wrap in metadata["param_metadata"]
        for vector in wrap["params"]
    }
    for other in weights[0].keys() - listed - result.keys() - set(metadata["buffer_names"]):
        for there in sorted(listed & result.keys()):
            if all(other in each and _same(each[other], each[there]) for each in weights):
                result[other] = result[there]
                break


def _same(first: Tensor, second: Tensor) -> bool:
    return first is second or (first.shape == second.shape and torch.equal(first, second))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _unpadded(vector: Tensor, padding: int) -> Tensor:
    return vector.reshape(-1)[: vector.numel() - padding]

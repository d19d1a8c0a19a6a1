"""From slices to full tensors and back: parameters, state dicts and optimizer state.

A sharded tensor (a parameter, its gradient, its optimizer state) is a DTensor: it has the shape of
the full tensor and holds this rank's slice. Tensors that are not sharded pass through unchanged.

Slices that fairscale saved are put together here, too, without fairscale and without a process
group. Its `local_metadata_dict()` has a list `param_metadata` with one entry for each wrap:

    fsdp_path                   the module that is wrapped, "" for the outermost
    params                      for each flat vector: the parameters laid out in it one after the
                                other, by name, shape and number of elements, and `padding`, the
                                elements added to this rank's slice to make all slices as long
    shared_param_info           names of tied parameters: (the name in `params`, the other name)
    no_broadcast_optim_state    each rank has its own parameters, and rank 0's are used

Names are relative to the wrap's module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._core.modules import plain_name
from manyhands._core.sharded import is_dtensor
from manyhands._core.trees import tree_map_tensors
from manyhands.sharding.fsdp._places import Place


def to_full(tensor: Any) -> Any:
    """Return a sharded tensor in full, on every rank. Call it on every rank."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def shard_like(tensor: Tensor, like: Any) -> Tensor:
    """Shard a full tensor in the same way as `like`. Nothing is sent."""
    if not is_dtensor(like) or is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    full = tensor.detach().to(like.device)
    # Every rank has the full tensor, so each cuts its own slice (src_data_rank=None).
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def from_local(tensor: Tensor, like: Any) -> Tensor:
    """Return a tensor sharded as `like` is, with `tensor` as this rank's slice."""
    if not is_dtensor(like) or is_dtensor(tensor):
        return tensor
    if tensor.shape != like.to_local().shape:
        raise ValueError(
            f"got a slice of shape {tuple(tensor.shape)} for a parameter whose slice on this rank "
            f"has the shape {tuple(like.to_local().shape)}. local_state_dict() fits only the same "
            "number of ranks; use state_dict() or manyhands.save to change it."
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
    full: dict[int, nn.Parameter] = {}  # by id of the sharded one: tied parameters stay tied
    with torch.no_grad():
        for _, _, param in former:
            if param is not None and id(param) not in full:
                full[id(param)] = nn.Parameter(to_full(param).clone(), param.requires_grad)
    for module, name, param in former:
        if param is not None:
            module._parameters[name] = full[id(param)]
    try:
        yield
    finally:
        for module, name, param in former:
            # What is there now counts, as the user may have assigned another parameter.
            now, module._parameters[name] = module._parameters[name], param
            if keep and param is not None and now is not None:
                with torch.no_grad():
                    param.copy_(shard_like(now.detach(), param))


# -- every rank's slices of a model, put together --------------------------------------------------


def describe_slices(
    params: Iterable[tuple[str, nn.Parameter]], buffers: Iterable[str]
) -> dict[str, Any]:
    """Return what `consolidate_shard_weights` needs to know about this rank's slices."""
    first_names: dict[int, str] = {}
    facts = {}
    for name, param in params:
        facts[name] = {
            "shape": list(param.shape),
            "same_as": first_names.setdefault(id(param), name),  # the first name of a tied one
            "sharded": is_dtensor(param),
        }
    return {"param_metadata": facts, "buffer_names": [plain_name(name) for name in buffers]}


def consolidate_slices(
    weights: Sequence[Mapping[str, Tensor]],
    metadata: Sequence[Mapping[str, Any]],
    with_buffers: bool,
    strict: bool,
) -> dict[str, Tensor]:
    """Return the plain model's state dict from every rank's slices."""
    if not weights or len(weights) != len(metadata):
        raise ValueError(
            f"got {len(weights)} dict(s) of weights and {len(metadata)} of metadata. Give those of "
            "every rank, in rank order."
        )
    # fairscale's metadata have a list here, ours a dict.
    if isinstance(metadata[0].get("param_metadata"), list):
        return from_fairscale(weights, metadata, with_buffers, strict)
    result: dict[str, Tensor] = {}
    for name, facts in metadata[0]["param_metadata"].items():
        if missing := [rank for rank, each in enumerate(weights) if name not in each]:
            if strict:
                raise ValueError(
                    f"parameter {name} is not in the weights of rank(s) {missing}. Give the "
                    "weights of every rank, or strict=False to leave the parameter out."
                )
            continue
        if facts["same_as"] != name and facts["same_as"] in result:
            result[name] = result[facts["same_as"]]
            continue
        slices = [each[name] for each in weights]
        # fully_shard cuts in dimension 0. What is not sharded is the same on all ranks.
        tensor = torch.cat(slices) if facts["sharded"] else slices[0]
        if list(tensor.shape) != facts["shape"]:
            raise ValueError(
                f"the slices of parameter {name} make {tuple(tensor.shape)}, and it is "
                f"{tuple(facts['shape'])}. Give the slices of all ranks, in rank order."
            )
        result[name] = tensor
    if with_buffers:
        result.update({n: weights[0][n] for n in metadata[0]["buffer_names"] if n in weights[0]})
    return result


# -- optimizer state --------------------------------------------------------------------


def full_optimizer_state(
    optimizer: Optimizer, names: Mapping[int, str], private: set[int], *, keep: bool
) -> StateDict | None:
    """Return the plain optimizer's state dict on the CPU, or None on ranks that do not `keep` it.

    `names` are the parameters' by id; `private` are ids of parameters that each rank has for
    itself.
    """
    # Ranks that keep nothing take part in each gather, and free each tensor at once.
    state = tree_map_tensors(
        lambda tensor: _to_cpu(to_full(tensor.detach()), keep=keep), optimizer.state_dict()
    )
    if not keep:
        return None
    # New dicts, so that the caller may change the result without changing the optimizer.
    state["state"] = {index: dict(each) for index, each in state["state"].items()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state["param_id_map"] = {names[id(p)]: i for i, p in enumerate(params) if id(p) in names}
    if private:
        state["uncollected_local_ids"] = [i for i, p in enumerate(params) if id(p) in private]
    return state


def _to_cpu(tensor: Tensor, *, keep: bool) -> Tensor | None:
    return tensor.cpu().clone() if keep else None


def sharded_optimizer_state(
    state: Mapping[str, Any], params: Mapping[str, Tensor], left_out: set[int]
) -> StateDict:
    """Return this rank's slices of the state, for `optimizer.load_state_dict`.

    `params` are the model's by name and in its order; `left_out` are ids of parameters whose state
    belongs to another rank.
    """
    # A state without names, such as a plain optimizer's, numbers parameters in the model's order.
    named = state.get("param_id_map") or {name: i for i, name in enumerate(params)}
    of = {index: params[name] for name, index in named.items() if name in params}
    known = {index for group in state["param_groups"] for index in group["params"]}
    if missing := sorted(known - of.keys()):
        raise ValueError(
            f"the optimizer's state has {len(known)} parameters and the model {len(params)}; the "
            f"model has none for number {missing[0]}. Give the state of the same model."
        )
    ours = ("param_id_map", "uncollected_local_ids", "state")
    result = {k: v for k, v in state.items() if k not in ours}
    result["param_groups"] = copy.deepcopy(state["param_groups"])
    result["state"] = {
        i: _shard_state(i, s, of[i]) for i, s in state["state"].items() if id(of[i]) not in left_out
    }
    return result


def _shard_state(index: int, state: Mapping[str, object], param: Tensor) -> dict[str, object]:
    def change(tensor: Tensor) -> Tensor:
        if tensor.shape == param.shape:
            return shard_like(tensor, param)
        # A single number, such as Adam's step count, is the same on all ranks.
        if tensor.numel() > 1:
            raise ValueError(
                f"the state of parameter {index} has a tensor of shape {tuple(tensor.shape)}, and "
                f"the parameter is {tuple(param.shape)}. Give the state of the same model."
            )
        return tensor.clone()

    return {name: tree_map_tensors(change, value) for name, value in state.items()}


# -- fairscale's slices -----------------------------------------------------------------------


def from_fairscale(
    weights: Sequence[Mapping[str, Tensor]],
    metadata: Sequence[Mapping[str, Any]],
    with_buffers: bool,
    strict: bool,
) -> dict[str, Tensor]:
    """Return the plain model's state dict from every rank's `local_state_dict()` of fairscale."""
    result: dict[str, Tensor] = {}
    wraps = metadata[0]["param_metadata"]
    counts = [len(each["param_metadata"]) for each in metadata]
    if len(set(counts)) > 1:
        raise ValueError(
            f"the ranks' metadata are of different models: {counts} wraps. Give metadata that were "
            "saved together."
        )
    for number, wrap in enumerate(wraps):
        paddings = [each["param_metadata"][number]["params"] for each in metadata]
        # With private parameters rank 0's slice is complete.
        ranks = 1 if wrap["no_broadcast_optim_state"] else len(weights)
        for vector, facts in wrap["params"].items():
            key = _join(wrap["fsdp_path"], vector)
            if missing := [rank for rank in range(ranks) if key not in weights[rank]]:
                if strict:
                    raise ValueError(
                        f"{key} is not in the weights of rank(s) {missing}. Give the weights of "
                        "every rank, or strict=False to leave the vector out."
                    )
                continue
            slices = [
                _remove_padding(weights[rank][key], paddings[rank][vector]["padding"])
                for rank in range(ranks)
            ]
            full = torch.cat(slices)
            if full.numel() != sum(facts["numels"]):
                raise ValueError(
                    f"the slices of {key} have {full.numel()} elements, and its parameters "
                    f"{sum(facts['numels'])}. Give the slices of all ranks, in rank order."
                )
            flat_params = full.split(list(facts["numels"]))
            for name, shape, flat in zip(facts["names"], facts["shapes"], flat_params, strict=True):
                result[_join(wrap["fsdp_path"], name)] = flat.view(shape)
    for wrap in wraps:
        for listed, other in wrap["shared_param_info"]:
            tied = _join(wrap["fsdp_path"], listed)
            if tied in result:
                result[_join(wrap["fsdp_path"], other)] = result[tied]
    _add_unlisted_ties(result, weights, metadata[0])
    if with_buffers:
        names = metadata[0]["buffer_names"]
        if strict and (missing_buffers := [name for name in names if name not in weights[0]]):
            raise ValueError(
                f"buffers {missing_buffers} are not in rank 0's weights. Give all buffers, or "
                "strict=False or with_module_buffers=False to leave them out."
            )
        result.update({name: weights[0][name] for name in names if name in weights[0]})
    return result


def _add_unlisted_ties(
    result: dict[str, Tensor], weights: Sequence[Mapping[str, Tensor]], metadata: Mapping[str, Any]
) -> None:
    """Add tied parameters of wraps with flatten_parameters=False, whose metadata list one name.

    The weights have each name of such a parameter, with the same slices as the listed name.
    """
    listed = {
        _join(wrap["fsdp_path"], vector)
        for wrap in metadata["param_metadata"]
        for vector in wrap["params"]
    }
    for other in weights[0].keys() - listed - result.keys() - set(metadata["buffer_names"]):
        for name in sorted(listed & result.keys()):  # sorted: the same choice on every run
            if all(other in each and _equal(each[other], each[name]) for each in weights):
                result[other] = result[name]
                break


def _equal(first: Tensor, second: Tensor) -> bool:
    return first is second or (first.shape == second.shape and torch.equal(first, second))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _remove_padding(vector: Tensor, padding: int) -> Tensor:
    return vector.reshape(-1)[: vector.numel() - padding]

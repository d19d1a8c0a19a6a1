"""What a forward pass keeps for the backward pass, measured on tensors without memory.

torch's FakeTensorMode runs the forward with shapes alone, and autograd says of each tensor that it
saves it. Every storage counts once; parameters and buffers do not count, they are there anyway.
The model itself is left as it is: its tensors are replaced for this one call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def saved_bytes(model: nn.Module, input: Any) -> int:
    """Bytes that are alive between forward and backward, for one worker's `input`."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import

    args, kwargs = _arguments(input)
    storages: dict[int, Any] = {}  # kept alive, so that no two have the same address

    def saved(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"), torch.enable_grad():
        state = {
            name: _fake(tensor)
            for named in (model.named_parameters(), model.named_buffers())
            for name, tensor in named
        }
        own = {tensor.untyped_storage()._cdata for tensor in state.values()}
        try:
            with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
                torch.func.functional_call(
                    model,
                    state,
                    tuple(map(_fake, args)),
                    {name: _fake(value) for name, value in kwargs.items()},
                )
        except Exception as error:
            raise ValueError(
                f"the forward pass could not be run on tensors without memory: {error}\n"
                "It must not read values out of tensors, and tensors of the model must be "
                "parameters or buffers. Or leave the input out: activations are then not counted."
            ) from error
    return sum(storage.nbytes() for key, storage in storages.items() if key not in own)


def _arguments(input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = tuple(input) if isinstance(input, list | tuple) else ()
    kwargs = dict(input) if isinstance(input, Mapping) else {}
    if isinstance(input, Tensor):
        args = (input,)
    if not any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        raise TypeError(
            "input must be a tensor, a tuple of the forward's arguments or a dict of them by "
            f"name, got {input!r}. Only shapes matter: torch.empty(8, 128, device='meta')."
        )
    return args, kwargs


def _fake(value: Any) -> Any:
    """A tensor of the same kind, without memory; to be called inside the mode."""
    if not isinstance(value, Tensor):
        return value
    tensor = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    if isinstance(value, nn.Parameter):
        return nn.Parameter(tensor, requires_grad=value.requires_grad)
    return tensor.requires_grad_(value.requires_grad)

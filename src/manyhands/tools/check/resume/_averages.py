"""Find copies of the weights in the script's variables: moving averages, teachers, targets.

A copy has the shape of a parameter or buffer, and is outside the model. The search covers variables
of running functions and modules, with attributes, dictionaries and lists.
"""

import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from manyhands.tools.check._batches import is_container, parts_of
from manyhands.tools.check.resume._records import Digests
from manyhands.tools.check.resume._state import digest_of

DEPTH = 5  # levels below a variable
MOST = 20_000  # inspected values
FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
LEAF = (str, bytes, int, float, type(None), type, *FUNCTIONS)
OUTSIDE = ("torch.utils.data", "torch.optim", "torch.autograd", "torch.distributed")


def averages_of(model: list[Tensor], batches: list[Tensor]) -> Digests:
    """Return digests of copies of a model's tensors, except tensors of the latest batches."""
    shapes = {tensor.shape for tensor in model if tensor.dim()}
    search = Search({tensor.data_ptr() for tensor in [*model, *batches]})
    found = {}
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if not module.startswith(("torch.", "manyhands.tools")):
            for name, value in list(frame.f_locals.items()):
                for path, tensor in search.tensors(value, name, DEPTH):
                    if not tensor.is_floating_point():  # such as labels
                        continue
                    if tensor.shape in shapes and tensor.grad_fn is None:
                        found[path] = digest_of(tensor)
        frame = frame.f_back  # type: ignore[assignment]
    return found


class Search:
    """Visits each value once."""

    def __init__(self, skipped: set[int]) -> None:
        self.skipped = skipped  # addresses of tensors
        self.visited: dict[int, Any] = {}  # by id; references prevent the reuse of ids

    def tensors(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, Tensor]]:
        if isinstance(value, LEAF) or id(value) in self.visited or len(self.visited) > MOST:
            return
        self.visited[id(value)] = value
        if isinstance(value, Tensor):
            strided = value.layout is torch.strided  # other layouts have no address
            if strided and value.numel() and value.data_ptr() not in self.skipped:
                yield path, value
            return
        for key, part in parts(value).items():
            if depth or isinstance(value, torch.nn.Module):
                yield from self.tensors(part, f"{path}.{key}", depth - 1)


def parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, torch.nn.Module):
        return {**dict(value.named_parameters()), **dict(value.named_buffers())}
    if type(value).__module__.startswith(OUTSIDE):
        return {}
    if is_container(value):
        return parts_of(value)
    found: dict[Any, Any] = getattr(value, "__dict__", {})
    return found

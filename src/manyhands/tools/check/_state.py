"""Record state that influences the loss, other than trained parameters and samples.

A call of a module marks buffers and untrained parameters, for example of teachers, weight averages
and queues. A result with a gradient marks tensors of earlier steps behind the result, such as
running statistics. A loss that is only printed has no influence.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from manyhands.tools.check._batches import tensors_of

LARGEST = 10**7  # elements; larger tensors outside modules are data sets


class StateWatch:
    """Notes the state that a step of a rank uses."""

    def __init__(self, place: Callable[[], str], name_of: Callable[[Any], str]) -> None:
        self.place = place
        self.name_of = name_of  # returns the script's variable for a module
        self.marks: dict[str, str] = {}  # of the next step, by name
        self.modules: set[int] = set()  # ids of modules noted in this step
        self.fixed: set[int] = set()  # ids of tensors that `note_module` marks
        # Ids of samples and results of this step, with the ids of older tensors behind each. No
        # weak references: torch cannot swap tensors with these.
        self.fresh: dict[int, tuple[int, ...]] = {}
        self.older: dict[int, Tensor] = {}  # behind a result, by id
        self.influential: set[int] = set()  # marked ids in `older`

    def take(self) -> dict[str, str]:
        """Return the marks of a step, and start the next."""
        marks = self.marks
        self.marks = {}
        self.modules.clear()
        self.fresh.clear()
        self.older.clear()
        self.influential.clear()
        return marks

    def note_samples(self, batch: Any) -> None:
        for tensor in tensors_of(batch):
            self.fresh[id(tensor)] = ()

    def note_module(self, module: torch.nn.Module) -> None:
        """Mark buffers and untrained parameters of a module."""
        if id(module) in self.modules:
            return
        self.modules.add(id(module))
        name = self.name_of(module)
        for prefix, part in module.named_modules():
            own = dict(part.named_parameters(recurse=False))
            self.fixed.update(map(id, own.values()))
            state = {key: p for key, p in own.items() if not p.requires_grad}
            if not (isinstance(part, _BatchNorm) and part.training):  # reads no statistics
                state.update(part.named_buffers(recurse=False))
            self.fixed.update(map(id, part.buffers(recurse=False)))
            for key, tensor in state.items():
                if not hasattr(tensor, "full_tensor"):  # shards differ between ranks
                    self.marks[".".join(filter(None, (name, prefix, key)))] = mark(tensor)

    def note_call(self, arguments: Any, result: Any) -> None:
        behind: dict[int, None] = {}  # in an order that all ranks share
        for tensor in tensors_of(arguments):
            behind.update(dict.fromkeys(self._behind(tensor)))
        for made in tensors_of(result):
            if made.requires_grad:
                self._influence(behind)
            elif not (id(made) in self.older or id(made) in self.fixed):
                self.fresh[id(made)] = tuple(behind)

    def _behind(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the ids of the older tensors behind a tensor."""
        key = id(tensor)
        if tensor.requires_grad or key in self.fixed:
            return ()
        if key in self.fresh:
            return self.fresh[key]
        if tensor.numel() > LARGEST or tensor.is_sparse or hasattr(tensor, "full_tensor"):
            return ()
        self.older[key] = tensor
        return (key,)

    def _influence(self, older: Iterable[int]) -> None:
        """Mark older tensors behind a result that requires a gradient."""
        for key in older:
            if key not in self.influential:
                self.influential.add(key)
                name = f"a tensor used in {self.place()}"
                while name in self.marks:
                    name += ", and another"
                self.marks[name] = mark(self.older[key])


def mark(tensor: Tensor) -> str:
    """Return a short description of a tensor's values."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        values = tensor.detach().double()
        return f"{float(values.sum())!r} {float(values.square().sum())!r}"

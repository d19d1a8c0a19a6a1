"""fairseq's BMUF: its configuration and methods, around a torch optimizer.

>>> from manyhands.fairseq import FairseqBMUF, FairseqBMUFConfig

`manyhands.BMUF` is the same method and takes its options as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._arguments import real, whole
from manyhands.blocks._methods import BMUF, CommonOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in `typing` from Python 3.11 on

__all__ = ["FairseqBMUF", "FairseqBMUFConfig"]


@dataclass
class FairseqBMUFConfig:
    """fairseq's BMUF options and default values.

    >>> from manyhands.fairseq import FairseqBMUFConfig
    >>> FairseqBMUFConfig(block_momentum=0.5).global_sync_iter
    50

    `distributed_world_size` is ignored; the process group determines the workers.
    """

    block_lr: float = 1
    block_momentum: float = 0.875
    global_sync_iter: int = 50
    warmup_iterations: int = 500
    use_nbm: bool = False
    average_sync: bool = False
    distributed_world_size: int | None = None


class FairseqOptimizer(Protocol):
    """A fairseq optimizer, which contains a torch optimizer."""

    @property
    def optimizer(self) -> Optimizer: ...


class FairseqBMUF(BMUF):
    """`BMUF` with fairseq's constructor and methods.

    >>> import torch
    >>> from manyhands.fairseq import FairseqBMUF, FairseqBMUFConfig
    >>> model = torch.nn.Linear(4, 1)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = FairseqBMUF(FairseqBMUFConfig(warmup_iterations=0), sgd)
    >>> optimizer.backward(model(torch.ones(2, 4)).mean())
    >>> norm = optimizer.clip_grad_norm(1.0)
    >>> optimizer.step()
    >>> optimizer.get_lr(), optimizer.get_num_updates()
    (0.1, 1)

    Args:
        cfg: an object with the fields of `FairseqBMUFConfig`, such as fairseq's configuration or
            the namespace of an argument parser.
        optimizer: a torch optimizer, or a fairseq optimizer in full precision, from which the
            contained torch optimizer is extracted.
        options: further options of `BMUF`, absent from the configuration.
    """

    def __init__(
        self,
        cfg: Any,
        optimizer: Optimizer | FairseqOptimizer,
        *,
        process_group: dist.ProcessGroup | None = None,
        nesterov: bool = False,
        local_warmup: bool = True,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(
            _torch_optimizer(optimizer),
            block_lr=cfg.block_lr,
            block_momentum=cfg.block_momentum,
            global_sync_iter=cfg.global_sync_iter,
            warmup_iterations=cfg.warmup_iterations,
            use_nbm=cfg.use_nbm,
            average_sync=cfg.average_sync,
            nesterov=nesterov,
            local_warmup=local_warmup,
            process_group=process_group,
            **options,
        )
        self.cfg = cfg
        self._workers = process_group

    @property
    def params(self) -> Iterator[Tensor]:
        """Parameters of all groups."""
        for group in self.param_groups:
            yield from group["params"]

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Current options of the inner optimizer's first parameter group."""
        config = dict(self.param_groups[0])
        del config["params"]
        return config

    def get_lr(self) -> float:
        """Return the learning rate of the first parameter group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        lr = real("lr", lr.item() if isinstance(lr, Tensor) else lr, least=0)
        for group in self.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def get_num_updates(self) -> int:
        """Return the number of steps."""
        return self.steps

    def set_num_updates(self, num_updates: int) -> None:
        """Set the number of steps, on every worker. Sync rounds follow at multiples."""
        self._sync.set_steps(whole("num_updates", num_updates))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], optimizer_overrides: Mapping[str, Any] | None = None
    ) -> None:
        """Load a `state_dict`, then override options in all parameter groups."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.update(optimizer_overrides or {})

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss."""
        loss.backward()

    def all_reduce_grads(self, module: nn.Module) -> None:
        """Call `module.all_reduce_grads` if it exists. Otherwise gradients remain local."""
        if hasattr(module, "all_reduce_grads"):
            module.all_reduce_grads()  # type: ignore[operator]

    @torch.no_grad()
    def multiply_grads(self, c: float) -> None:
        """Multiply all gradients by a number."""
        for gradient in self._gradients():
            gradient.mul_(c)

    def clip_grad_norm(
        self, max_norm: float, aggregate_norm_fn: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Clip this worker's gradients to the norm `max_norm`, and return the norm before clipping.

        With `max_norm=0`, only measure. `aggregate_norm_fn` computes the norm of a model that is
        sharded over workers from this worker's norm.
        """
        if not max_norm >= 0:
            raise ValueError(f"max_norm must be at least 0, got {max_norm}. 0 only measures.")
        norm = nn.utils.get_total_norm(self._gradients())
        if aggregate_norm_fn is not None:
            norm = aggregate_norm_fn(norm)
        if max_norm > 0:
            nn.utils.clip_grads_with_norm_(self.params, max_norm, norm)
        return norm

    @torch.no_grad()
    def average_params(self) -> None:
        """Average Adam's moments, but not the parameters. Call it on every worker."""
        if not dist.is_initialized():
            return
        for param in self.params:
            for name in ("exp_avg", "exp_avg_sq"):
                moment = self.state.get(param, {}).get(name)
                if moment is not None:
                    moment.div_(dist.get_world_size(self._workers))
                    dist.all_reduce(moment, group=self._workers)

    def _gradients(self) -> list[Tensor]:
        return [param.grad for param in self.params if param.grad is not None]


def _torch_optimizer(optimizer: Optimizer | FairseqOptimizer) -> Optimizer:
    """Return the optimizer, or the torch optimizer in a `FairseqOptimizer`."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    if hasattr(optimizer, "fp16_params") or hasattr(optimizer, "scaler"):
        # The outer `step` also updates float32 copies or the loss scale; the inner step does not.
        raise TypeError(
            f"{type(optimizer).__name__} trains copies in float32 or scales the loss. Give "
            "FairseqBMUF the torch optimizer of the model's parameters; for float16 use "
            "torch.amp.GradScaler with it."
        )
    return optimizer.optimizer

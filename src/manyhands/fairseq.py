"""Offer fairseq's BMUF, with its configuration and methods, around an optimizer of torch's.

>>> from manyhands.fairseq import FairseqBMUF, FairseqBMUFConfig

`manyhands.BMUF` is the same method with its options as arguments.
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
    """fairseq's options of BMUF, with its defaults.

    >>> from manyhands.fairseq import FairseqBMUFConfig
    >>> FairseqBMUFConfig(block_momentum=0.5).global_sync_iter
    50

    `distributed_world_size` is not read: the workers are those of the process group.
    """

    block_lr: float = 1
    block_momentum: float = 0.875
    global_sync_iter: int = 50
    warmup_iterations: int = 500
    use_nbm: bool = False
    average_sync: bool = False
    distributed_world_size: int | None = None


class FairseqOptimizer(Protocol):
    """One of fairseq's optimizers, which has torch's inside."""

    @property
    def optimizer(self) -> Optimizer: ...


class FairseqBMUF(BMUF):
    """`BMUF` as fairseq makes it, with fairseq's methods.

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
        cfg: an object with the fields of `FairseqBMUFConfig`, such as fairseq's own configuration
            or the namespace of an argument parser.
        optimizer: one of torch's, or one of fairseq's in full precision, of which torch's inside
            is used.
        options: the options of `BMUF` that the configuration lacks.
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
        """The parameters of all groups."""
        for group in self.param_groups:
            yield from group["params"]

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """The options of the inner optimizer's first parameter group, as they are now."""
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
        """Return the number of steps taken."""
        return self.steps

    def set_num_updates(self, num_updates: int) -> None:
        """Set the number of steps taken; call it on every worker. Sync rounds are at multiples."""
        self._sync.set_steps(whole("num_updates", num_updates))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], optimizer_overrides: Mapping[str, Any] | None = None
    ) -> None:
        """Continue from a `state_dict`, with these options of the parameter groups."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.update(optimizer_overrides or {})

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss."""
        loss.backward()

    def all_reduce_grads(self, module: nn.Module) -> None:
        """Call the module's own `all_reduce_grads`, if it has one. Workers follow their own."""
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
        """Scale this worker's gradients to a norm of at most `max_norm`; return the norm before.

        With `max_norm=0` the gradients stay as they are. `aggregate_norm_fn` turns this worker's
        norm into the norm of a model that is sharded over several workers.
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
        """Average Adam's moments over the workers; call it on every one. The parameters stay."""
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
    """Return torch's optimizer, which a `FairseqOptimizer` has inside."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    if hasattr(optimizer, "fp16_params") or hasattr(optimizer, "scaler"):
        # Its step does more than that of the optimizer inside: the model would not follow.
        raise TypeError(
            f"{type(optimizer).__name__} trains copies in float32, or scales the loss. Give "
            "FairseqBMUF the optimizer inside, of the model's own parameters; for float16 use "
            "torch.amp.GradScaler around."
        )
    return optimizer.optimizer

"""Bind a rule to a data-parallel module that counts passes, with adaptdl's names and arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer, RMSprop

from manyhands._arguments import instance
from manyhands._optimizers.modules import ModuleWrapper
from manyhands._optimizers.wrappers import LossScaler, wrapped_attribute
from manyhands.scaling._rule_base import ScalingRuleBase
from manyhands.scaling._rules import AdamScale, AdaScale


class ScalarWriter(Protocol):
    """TensorBoard's `SummaryWriter`, or an object with this method."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object: ...


def write_scalars(
    writer: ScalarWriter, values: Mapping[str, float], global_step: int, prefix: str
) -> None:
    if prefix and not prefix.endswith("/"):
        prefix = f"{prefix}/"
    for tag, value in values.items():
        writer.add_scalar(prefix + tag, value, global_step)


class AdaptiveDataParallel(ModuleWrapper):
    """A data-parallel model with a scaling rule.

    >>> import torch
    >>> from manyhands.adaptdl import AdaptiveDataParallel, AdaScale
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> rule = AdaScale()
    >>> model = AdaptiveDataParallel(model, optimizer, scaling_rule=rule)
    >>> with model.no_sync():  # every pass except the last of a step
    ...     model(torch.randn(8, 4)).square().mean().backward()
    >>> model(torch.randn(8, 4)).square().mean().backward()
    >>> rule.step()  # optimizer.step() also calls the rule
    >>> rule.scale
    2.0

    Do not divide losses by the number of passes: the rule divides the gradient after the last pass.
    The default scale is workers x passes. A process group is optional for a single worker.

    Args:
        model: the module. A `fully_shard` module is not wrapped in DDP.
        optimizer: a bare optimizer of these parameters. The rule replaces `step` and `zero_grad`.
        lr_scheduler: stored as an attribute, but not saved. A rule in this place is the
            `scaling_rule`.
        mp_scaler: the `GradScaler` in use.
        scaling_rule: an unbound rule. Default: `AdamScale()` for Adam and RMSprop, otherwise
            `AdaScale()`.
        scale: size of the full batch in small batches.
        name: stored as an attribute.
        ddp_arguments: further arguments of `DistributedDataParallel`.
    """

    _loader: ClassVar[Any] = None  # the `AdaptiveDataLoader` in the current loop, or None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        lr_scheduler: object = None,
        mp_scaler: LossScaler | None = None,
        scaling_rule: ScalingRuleBase | None = None,
        name: str = "adaptdl-dataparallel",
        *,
        scale: float | None = None,
        **ddp_arguments: Any,
    ) -> None:
        super().__init__()
        instance("model", model, nn.Module, "a torch.nn.Module")
        # Rejects misspelt keywords, even if no process group exists, and therefore no DDP.
        inspect.signature(DistributedDataParallel.__init__).bind(None, None, **ddp_arguments)
        rule = scaling_rule
        if isinstance(lr_scheduler, ScalingRuleBase) and rule is None:
            rule = lr_scheduler
            lr_scheduler = None
        if mp_scaler is not None and not hasattr(mp_scaler, "get_scale"):
            raise TypeError(f"mp_scaler must be a GradScaler, got {type(mp_scaler).__name__}.")
        if rule is None:
            rule = AdamScale() if isinstance(optimizer, Adam | RMSprop) else AdaScale()
        instance("scaling_rule", rule, ScalingRuleBase, "a scaling rule, such as AdaScale()")
        self.module = model
        self.scaling_rule = rule
        self.lr_scheduler = lr_scheduler
        self.name = name
        self.leading_dimension: int | None = None  # of the first training input, for `LEGWScale`
        self._fsdp_modules: list[Any] = []  # fully_shard averages their gradients
        for module in model.modules():
            if hasattr(module, "set_requires_gradient_sync"):
                self._fsdp_modules.append(module)
        if self._fsdp_modules and ddp_arguments:
            names = ", ".join(ddp_arguments)
            raise TypeError(f"fully_shard averages the gradients of this model. Omit {names}.")
        ready = dist.is_available() and dist.is_initialized() and not self._fsdp_modules
        # In a list, so that DDP is not a submodule, and parameters are named `module.*`.
        self._parallel = [DistributedDataParallel(model, **ddp_arguments)] if ready else []
        self._averages = True
        self.process_group = ddp_arguments.get("process_group")
        if mp_scaler is not None:
            rule.port.loss_scale.scaler = mp_scaler
        if scale is not None:
            rule.set_scale(scale)
        rule.initialize(self, optimizer, patch_optimizer=True)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward pass is the last of a step."""
        return all(ddp.require_backward_grad_sync for ddp in self._parallel) and self._averages

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging. Passes in this context do not end a step."""
        before = self._averages
        self._set_averaging(False)
        try:
            yield
        finally:
            self._set_averaging(before)

    def _set_averaging(self, enabled: bool) -> None:
        self._averages = enabled
        for ddp in self._parallel:
            ddp.require_backward_grad_sync = enabled
        # The list contains all modules, so no recursion is needed.
        for module in self._fsdp_modules:
            module.set_requires_gradient_sync(enabled, recurse=False)

    def set_accumulating(self, accumulates: bool | None) -> None:
        """Set whether the next pass accumulates (True) or ends a step (False).

        In this mode of an `AdaptiveDataLoader`, the rule ignores `optimizer.step()` and
        `zero_grad()` within a step. None ends the mode.
        """
        self._set_averaging(not accumulates)
        self.scaling_rule.port.end_pass(None if accumulates is None else self._averages)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of DistributedDataParallel, such as `register_comm_hook`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            parallel = self.__dict__.get("_parallel")
            if not parallel or name.startswith("_"):
                raise
            return wrapped_attribute(self, parallel[0], name)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the model. In training, first read from the loader whether the step continues."""
        trains = self.training and torch.is_grad_enabled()
        if trains and self._loader is not None:
            self._loader.attach(self)
            self.set_accumulating(self._loader.accumulates)
        if trains and self.leading_dimension is None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and value.dim() > 0:
                    self.leading_dimension = value.shape[0]
                    break
        model: nn.Module = self.module
        if self._parallel:
            model = self._parallel[0]
        return model(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. (adaptdl ignored this call.)"""
        if self.scaling_rule.port.keeps_gradients:
            return
        super().zero_grad(set_to_none)
        self.scaling_rule.forget_gradients()

    @property
    def gain(self) -> float:
        """The current gain: the number of small-batch steps that a step replaces."""
        return self.scaling_rule.gain()

    @property
    def gns(self) -> GradientStatistics:
        """The gradient statistics, with adaptdl's names."""
        return GradientStatistics(self.scaling_rule)

    def to_tensorboard(self, writer: ScalarWriter, global_step: int, tag_prefix: str = "") -> None:
        """Write the statistics to a TensorBoard `SummaryWriter`."""
        factors = self.scaling_rule.factors
        values = {
            "Gradient_Norm_Sqr": self.gns.sqr_avg(),
            "Gradient_Variance": self.gns.var_avg(),
            "Gain": self.gain,
            "Learning_Rate_Factor": sum(factors) / len(factors),
        }
        write_scalars(writer, values, global_step, tag_prefix)


class GradientStatistics:
    """A rule's statistics, with the names of adaptdl's `GradientNoiseScale`."""

    def __init__(self, rule: ScalingRuleBase) -> None:
        self._rule = rule

    @property
    def raw_sqr_avg(self) -> tuple[float, ...]:
        """|true gradient|^2 per parameter group, before the floor."""
        return self._rule.noise.raw_sqr

    @property
    def raw_var_avg(self) -> tuple[float, ...]:
        """The noise at scale 1 per parameter group, before the floor."""
        return self._rule.noise.raw_var

    def sqr_avg(self) -> float:
        """|true gradient|^2 of all groups."""
        return self._rule.noise.sqr_of()

    def var_avg(self) -> float:
        """The noise at scale 1 of all groups."""
        return self._rule.noise.var_of()

    def gain(self, scale: float) -> float:
        """Return the gain at any scale."""
        return self._rule.noise.gain(scale)

    def get_progress(self) -> float:
        return self._rule.progress

    def set_progress(self, progress: float) -> None:
        self._rule.set_progress(progress)

    @property
    def accum_scale(self) -> float:
        """The scale of a pass over all workers."""
        return self._rule.scale / self.accum_count

    @property
    def accum_count(self) -> int:
        """Passes of the current step, or of the last one between steps."""
        return self._rule.passes

    def set_accum_scale(self, accum_scale: float) -> None:
        """Set the scale of a pass over all workers."""
        self._rule.set_scale_per_pass(accum_scale)

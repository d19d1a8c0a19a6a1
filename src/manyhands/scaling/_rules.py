"""Scaling rules: turn a scale and the measured noise into factors of the learning rate.

A rule returns the factor of the learning rate for an S (`scale`) times larger batch.

    AdaScale       r = (var + sqr) / (var / S + sqr)         Johnson et al. 2020
    AdamScale      r ** 0.5                                  for Adam
    LinearScale    S                                         Goyal et al. 2017
    SqrtScale      sqrt(S)                                   Krizhevsky 2014
    rescale_adam   lr * sqrt(S), (1 - beta) * S, eps / sqrt(S)          Malladi et al. 2022
    LEGWScale      sqrt(S), after an S times longer warm-up       You et al. 2019

The gain r is in `_noise.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from torch.optim import Optimizer

from manyhands._arguments import flag, real
from manyhands._optimizers.state_parts import SavedState
from manyhands._optimizers.wrappers import ParamGroup
from manyhands.scaling._hooks import PlainNorm
from manyhands.scaling._preconditioned import PreconditionedNorm
from manyhands.scaling._rule_base import RuleOptions, ScalingRuleBase

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")


def legw_factor(
    scale: float, progress: float, warmup_epochs: float, data_size: float, batch_size: float
) -> float:
    """Return LEGW's factor: sqrt(scale) after a linear warm-up.

    `batch_size` is the baseline's, and `progress` counts baseline steps. The warm-up is `scale`
    times longer, in epochs.

    >>> legw_factor(scale=4.0, progress=50.0, warmup_epochs=1, data_size=1000, batch_size=10)
    0.25
    >>> legw_factor(scale=4.0, progress=400.0, warmup_epochs=1, data_size=1000, batch_size=10)
    2.0
    """
    warmup_steps = warmup_epochs * scale * data_size / batch_size
    reached = progress / warmup_steps if progress < warmup_steps else 1.0
    return math.sqrt(scale) * reached


def sde_beta(beta: float, scale: float) -> float:
    """Return the decay with the memory, in samples, that `beta` has at scale 1.

    >>> round(sde_beta(0.9, 4.0), 6)
    0.6
    """
    forgotten = scale * (1.0 - beta)
    if forgotten >= 1.0:
        below = f"below {1.0 / (1.0 - beta):.4g}"
        raise ValueError(f"at beta={beta:g} the scale must be {below}, got {scale:g}.")
    return 1.0 - forgotten


class AdaScale(ScalingRuleBase):
    """Multiply SGD's learning rate by the gain, which is measured during training.

        gain = (sqr + var) / (sqr + var / scale)
        progress += gain

    `sqr` is |true gradient|^2 and `var` the variance of a small batch's gradient, per parameter
    group. The gain is 1 if the gradients of the small batches agree, and `scale` if they are pure
    noise.

    T. Johnson, P. Agrawal, H. Gu, C. Guestrin, "AdaScale SGD: A User-Friendly Algorithm for
    Distributed Training", ICML 2020, arXiv:2007.05105.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = mh.AdaScale(optimizer, num_gradients_to_accumulate=8)
    >>> while optimizer.progress < 100:  # equivalent to 100 steps with the small batch
    ...     optimizer.zero_grad()
    ...     for x, y in zip(torch.randn(8, 16, 4), torch.randn(8, 16, 1)):
    ...         (torch.nn.functional.mse_loss(model(x), y) / 8).backward()
    ...     optimizer.step()
    >>> 1.0 <= optimizer.gain() <= 8.0
    True

    `ScalingRuleBase` documents the arguments. AdaScale is derived for SGD, and also recommended for
    Adam and AdamW: `docs/scaling.md` compares AdaScale with `AdamScale`.
    """

    _min_scale = 1.0  # the batch is at least a small batch

    def scale_lr(self, scale: float) -> Sequence[float]:
        return [self.noise.gain(scale, group) for group in range(self.noise.groups)]

    # `pg` and `data` are fairscale's argument names.

    def add_param_group(
        self, param_group: ParamGroup | None = None, *, pg: ParamGroup | None = None
    ) -> None:
        """Add a parameter group. Its measurement starts with the next backward pass."""
        super().add_param_group(_one_of_two_names("param_group", param_group, "pg", pg))

    def load_state_dict(
        self, state_dict: SavedState | None = None, *, data: SavedState | None = None
    ) -> None:
        """Restore a `state_dict` (see `ScalingRuleBase.load_state_dict`)."""
        super().load_state_dict(_one_of_two_names("state_dict", state_dict, "data", data))


def _one_of_two_names(name: str, value: T | None, other_name: str, other: T | None) -> T:
    if value is not None and other is not None:
        raise TypeError(f"{name} and {other_name} are one argument: give it once.")
    given = other if value is None else value
    if given is None:
        raise TypeError(f"missing argument: {name}")
    return given


class AdamScale(AdaScale):
    """AdaScale for Adam, AdamW and RMSprop: the square root of the preconditioned gradient's gain.

        gain = (sqr + var) / (sqr + var / scale)
        factor = gain ** 0.5

    From the optimizer's fifth step on, each gradient is divided by the root of the running mean
    square before the norm is measured, as in the optimizer's update. In our benchmarks, AdamScale
    takes fewer steps than AdaScale and reaches a lower quality (`docs/scaling.md`).

    The gain is AdaScale's (arXiv:2007.05105). The measurement of divided gradients is from A. Qiao
    et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", OSDI 2021,
    arXiv:2008.12260.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = mh.AdamScale(torch.optim.AdamW(model.parameters(), lr=1e-3))

    For a power other than 0.5, override `scale_lr` and pass `power`.

    Args:
        second_moment_floor: smaller second moments are raised to this fraction of their tensor's
            mean. 0 disables the floor, as in adaptdl and by default in `AdaptiveDataParallel`.
    """

    _norm_kind = "preconditioned"

    def __init__(
        self,
        optimizer: Optimizer | None = None,
        *,
        second_moment_floor: float | None = None,
        **options: Unpack[RuleOptions],
    ) -> None:
        self._second_moment_floor = second_moment_floor
        if second_moment_floor is not None:
            floor = real("second_moment_floor", second_moment_floor, least=0.0, below=1.0)
            self._second_moment_floor = floor
        super().__init__(optimizer, **options)

    def _moment_floor(self) -> float:
        if self._second_moment_floor is not None:
            return self._second_moment_floor
        return 0.0 if self._core.batch.loop.counts else 1e-3  # 0 as in adaptdl

    def _compared_options(self) -> dict[str, float]:
        return {**super()._compared_options(), "second_moment_floor": self._moment_floor()}

    def _make_norm(self, optimizer: Optimizer) -> PlainNorm:
        return PreconditionedNorm(optimizer, self._moment_floor())

    def scale_lr(self, scale: float, power: float = 0.5) -> Sequence[float]:
        return [gain**power for gain in super().scale_lr(scale)]


class LinearScale(ScalingRuleBase):
    """Multiply the learning rate by the scale.

        factor = scale

    P. Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017,
    arXiv:1706.02677.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = mh.LinearScale(torch.optim.SGD(model.parameters(), lr=0.1), scale=8)
    >>> optimizer.scale_lr(8.0)
    8.0
    """

    def scale_lr(self, scale: float) -> float:
        return scale


class SqrtScale(ScalingRuleBase):
    """Multiply the learning rate by the square root of the scale.

        factor = sqrt(scale)

    A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014,
    arXiv:1404.5997.

    With `rescale_adam=True`, Adam, AdamW or RMSprop follows the small batch's stochastic
    differential equation at the larger batch:

        beta = 1 - scale * (1 - beta)
        eps = eps / sqrt(scale)

    S. Malladi, K. Lyu, A. Panigrahi, S. Arora, "On the SDEs and Scaling Rules for Adaptive Gradient
    Algorithms", NeurIPS 2022, arXiv:2205.10287.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = mh.SqrtScale(torch.optim.Adam(model.parameters()), scale=4, rescale_adam=True)
    >>> optimizer.scale_lr(4.0)
    2.0
    """

    def __init__(
        self,
        optimizer: Optimizer | None = None,
        *,
        rescale_adam: bool = False,
        **options: Unpack[RuleOptions],
    ) -> None:
        self._rescale_adam = flag("rescale_adam", rescale_adam)
        super().__init__(optimizer, **options)

    def _compared_options(self) -> dict[str, float]:
        return {**super()._compared_options(), "rescale_adam": float(self._rescale_adam)}

    def scale_lr(self, scale: float) -> float:
        return math.sqrt(scale)

    def _make_norm(self, optimizer: Optimizer) -> PlainNorm:
        # Adam and AdamW have betas, RMSprop has alpha.
        if self._rescale_adam and not {"betas", "alpha"} & set(optimizer.defaults):
            raise TypeError(
                "rescale_adam=True requires an optimizer with betas or alpha, such as Adam or "
                f"RMSprop, got {type(optimizer).__name__}."
            )
        return super()._make_norm(optimizer)

    def _check_optimizer_supports(self, scale: float) -> None:
        for group in self.param_groups:
            self._rescale_group(group, scale)  # raises if a beta would become negative

    def _overrides(self, group: ParamGroup, factor: float) -> Mapping[str, object]:
        return {**super()._overrides(group, factor), **self._rescale_group(group, self.scale)}

    def _rescale_group(self, group: ParamGroup, scale: float) -> Mapping[str, object]:
        """Return the group's rescaled eps and betas (or alpha)."""
        if not self._rescale_adam or scale == 1.0:
            return {}
        eps = group["eps"] / math.sqrt(scale)
        if "betas" in group:
            return {"eps": eps, "betas": tuple(sde_beta(float(b), scale) for b in group["betas"])}
        return {"eps": eps, "alpha": sde_beta(group["alpha"], scale)}


class LEGWScale(ScalingRuleBase):
    """Multiply the learning rate by sqrt(scale), after a warm-up of `scale` times the epochs.

        warmup_steps = scale * base_warmup_epochs * data_size / batch_size
        factor = sqrt(scale) * min(1, progress / warmup_steps)

    Y. You et al., "Large-Batch Training for LSTM and Beyond", 2019, arXiv:1901.08256.

    Args:
        base_warmup_epochs: the baseline's warm-up.
        data_size: samples per epoch.
        optimizer: optimizer to wrap.
        batch_size: the baseline's batch size. In `AdaptiveDataParallel` the default is determined
            in the first step: the leading dimension of the model's first input, averaged over
            the workers, times workers and passes, divided by the scale.

    `ScalingRuleBase` documents the other arguments.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(4, 1)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = mh.LEGWScale(5, 50_000, sgd, batch_size=32, num_gradients_to_accumulate=4)
    """

    def __init__(
        self,
        base_warmup_epochs: float,
        data_size: int,
        optimizer: Optimizer | None = None,
        *,
        batch_size: float | None = None,
        **options: Unpack[RuleOptions],
    ) -> None:
        # The optimizer is the third argument, which is easy to miss.
        why = "Write LEGWScale(base_warmup_epochs, data_size, optimizer, batch_size=...)."
        self._warmup_epochs = real("base_warmup_epochs", base_warmup_epochs, least=0.0, why=why)
        self._data_size = real("data_size", data_size, least=1.0, why=why)
        self._batch_size = batch_size
        if batch_size is not None:
            self._batch_size = real("batch_size", batch_size, above=0.0, why=why)
        super().__init__(optimizer, **options)

    def _compared_options(self) -> dict[str, float]:
        return {
            **super()._compared_options(),
            "base_warmup_epochs": self._warmup_epochs,
            "data_size": self._data_size,
            "batch_size": self._batch_size or 0.0,
        }

    def _check_optimizer_supports(self, scale: float) -> None:
        if self._batch_size is None and not hasattr(self.adp, "leading_dimension"):
            raise ValueError("LEGWScale requires the baseline's batch size: pass batch_size=...")

    @property
    def batch_size(self) -> float:
        """The baseline's batch size: the argument, or the value found in the first step."""
        if self._batch_size is None:
            raise RuntimeError("batch_size is unknown before the first step: pass batch_size=...")
        return self._batch_size

    def _before_factors(self, skipped: bool) -> None:
        """Determine the baseline's batch size in the first step."""
        if self._batch_size is not None:
            return
        own = getattr(self.adp, "leading_dimension", None)
        found = map(int, self._core.ranks.all_gather_text(str(own or 0)))
        known = [size for size in found if size > 0]
        if not known:
            raise RuntimeError("the model received no tensor: pass batch_size=... to LEGWScale.")
        micro_batch = sum(known) / len(known)
        workers = self._core.batch.workers
        self._batch_size = micro_batch * workers * self.passes / self.scale

    def scale_lr(self, scale: float) -> float:
        return legw_factor(
            scale, self.progress, self._warmup_epochs, self._data_size, self.batch_size
        )

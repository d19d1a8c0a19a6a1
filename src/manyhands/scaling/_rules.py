"""The scaling rules: each turns a scale, and what is known of the noise, into factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from manyhands._core.wrapper import YieldingProperty
from manyhands.scaling._norm_kinds import Norms
from manyhands.scaling._optimizer import ScalingRuleBase
from manyhands.scaling._options import Option, Options, RuleOptions
from manyhands.scaling._preconditioned import Preconditioned

if TYPE_CHECKING:
    from typing_extensions import Unpack


def legw_factor(
    scale: float, progress: float, warmup_epochs: float, data_size: float, batch_size: float
) -> float:
    """sqrt(scale), reached in a straight line over `scale` times the baseline's warm-up.

    `batch_size` is the baseline's; `progress` counts the baseline's steps.

    >>> legw_factor(scale=4.0, progress=50.0, warmup_epochs=1, data_size=1000, batch_size=10)
    0.25
    >>> legw_factor(scale=4.0, progress=400.0, warmup_epochs=1, data_size=1000, batch_size=10)
    2.0
    """
    warmup_steps = warmup_epochs * scale * data_size / batch_size
    reached = progress / warmup_steps if progress < warmup_steps else 1.0
    return math.sqrt(scale) * reached


def sde_beta(beta: float, scale: float) -> float:
    """The decay that remembers as many samples at `scale` as `beta` does at scale 1.

    >>> round(sde_beta(0.9, 4.0), 6)
    0.6
    """
    forgotten = scale * (1.0 - beta)
    if forgotten >= 1.0:
        raise ValueError(
            f"the square-root rule for Adam scales 1 - beta with the batch, and beta={beta:g} at "
            f"scale {scale:g} would give 1 - beta = {forgotten:.3g}, which must stay below 1: "
            f"at this beta the largest scale is below {1.0 / (1.0 - beta):.4g}. "
            "Use a smaller scale, a beta nearer to 1, or SqrtScale(..., rescale_adam=False)."
        )
    return 1.0 - forgotten


SECOND_MOMENT_FLOOR = 1e-3


class AdaScale(ScalingRuleBase):
    """Scale SGD's learning rate by the gain (Johnson et al., ICML 2020).

    The gain is 1 where the gradients of the small batches agree and `scale` where they are
    noise, and is measured while training, per parameter group:

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = mh.AdaScale(optimizer, num_gradients_to_accumulate=8)
    >>> while optimizer.progress < 100:  # as good as 100 steps at the small batch
    ...     optimizer.zero_grad()
    ...     for x, y in zip(torch.randn(8, 16, 4), torch.randn(8, 16, 1)):
    ...         (torch.nn.functional.mse_loss(model(x), y) / 8).backward()
    ...     optimizer.step()
    >>> 1.0 <= optimizer.gain() <= 8.0
    True

    Arguments are `ScalingRuleBase`'s. For SGD with or without momentum; `AdamScale` is for
    Adam and its like.
    """

    _smallest_scale = 1.0

    def scale_lr(self, scale: float) -> Sequence[float]:
        noise = self.noise
        return [noise.gain(scale, group) for group in range(noise.groups)]


class AdamScale(AdaScale):
    """AdaScale for Adam, AdamW and RMSprop: the square root of the gain of *their* gradients.

    Gradients are measured as the optimizer uses them, divided by the root of their running
    mean square, from its fifth step on.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = mh.AdamScale(torch.optim.AdamW(model.parameters(), lr=1e-3))

    `power` other than 0.5 can be given to `scale_lr`.

    Args:
        second_moment_floor: second moments below this part of their tensor's mean count as that
            much. 0 is adaptdl's way, and the default in `AdaptiveDataParallel`.
    """

    _gradients = "preconditioned"

    def __init__(
        self,
        optimizer: Optimizer | None = None,
        *,
        second_moment_floor: float | None = None,
        **options: Unpack[RuleOptions],
    ) -> None:
        self._second_moment_floor = second_moment_floor
        super().__init__(optimizer, **options)

    def _own_options(self) -> Options:
        floor = Option(
            SECOND_MOMENT_FLOOR, self._second_moment_floor, check=_checked_second_moment_floor
        )
        return {"second_moment_floor": floor}

    def _norms(self, optimizer: Optimizer) -> Norms:
        floor = self._options["second_moment_floor"]
        if self._batch.counted:  # as adaptdl has it
            floor = self._options["second_moment_floor"] = replace(floor, default=0.0)
        return Preconditioned(optimizer, floor.value)

    def _use_options(self) -> None:
        norms = self._meter.tap.norms
        assert isinstance(norms, Preconditioned)
        norms.floor = self._options["second_moment_floor"].value

    def scale_lr(self, scale: float, power: float = 0.5) -> Sequence[float]:
        return [gain**power for gain in super().scale_lr(scale)]


def _checked_second_moment_floor(floor: float) -> float:
    if not 0.0 <= floor < 1.0:
        raise ValueError(
            f"second_moment_floor must be at least 0 and below 1, got {floor}. "
            "It is a part of the mean second moment; 0 is no floor."
        )
    return floor


class LinearScale(ScalingRuleBase):
    """Multiply the learning rate by the scale (Goyal et al. 2017)."""

    def scale_lr(self, scale: float) -> float:
        return scale


class SqrtScale(ScalingRuleBase):
    """Multiply the learning rate by the square root of the scale (Krizhevsky 2014).

    With `rescale_adam=True` the whole of Adam, AdamW or RMSprop is rescaled so that it follows
    the same stochastic differential equation at the larger batch (Malladi et al. 2022):
    learning rate times sqrt(scale), 1 - beta times scale, epsilon divided by sqrt(scale).
    """

    def __init__(
        self,
        optimizer: Optimizer | None = None,
        *,
        rescale_adam: bool | None = None,
        **options: Unpack[RuleOptions],
    ) -> None:
        self._rescale_adam = rescale_adam
        super().__init__(optimizer, **options)

    def _own_options(self) -> Options:
        return {"rescale_adam": Option(False, self._rescale_adam, check=bool)}

    @YieldingProperty
    def _rescales_adam(self) -> bool:
        return bool(self._options["rescale_adam"].value)

    def scale_lr(self, scale: float) -> float:
        return math.sqrt(scale)

    def _norms(self, optimizer: Optimizer) -> Norms:
        if self._rescales_adam and not {"betas", "alpha"} & set(optimizer.defaults):
            raise TypeError(
                "rescale_adam=True is for Adam, AdamW and RMSprop, whose betas (or alpha) it "
                f"changes, got {type(optimizer).__name__}. Leave it out."
            )
        return super()._norms(optimizer)

    def _check_optimizer_takes(self, scale: float) -> None:
        for group in self.param_groups:
            self._rescaled(group, scale)

    def _overrides(self, group: dict[str, Any], factor: float) -> dict[str, Any]:
        return {**super()._overrides(group, factor), **self._rescaled(group, self.scale)}

    def _rescaled(self, group: dict[str, Any], scale: float) -> dict[str, Any]:
        if not self._rescales_adam or scale == 1.0:
            return {}
        eps = group["eps"] / math.sqrt(scale)
        if "betas" in group:
            return {"eps": eps, "betas": tuple(sde_beta(float(b), scale) for b in group["betas"])}
        return {"eps": eps, "alpha": sde_beta(group["alpha"], scale)}


class LEGWScale(ScalingRuleBase):
    """sqrt(scale), warmed up over `scale` times the baseline's epochs (You et al. 2019).

    Args:
        base_warmup_epochs: the baseline's warm-up.
        data_size: samples in an epoch.
        optimizer: what to wrap, if at once; then `batch_size` is needed.
        batch_size: the baseline's batch size. In `AdaptiveDataParallel` it is worked out in the
            first step, if not given: the leading dimension of the model's first input, on average
            over the workers, times workers and passes, divided by the scale. It then stays, is
            the same on every worker, and is saved with the state. `repr` shows it.

    Other arguments are `ScalingRuleBase`'s.

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
        self._warmup_epochs = base_warmup_epochs
        self._data_size = data_size
        self._batch_size = batch_size
        super().__init__(optimizer, **options)

    def _own_options(self) -> Options:
        return {
            name: Option(None, value, check=partial(_checked_number, name, least))
            for name, value, least in (
                ("base_warmup_epochs", self._warmup_epochs, 0.0),
                ("data_size", self._data_size, 1.0),
                ("batch_size", self._batch_size, 1e-9),
            )
        }

    def _check_optimizer_takes(self, scale: float) -> None:
        given = self._options["batch_size"].value
        if given is None and not hasattr(self.adp, "leading_dimension"):
            raise ValueError(
                "LEGWScale does not know the baseline's batch size. Give it: batch_size=... "
                "(AdaptiveDataParallel works it out from the first input's leading dimension.)"
            )

    @property
    def batch_size(self) -> float:
        """The baseline's batch size: given, or worked out in the first step, once."""
        known = self._options["batch_size"].value
        if known is None:
            raise RuntimeError(
                "the baseline's batch size is not known yet: LEGWScale works it out in the first "
                "step of AdaptiveDataParallel. Give it, to have it before: batch_size=..."
            )
        return float(known)

    def _learn(self) -> None:
        known = self._options["batch_size"]
        if known.value is not None:
            return
        micro_batch = self._meter.micro_batch
        if micro_batch == 0.0:
            raise RuntimeError(
                "LEGWScale works the baseline's batch size out of the model's first input, and "
                "no tensor came into the model. Give it: batch_size=..."
            )
        small_batch = micro_batch * self._workers.size * self.passes / self.scale
        self._options["batch_size"] = replace(known, found=small_batch)

    def scale_lr(self, scale: float) -> float:
        return legw_factor(
            scale, self.progress, self._warmup_epochs, self._data_size, self.batch_size
        )

    def _settings(self) -> dict[str, Any]:
        known = self._options["batch_size"].value
        return {
            "base_warmup_epochs": self._warmup_epochs,
            "data_size": self._data_size,
            "batch_size": "from the first input" if known is None else f"{known:g}",
            **super()._settings(),
        }


def _checked_number(name: str, least: float, value: Any) -> Any:
    if not isinstance(value, Real) or not float(value) >= least:
        raise ValueError(
            f"LEGWScale's {name} must be a number of at least {least:g}, got {value!r}. "
            "Write LEGWScale(base_warmup_epochs, data_size, optimizer, batch_size=...)."
        )
    return value

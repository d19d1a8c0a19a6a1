"""The scaling rules: each turns a scale, and what is known of the noise, into factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from manyhands.scaling._measures import Norms
from manyhands.scaling._optimizer import ScalingRuleBase
from manyhands.scaling._options import RuleOptions
from manyhands.scaling._preconditioned import Preconditioned
from manyhands.scaling._rules import legw_factor, sde_beta

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
        if second_moment_floor is not None and not 0.0 <= second_moment_floor < 1.0:
            raise ValueError(
                f"second_moment_floor must be at least 0 and below 1, got {second_moment_floor}. "
                "It is a part of the mean second moment; 0 is no floor."
            )
        self._second_moment_floor = second_moment_floor
        super().__init__(optimizer, **options)

    def _norms(self, optimizer: Optimizer) -> Norms:
        floor = self._second_moment_floor
        if floor is None:
            floor = 0.0 if self._batch.counted else SECOND_MOMENT_FLOOR
        return Preconditioned(optimizer, floor)

    def scale_lr(self, scale: float, power: float = 0.5) -> Sequence[float]:
        return [gain**power for gain in super().scale_lr(scale)]


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
        rescale_adam: bool = False,
        **options: Unpack[RuleOptions],
    ) -> None:
        self._rescale_adam = rescale_adam
        super().__init__(optimizer, **options)

    def scale_lr(self, scale: float) -> float:
        return math.sqrt(scale)

    def _norms(self, optimizer: Optimizer) -> Norms:
        if self._rescale_adam and not {"betas", "alpha"} & set(optimizer.defaults):
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
        if not self._rescale_adam or scale == 1.0:
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
        batch_size: the baseline's batch size. In `AdaptiveDataParallel` it is worked out, if
            not given, from the leading dimension of the model's first input: that, times
            workers and passes, divided by the scale. `repr` shows it.

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
        for name, value, least in (
            ("base_warmup_epochs", base_warmup_epochs, 0),
            ("data_size", data_size, 1),
            ("batch_size", 1 if batch_size is None else batch_size, 1e-9),
        ):
            if not isinstance(value, Real) or not float(value) >= least:
                raise ValueError(
                    f"LEGWScale's {name} must be a number of at least {least}, got {value!r}. "
                    "Write LEGWScale(base_warmup_epochs, data_size, optimizer, batch_size=...)."
                )
        self._warmup_epochs = base_warmup_epochs
        self._data_size = data_size
        self._batch_size = batch_size
        super().__init__(optimizer, **options)

    def _check_optimizer_takes(self, scale: float) -> None:
        if self._batch_size is None and not hasattr(self.adp, "leading_dimension"):
            raise ValueError(
                "LEGWScale does not know the baseline's batch size. Give it: batch_size=... "
                "(AdaptiveDataParallel works it out from the first input's leading dimension.)"
            )

    @property
    def batch_size(self) -> float:
        """The baseline's batch size: given, or worked out from the last forward pass."""
        if self._batch_size is not None:
            return self._batch_size
        leading = self.adp.leading_dimension
        if leading is None:
            raise RuntimeError(
                "LEGWScale works the baseline's batch size out of the model's first input, and "
                "no tensor has come through yet. Give it: batch_size=..."
            )
        return float(leading * self._workers.size * self.passes / self.scale)

    def scale_lr(self, scale: float) -> float:
        return legw_factor(
            scale, self.progress, self._warmup_epochs, self._data_size, self.batch_size
        )

    def _settings(self) -> dict[str, Any]:
        known = self._batch_size is not None or getattr(self.adp, "leading_dimension", None)
        return {
            "base_warmup_epochs": self._warmup_epochs,
            "data_size": self._data_size,
            "batch_size": f"{self.batch_size:g}" if known else "from the first input",
            **super()._settings(),
        }

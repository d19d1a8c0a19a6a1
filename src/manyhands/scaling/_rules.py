"""From a batch's size to a learning rate: the formulas of the scaling rules.

Each function answers "by what must the learning rate of the small batch be multiplied, when
the batch is `scale` times as large?". Floats in, floats out; the classes that apply them to an
optimizer are in `_scales.py`.

    AdaScale    r = (var + sqr) / (var / S + sqr)       Johnson et al. 2020
    AdamScale   r ** 0.5                                Johnson et al. 2020, sqrt for adaptive
    linear      S                                       Goyal et al. 2017
    square root sqrt(S)                                 Krizhevsky 2014
    LEGW        sqrt(S), warmed up over S times as many epochs     You et al. 2019
    Adam's SDE  lr sqrt(S), 1 - beta scaled by S, eps / sqrt(S)    Malladi et al. 2022
"""

from __future__ import annotations

import math


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

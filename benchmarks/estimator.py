"""Are the estimates of signal and noise right, and are they still after a change of scale?

    python benchmarks/peers.py        once, to have fairscale and adaptdl in the comparison
    python benchmarks/estimator.py    some minutes; writes docs/benchmarks/estimator.md

The gradients are simulated, so that the truth is known: a step has two small batches, each with
the true gradient plus normal noise of a given covariance trace. Nothing is trained (lr is 0).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any, NamedTuple

import peers

WITH_PEERS = peers.run_again_beside_peers()  # before torch, which this Python may not have

import pages  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import manyhands as mh  # noqa: E402

SIZE = 180  # parameters
SMALL_BATCHES = 2


class Seen(NamedTuple):
    """What an estimator says after a step."""

    sqr: float
    var: float
    gain: float


class Estimator:
    """One implementation: fed the gradients of a step's small batches, it says what it sees."""

    def __init__(self, optimizer: Any, param: nn.Parameter, divided: bool = True) -> None:
        self.optimizer = optimizer
        self.param = param
        self.divisor = SMALL_BATCHES if divided else 1

    def step(self, gradients: Tensor) -> Seen:
        self.optimizer.zero_grad()
        for position, gradient in enumerate(gradients):
            self.before_pass(position == len(gradients) - 1)
            ((self.param * gradient).sum() / self.divisor).backward()
        self.optimizer.step()
        return self.seen()

    def before_pass(self, last: bool) -> None:
        pass

    def seen(self) -> Seen:
        noise = self.optimizer.noise
        return Seen(noise.sqr_of(), noise.var_of(), self.optimizer.gain())

    def set_scale(self, scale: float) -> None:
        self.optimizer.set_scale(scale)


class Fairscale(Estimator):
    def seen(self) -> Seen:
        scale = self.optimizer
        return Seen(scale._grad_sqr_avg(), scale._grad_var_avg(), scale.gain())


class Adaptdl(Estimator):
    """Its statistics and its rule, without its data loader."""

    def __init__(self, optimizer: Any, param: nn.Parameter) -> None:
        from adaptdl.torch.gradient_noise_scale import GradientNoiseScale
        from adaptdl.torch.scaling_rules import AdaScale

        super().__init__(AdaScale(), param, divided=False)
        self.module = SimpleNamespace(require_backward_grad_sync=True)
        self.module.gns = GradientNoiseScale(self.module, optimizer, num_replicas=1, accum_scale=1)
        self.optimizer.initialize(self.module, optimizer)
        self.scale = float(SMALL_BATCHES)

    def before_pass(self, last: bool) -> None:
        self.module.require_backward_grad_sync = last

    def seen(self) -> Seen:
        noise = self.module.gns
        return Seen(noise.sqr_avg(), noise.var_avg(), noise.gain(self.scale))

    def set_scale(self, scale: float) -> None:
        self.scale = scale
        self.module.gns.set_accum_scale(scale / SMALL_BATCHES)


def estimators() -> dict[str, Callable[[], Estimator]]:
    """Each makes a fresh estimator with that implementation's defaults."""

    def parts() -> tuple[Any, nn.Parameter]:
        param = nn.Parameter(torch.zeros(SIZE))
        return torch.optim.SGD([param], lr=0.0), param

    def ours() -> Estimator:
        sgd, param = parts()
        wrapped = mh.AdaScale(sgd, num_gradients_to_accumulate=SMALL_BATCHES)
        return Estimator(wrapped, param)

    def fairscale() -> Estimator:
        from fairscale.optim import AdaScale

        sgd, param = parts()
        return Fairscale(AdaScale(sgd, num_gradients_to_accumulate=SMALL_BATCHES), param)

    peers = {"fairscale": fairscale, "adaptdl": lambda: Adaptdl(*parts())}
    return {"manyhands": ours, **(peers if WITH_PEERS else {})}


def gradients(sqr: float, var: float, steps: int, seed: int) -> Iterator[Tensor]:
    """Each step's small-batch gradients: |true|^2 = `sqr`, trace of their covariance = `var`."""
    random = torch.Generator().manual_seed(seed)
    true = torch.full((SIZE,), (sqr / SIZE) ** 0.5)
    for _ in range(steps):
        noise = torch.randn(SMALL_BATCHES, SIZE, generator=random)
        yield true + (var / SIZE) ** 0.5 * noise


def low_signal(make: Callable[[], Estimator], runs: int, steps: int) -> list[Seen]:
    """Per run: what is seen with |true|^2 = 1 and noise 40, averaged over its last two thirds."""
    result = []
    for run in range(runs):
        estimator = make()
        seen = [estimator.step(g) for g in gradients(1.0, 40.0, steps, run)][steps // 3 :]
        result.append(Seen(*map(fmean, zip(*seen, strict=True))))
    return result


AFTER = (1, 100, 500)


def change_of_scale(make: Callable[[], Estimator], runs: int, steps: int) -> list[list[float]]:
    """Per run: the gain before the batch is doubled, and after 1, 100 and 500 steps of it.

    |true|^2 is 1 and the noise of a batch of scale 1 is 4. At first each of the two small
    batches is one of those (scale 2), then twice as large (scale 4), with half the noise.
    """
    result = []
    for run in range(runs):
        estimator = make()
        before = [estimator.step(g) for g in gradients(1.0, 4.0, steps, run)]
        estimator.set_scale(4.0)
        after = [estimator.step(g) for g in gradients(1.0, 2.0, max(AFTER), 1000 + run)]
        result.append([before[-1].gain, *(after[i - 1].gain for i in AFTER)])
    return result


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard error over runs."""
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{fmean(values):.{digits}f} ± {error:.{digits}f}"


PAGE = """# Are signal and noise estimated right?

With simulated gradients the truth is known. A step has two small batches; each one's gradient is
the true gradient plus normal noise, over {size} parameters. Every implementation gets the same
gradients, with its own defaults. {runs} runs; ± is the standard error over them.

```bash
python benchmarks/peers.py       # once: an environment with fairscale 0.4.13 and adaptdl 0.2.11
python benchmarks/estimator.py
```

## Where the noise is much larger than the signal

The signal |true gradient|² is 1 and the trace of the covariance is 40, so the gain at scale 2 is
(40 + 1) / (40 / 2 + 1) = 1.952. Means over the last {kept} of {steps} steps:

{low}

One step's estimate of |true gradient|² is unbiased, and often negative. fairscale cuts it off at
zero in every step, before averaging, and so averages only upwards errors. manyhands and adaptdl
apply their floors to the average.

## After a change of the batch size

|true gradient|² is 1 and the noise of a batch of scale 1 is 4. After {steps} steps at scale 2
both small batches are doubled: `set_scale(4.0)`. The true gain goes from 5 / 3 = 1.67 to
5 / 2 = 2.50.

{change}

The noise is kept for a batch of scale 1, which does not depend on the scale in use, so nothing
has to be rescaled. fairscale's `set_scale` multiplies it by old / new scale by default and then
needs a thousand steps to forget that.
"""


def main() -> None:
    quick = pages.parser(__doc__).parse_args().quick
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="adaptdl|fairscale")
    runs, steps = (2, 60) if quick else (16, 3000)
    low, change = [["the truth", "1", "40", "1.952"]], [["the truth", *["1.667"], *["2.500"] * 3]]
    for name, make in estimators().items():
        seen = low_signal(make, runs, steps)
        low.append([name, *map(spread, zip(*seen, strict=True), (2, 2, 3))])
        gains = zip(*change_of_scale(make, runs, steps), strict=True)
        change.append([name, *(spread(values, 3) for values in gains)])
    tables = {
        "low": pages.table("estimate by | signal | noise | gain", low),
        "change": pages.table(
            "gain | before | after 1 step | after 100 steps | after 500 steps", change
        ),
    }
    print(*tables.values(), sep="\n\n")
    if not quick:
        kept = steps - steps // 3
        pages.write("estimator", PAGE, size=SIZE, runs=runs, steps=steps, kept=kept, **tables)


if __name__ == "__main__":
    main()

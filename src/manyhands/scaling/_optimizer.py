"""Step an optimizer with learning rates multiplied by a rule's factors.

Order of a step
    backward    `Measurement` measures gradients and sends a small payload (`_step.py`)
    gain()      optional: the gain including the current gradients
    step()      the averages add the step's norms (`_noise.py`), the rule returns a factor per
                parameter group, the inner optimizer steps with multiplied learning rates
    progress    grows by the gain

`RuleCore` stores the state of a rule. The user's optimizer and a trainer's proxy share a core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from manyhands._arguments import real
from manyhands._optimizers.foreign import advice, report_skip
from manyhands._optimizers.wrappers import (
    LossScale,
    OptimizerWrapper,
    ParamGroup,
    ScalerSignals,
    apply_signals,
    params_of,
)
from manyhands._ranks.presence import count_step
from manyhands._ranks.ranks import RankGroup
from manyhands._ranks.stop_notice import stop_notice
from manyhands.scaling._batch import Batch
from manyhands.scaling._binding import Binding
from manyhands.scaling._hooks import PlainNorm
from manyhands.scaling._noise import (
    History,
    NoiseAverage,
    NormSums,
    default_steps_between,
    steps_between,
)
from manyhands.scaling._payload import RankReport, SentStep, StepObserver
from manyhands.scaling._step import Measurement

NONFINITE_LIMIT = 10


@dataclass
class StepReporter:
    """Send a rule's numbers after the last pass of a step."""

    batch: Batch
    history: History
    inner: Optimizer | None = None
    observer: StepObserver | None = None

    def end_passes(self, measurement: Measurement) -> None:
        if measurement.step.too_many:
            raise RuntimeError(measurement.describe_excess())
        report = RankReport()
        if self.observer is not None:
            report = self.observer.report()
        assert self.inner is not None
        rates = [group.get("lr", 0.0) for group in self.inner.param_groups]
        # Reading a tensor could wait for the device.
        known = math.fsum(rate for rate in rates if isinstance(rate, int | float))
        report = report._replace(
            stop=float(stop_notice.received),
            checksum=self.history.checksum,
            rates=known,
        )
        measurement.complete(report)


@dataclass(eq=False)
class RuleCore:
    """The state of a rule: batch, wrapped optimizer and history."""

    batch: Batch
    world_size: int | None
    process_group: dist.ProcessGroup | None
    loss_scale: LossScale
    ranks: RankGroup = field(default_factory=RankGroup)
    history: History = field(default_factory=lambda: History(NoiseAverage(0)))
    inner: Optimizer | None = None
    measure_every: int | None = None  # steps; None: depends on the memory of the averages
    reports: Sequence[RankReport] = ()  # of the last completed step
    _previewed: SentStep | None = None  # the current step, if `current` has read it

    def __post_init__(self) -> None:
        self.reporter = StepReporter(self.batch, self.history)

    def start(self, inner: Optimizer, norms: PlainNorm, average: NoiseAverage) -> None:
        self.inner = inner
        self.reporter.inner = inner
        groups = inner.param_groups
        device = params_of(groups)[0].device
        self.measurement = Measurement(
            groups,
            self.ranks.with_own_group(device),
            norms,
            self.batch,
            self.loss_scale,
            self.reporter.end_passes,
            compare_at_scale_1=self.batch.loop.counts,
        )
        self.binding = Binding(inner)
        self.history.average = average

    def change_ranks(
        self, ranks: RankGroup, passes: int, full_workers: int, full_passes: int
    ) -> None:
        """Continue on other ranks, with the batch and the scale of a full run."""
        assert self.inner is not None
        self.ranks = ranks
        self.batch.set_passes(passes)
        self.batch.workers = full_workers
        self.batch.pass_share = full_passes / passes
        self.measurement.change_ranks(ranks, self.inner.param_groups)

    # -- between backward and step -----------------------------------------------------------

    @property
    def current(self) -> NoiseAverage:
        """The average including gradients that have no step yet."""
        sent = self.measurement.step.sent
        if sent is None:
            return self.history.average
        sent.read()
        self._previewed = sent
        return self.history.average_with(sent.sums, self._weight(sent.sums))

    def forget(self) -> None:
        self._previewed = None
        self.measurement.clear()

    @property
    def keeps_gradients(self) -> bool:
        """Whether `zero_grad` has no effect, in a loop that calls it after every pass."""
        loop = self.batch.loop
        if loop.declared_last is not None:  # such a loop may also clear before the first pass
            return self.measurement.step.passes > 0
        return loop.in_mid_step

    # -- in a step ---------------------------------------------------------------------------

    def complete(self, inner: Optimizer) -> None:
        """Obtain all ranks' numbers for `step`.

        Raise if the step is short on all ranks, unless the loop has declared its last pass.
        """
        measurement = self.measurement
        sent = measurement.step.sent or self._complete_early(inner)
        passes = measurement.step.passes
        if passes >= sent.claims.passes:
            return
        sent.read()
        if not sent.is_short:
            return
        if not measurement.step.corrected:
            self.forget()
            raise RuntimeError(self.batch.describe_short(passes))
        self.history.short += 1

    def _complete_early(self, inner: Optimizer) -> SentStep:
        """Send the numbers of a step with missing passes, or raise on every rank."""
        # It is valid if DDP has averaged other ranks' gradients with this rank's zeros.
        measurement = self.measurement
        if not measurement.hooks.active:
            raise RuntimeError("unhook() was called, so gradients are no longer measured.")
        if measurement.in_one_sample:
            raise RuntimeError("step() inside one_sample(): leave the `with` block first.")
        if measurement.hooks.passes.open:
            raise RuntimeError("step() while backward() is running: call step() afterwards.")
        passes = measurement.step.passes
        sent = measurement.complete_early(inner)
        sent.read()  # raises if the ranks disagree
        if sent.ranks > 1 and sent.claims.passes > 0 and not sent.is_short:
            return sent
        if sent.most_passes_seen and not self.batch.loop.counts:
            return sent  # a short step, handled by `complete`
        self.forget()
        if passes > 0:
            text = f"step() inside no_sync(): run the last of {passes} passes outside it."
        elif not measurement.measures(inner.param_groups):
            text = (
                "the optimizer's parameters were replaced after wrapping. Wrap the optimizer with "
                f"the new parameters.{advice('replaced parameters')}"
            )
        else:
            text = "step() without a backward() that reached a parameter of this optimizer."
            if measurement.hooks.parameters_moved:
                text += " Parameters were moved or converted: wrap the optimizer afterwards."
        raise RuntimeError(text)

    def finish_step(self, signals: ScalerSignals) -> bool:
        """Add the step to the history; return whether the scaler skips it."""
        step = self.measurement.step
        sent = step.sent
        assert sent is not None
        if step.problem is not None:
            raise RuntimeError(step.problem)
        if signals.present and not self.loss_scale.known:
            advice = "Pass it when wrapping: grad_scaler=scaler."
            if signals.grad_scale is None:
                raise RuntimeError(
                    f"scaler.unscale_() was called before the loss scale was known. {advice}"
                )
            if self._previewed is sent:
                raise RuntimeError(
                    f"gain() was read before scaler.step(), so it was wrong. {advice}"
                )
        # Copy the scaler's one-element tensors from the device in the same operation.
        tensors = [x for x in (signals.found_inf, signals.grad_scale) if x is not None]
        extras = sent.read(tensors)
        if self.ranks.size > 1:
            count_step(self)
        skipped = bool(extras and extras[0])
        sums = sent.sums
        learned_now = signals.grad_scale is not None and not self.loss_scale.known
        if learned_now and sums is not None:
            changed = self.loss_scale.update(extras[1])
            if changed and sums.consecutive:
                sums = None  # the two compared gradients have different loss scales
            else:
                sums = sums.unscale(extras[1])
        self.reports = sent.reports
        self.history.add(sums, self._weight(sums), skipped=skipped)
        self._previewed = None
        self.measurement.finish_step(self._period())
        return skipped

    def _weight(self, sums: NormSums | None) -> float:
        if sums is None:
            return 0.0
        return self.batch.smoothing_for(sums.scale)

    def _period(self) -> int:
        # A `Ramp` reads every step, and consecutive or non-finite gradients require every step.
        batch = self.batch
        history = self.history
        passes = batch.gradients
        if self.reporter.observer is not None or history.nonfinite_in_a_row or passes == 1:
            return 1
        smoothing = batch.smoothing_for(batch.scale_for(batch.passes))
        held = history.average.steps_held(smoothing)
        memory = 1.0 / (1.0 - smoothing)
        every = self.measure_every or default_steps_between(memory)
        return steps_between(every, memory, held, passes)


class ScaledOptimizer(OptimizerWrapper):
    """The optimizer methods of a rule."""

    layer = "rule"
    _core: RuleCore
    _min_scale = 0.0
    _norm_kind = "plain"

    # `Optimizer.__init__` is not called: groups, state and hooks are the inner optimizer's.

    def _bound(self) -> Optimizer | None:
        return self._core.inner

    @property
    def gradient_ranks(self) -> RankGroup:
        return self._core.ranks

    # -- methods that rules may override -----------------------------------------------------

    def scale_lr(self, scale: float) -> float | Sequence[float]:
        """Return the factor for a batch of `scale` small batches, or one per parameter group."""
        raise NotImplementedError(f"{type(self).__name__} must define scale_lr(scale).")

    def _overrides(self, group: ParamGroup, factor: float) -> Mapping[str, object]:
        if factor == 1.0:
            return {}
        return {"lr": group["lr"] * factor}

    def _before_factors(self, skipped: bool) -> None:
        """Prepare `scale_lr` in each step, on every rank, when `param.grad` is the mean.

        `skipped` is true if the optimizer skips the step because of overflow.
        """

    def _make_norm(self, optimizer: Optimizer) -> PlainNorm:
        return PlainNorm()

    def _check_optimizer_supports(self, scale: float) -> None:
        """Raise if this rule cannot scale this optimizer."""

    # -- properties --------------------------------------------------------------------------

    @property
    def noise(self) -> NoiseAverage:
        self._inner_optimizer()  # raises if there is none
        return self._core.current

    @property
    def scale(self) -> float:
        """Size of the full batch, in small batches."""
        return self._core.batch.scale_for(self.passes)

    @property
    def passes(self) -> int:
        """Backward passes of a step: declared or counted, or the actual number in a short step."""
        core = self._core
        if core.batch.loop.counts and core.inner is not None:
            return core.measurement.step.passes or core.batch.passes
        return core.batch.short or core.batch.passes

    def _check_between_steps(self, what: str) -> None:
        if self._core.inner is not None:
            self._core.measurement.check_between_steps(what)

    def _check_parameter_groups(self) -> None:
        measured = self._core.history.average.groups
        if len(self.param_groups) != measured:
            raise RuntimeError(
                f"the inner optimizer has {len(self.param_groups)} parameter groups, of which "
                f"{measured} are measured. Call the rule's add_param_group()."
            )

    def _check_own_scale(self, scale: float) -> float:
        why = f"It is the size of {type(self).__name__}'s batch in small batches."
        if self._min_scale:
            return real("scale", scale, least=self._min_scale, why=why)
        return real("scale", scale, above=0.0, why=why)

    def _check_batch(self, batch: Batch, passes: int) -> float:
        scale = self._check_own_scale(batch.scale_for(passes))
        if self._core.inner is not None:
            self._check_optimizer_supports(scale)
        return scale

    # -- the optimizer's methods -------------------------------------------------------------

    def step(self, closure: Callable[[], object] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer with learning rates multiplied by the rule's factors.

        A `closure` runs once before the step, so that the factors include its gradients. Its loss
        is returned.
        """
        core = self._core
        if core.batch.loop.in_mid_step:
            return None
        inner = self._inner_optimizer()
        self._check_parameter_groups()
        if closure is not None:
            args = (self._run_once(closure), *args)
        elif core.measurement.step.passes == 0 and core.binding.is_initializing_state():
            return core.binding.step(*args, **kwargs)
        signals = ScalerSignals.read_from(self, inner)
        self._complete(inner)
        skipped = core.finish_step(signals)
        self._before_factors(skipped)
        # Only a scaler skips overflows.
        unscaled = not (signals.present or core.loss_scale.known)
        if unscaled and core.history.nonfinite_in_a_row >= NONFINITE_LIMIT:
            raise RuntimeError(
                f"{NONFINITE_LIMIT} steps were not finite. Use a GradScaler with AMP."
            )
        if skipped:
            report_skip(self)
            return self._end_step(None)
        gain = core.history.average.gain(self.scale)
        factors = parse_factors(self.scale_lr(self.scale), len(inner.param_groups), self)
        core.history.factors = factors
        pairs = zip(inner.param_groups, factors, strict=True)
        overrides = [self._overrides(group, factor) for group, factor in pairs]
        scaler = apply_signals(signals, inner, core.binding.supports_amp)
        with overridden(inner.param_groups, overrides), scaler:
            result = core.binding.step(*args, **kwargs)
        self._count_progress(inner, gain)
        return self._end_step(result)

    # torch wraps the `step` of subclasses to run hooks, which the inner optimizer's `step` runs.
    step.hooked = True  # type: ignore[attr-defined]

    def _run_once(self, closure: Callable[[], object]) -> Callable[[], object]:
        closure = self._in_step(closure)
        with torch.enable_grad():
            return self._core.measurement.hooks.replay(closure(), closure)

    def _complete(self, inner: Optimizer) -> None:
        core = self._core
        batch = self._core.batch
        core.measurement.check_divided()
        if batch.loop.counts:
            self._check_batch(batch, self.passes)
            batch.passes = self.passes
        elif batch.loop.decides:
            self._check_batch(batch, batch.passes)
        core.complete(inner)

    def _count_progress(self, inner: Optimizer, gain: float) -> None:
        core = self._core
        history = self._core.history
        # torch's schedulers warn without this attribute.
        inner._opt_called = True  # type: ignore[attr-defined]
        if getattr(inner, "step_was_skipped", False):
            history.skipped += 1
            return
        core.measurement.norms.optimizer_stepped()
        history.progress += gain

    def _end_step(self, result: Any) -> Any:
        observer = self._core.reporter.observer
        if observer is not None:
            observer.after_step(self._core.reports)
        return result

    def stop_agreed(self) -> bool:
        return any(report.stop for report in self._core.reports)

    # Trainers look for `set_to_none` in the signature.
    def zero_grad(self, set_to_none: bool = True, **kwargs: Any) -> None:
        """Clear the gradients, and their measurements."""
        if self._core.keeps_gradients:
            return
        self.forget_gradients()
        self._core.binding.zero_grad(set_to_none, **kwargs)

    def forget_gradients(self) -> None:
        """Discard the measurements after clearing gradients in an undetectable way."""
        self._inner_optimizer()  # raises if there is none
        self._core.forget()

    def one_sample(self) -> AbstractContextManager[None]:
        """Treat the backward passes in the block as a single pass over the same samples.

        >>> import torch, manyhands as mh
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> first, second = model(torch.ones(3, 2)).mean(dim=0)
        >>> with optimizer.one_sample():
        ...     first.backward(retain_graph=True)
        ...     second.backward()
        >>> optimizer.step()

        While the block is open, a copy of the gradient is stored.
        """
        self._inner_optimizer()  # raises if there is none
        return self._core.measurement.one_sample()

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divide the gradients by the number of passes, for `is_scaled_loss=False`."""
        self._inner_optimizer()  # raises if there is none
        self._core.measurement.divide_for_user()


def parse_factors(factors: Any, groups: int, rule: object) -> tuple[float, ...]:
    """Return `scale_lr`'s result as a float per parameter group."""
    if hasattr(factors, "tolist"):  # a tensor or an array
        factors = factors.tolist()
    if not hasattr(factors, "__len__"):
        factors = [factors] * groups
    values = tuple(map(float, factors))
    if len(values) != groups or not all(math.isfinite(v) and v >= 0.0 for v in values):
        raise ValueError(
            f"{type(rule).__name__}.scale_lr must return one factor, or one for each of the "
            f"{groups} parameter groups, finite and not negative; it returned {values}."
        )
    return values


@contextmanager
def overridden(
    param_groups: Sequence[ParamGroup], overrides: Sequence[Mapping[str, Any]]
) -> Iterator[None]:
    """Change options of the parameter groups, such as the rate, inside the `with` block."""
    before: list[tuple[ParamGroup, str, object]] = []
    try:
        for group, options in zip(param_groups, overrides, strict=True):
            for name, value in options.items():
                old = group[name]
                if isinstance(old, Tensor):  # in place: the optimizer may refer to this tensor
                    before.append((group, name, old.clone()))
                    old.copy_(value)
                else:
                    before.append((group, name, old))
                    group[name] = value
        yield
    finally:
        for group, name, old in before:
            if isinstance(old, Tensor):
                group[name].copy_(old)
            else:
                group[name] = old

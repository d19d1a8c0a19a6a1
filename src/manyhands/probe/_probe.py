"""`probe_batch`: which batch is the largest that loses nothing? Try batches from where the run is.

The budget is divided evenly. With K scales, R repeats and H held-out micro-batches, each branch
trains on T micro-batches, and a forward pass over a held-out one counts as a third of a pass:

    cost = R K (T + H / 3) <= budget            T: a multiple of every scale's passes in a step

Every repeat has micro-batches of its own, in the order in which they come. Its K branches are
trained on them one after the other, each from the same state (`_branches.py`).

All ranks call `probe_batch` together. The losses are averaged over the ranks, so all ranks come to
the same verdicts. The probe's own collectives are small: one for each branch and for each repeat.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice, pairwise
from numbers import Integral
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._core.agreement import agree
from manyhands._core.modules import no_sync_of
from manyhands._core.state_parts import OptimizerLayers
from manyhands._core.trees import tensors_in
from manyhands.checkpoint._random import random_state, set_random_state
from manyhands.probe._branches import Branches, LossFunction, TrainingSnapshot, seed_generators
from manyhands.probe._result import ProbedScale, ProbeResult
from manyhands.probe._verdict import (
    MEANINGFUL,
    LossDifference,
    Losses,
    compare,
    largest_level,
    run_spread,
)
from manyhands.scaling._hooks import any_values
from manyhands.scaling._rule_base import ScalingRuleBase

FEWEST_STEPS = 5  # of the largest scale's branch


def probe_batch(
    model: nn.Module,
    optimizer: Optimizer,
    loss: LossFunction,
    batches: Iterable[object],
    *,
    budget: int,
    scales: Sequence[int] = (1, 2, 4, 8),
    repeats: int = 6,
    held_out: int = 32,
    cooldown: float = 0.5,
    confidence: float = 0.95,
    seed: int = 0,
) -> ProbeResult:
    """Find the largest batch that is level with the present one, by training branches of the run.

    From the present state, one branch is trained for each scale: with `scale` times the present
    number of passes in each step, at the learning rate of the rule, on the same samples. This is
    repeated on other samples. A paired test on the held-out losses says which scales are level. At
    the end, or if `loss` raises, model, optimizer, rule and random generators are as they were.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = mh.AdamScale(torch.optim.AdamW(model.parameters(), lr=0.01))
    >>> def loss(model, batch):
    ...     return torch.nn.functional.mse_loss(model(batch), batch[:, :1])
    >>> batches = (torch.randn(8, 4) for _ in range(1000))
    >>> result = mh.probe_batch(model, optimizer, loss, batches, budget=2000)
    >>> result.largest in (1, 2, 4, 8)
    True

    Call it on every rank, between two steps, after `zero_grad()`. Schedules stand still during a
    probe: the learning rate stays what it is now, until the cooldown.

    Args:
        model: the model as it is trained: under DDP, the module around it.
        optimizer: a scaling rule, which sets the learning rate of each branch.
        loss: `loss(model, batch)` returns the mean loss of a micro-batch.
        batches: micro-batches of this rank. The first `held_out` of them are for evaluation.
        budget: the most backward passes that the probe may take on each rank, for all branches
            together. A twentieth of the run's passes costs 5 % of its samples.
        scales: batches in units of the present one, from 1 upwards.
        repeats: how often each branch is trained. Fewer than five decide little.
        held_out: the number of micro-batches on which each branch is evaluated.
        cooldown: the last part of each branch, over which the learning rate falls to zero.
        confidence: the confidence of each of the test's bounds.
        seed: the seed of the branches' random numbers. All branches of a repeat have the same.
    """
    rule = _check_rule(optimizer)
    ranks, batch = rule._ranks, rule._batch
    settings = {
        "budget": budget,
        "scales": list(scales),
        "repeats": repeats,
        "held_out": held_out,
        "cooldown": cooldown,
        "confidence": confidence,
        "seed": seed,
        "gradients that are not cleared": any_values([*_params_of(rule), *model.parameters()]),
    }
    # First of all: with other arguments on one rank, every later check could fail on that rank
    # alone, and leave the others waiting.
    agree(ranks, settings, "Call probe_batch() on every rank with the same arguments.")
    _check_settings(settings)
    rule._check_between_steps("probe_batch()")
    if settings["gradients that are not cleared"]:
        raise RuntimeError(
            "probe_batch() found gradients, which it would clear. Call it between two steps, after "
            "zero_grad() of every optimizer that the model has."
        )
    _check_scales(rule, scales)
    length = branch_length(budget, [scale * batch.passes for scale in scales], repeats, held_out)
    stream = _Stream(rule, batches, needed=held_out + repeats * length)
    branches = Branches(
        model, rule, loss, stream.take(held_out), cooldown, no_sync_of(model) or nullcontext
    )
    losses = _train_all(branches, stream, [s * batch.passes for s in scales], repeats, length, seed)
    differences = [compare(each, losses[0], confidence) for each in losses[1:]]
    rows = _rows(scales, batch.passes, length, losses, differences)
    largest, worse = largest_level(scales, [row.verdict for row in rows])
    return ProbeResult(
        rows=rows,
        largest=largest,
        interval=(largest, worse),
        margin=MEANINGFUL * run_spread(losses[0]),
        samples=None if stream.samples is None else stream.samples * len(scales),
        passes=math.ceil(_cost(length, len(scales), repeats, held_out)),
        confidence=confidence,
    )


def _train_all(
    branches: Branches,
    stream: _Stream,
    passes: Sequence[int],
    repeats: int,
    length: int,
    seed: int,
) -> list[Losses]:
    """Return the losses by scale, repeat and held-out micro-batch."""
    rule = branches.rule
    rank = rule._ranks.rank
    # A `Ramp` must not take a branch's steps for steps of the run.
    observer, rule._observer = rule._observer, None
    losses: list[list[list[float]]] = [[] for _ in passes]
    snapshot = TrainingSnapshot(branches.model, rule)
    try:
        for repeat in range(repeats):
            micro_batches = stream.take(length, trained=True)
            for of_scale, each in zip(losses, passes, strict=True):
                snapshot.restore()
                # After `restore`, which brings the generators back as well.
                seed_generators(seed, repeat, rank)
                if branches.train(each, micro_batches):
                    seed_generators(seed, repeats, rank)  # the same for every evaluation
                    of_scale.append(branches.evaluate())
                else:
                    of_scale.append([math.nan] * len(branches.held_out))
    finally:  # also after an error in `loss`
        snapshot.restore()
        rule._observer = observer
    return list(losses)


def _rows(
    scales: Sequence[int],
    passes: int,
    length: int,
    losses: Sequence[Losses],
    differences: Sequence[LossDifference],
) -> tuple[ProbedScale, ...]:
    own = LossDifference(0.0, 0.0, 0.0, "reference")
    if not all(math.isfinite(loss) for repeat in losses[0] for loss in repeat):
        own = replace(own, verdict="diverged")
    return tuple(
        ProbedScale(
            scale=scale,
            passes=scale * passes,
            steps=length // (scale * passes),
            losses=tuple(math.fsum(repeat) / len(repeat) for repeat in of_scale),
            difference=difference.mean,
            low=difference.low,
            high=difference.high,
            verdict=difference.verdict,
        )
        for scale, of_scale, difference in zip(scales, losses, [own, *differences], strict=True)
    )


class _Stream:
    """The micro-batches of this rank, of which all ranks take equally many.

    A loader may draw them with the random generators that the branches seed. So the stream keeps
    generator states of its own from one `take` to the next. Otherwise all repeats would draw the
    same micro-batches.
    """

    def __init__(self, rule: ScalingRuleBase, batches: Iterable[object], needed: int) -> None:
        self._ranks = rule._ranks
        self._batches: Iterator[object] = iter(batches)
        self._needed = needed
        self._taken = 0
        self._random = random_state()
        self.samples: int | None = 0  # taken to train on so far, over all ranks; None if unknown

    def take(self, count: int, trained: bool = False) -> list[object]:
        """Return the next micro-batches; raise on every rank if one has too few."""
        taken = self._draw(count)
        sizes = [_size(batch) for batch in taken] if trained else []
        # NaN stands for a size that is not known.
        own = [float(len(taken)), sum(math.nan if size is None else float(size) for size in sizes)]
        counts, samples = zip(*self._ranks.all_gather(own, self._ranks.any_device), strict=True)
        if min(counts) < count:
            rank = counts.index(min(counts))
            where = f" on rank {rank}" if self._ranks.size > 1 else ""
            raise ValueError(
                f"this probe needs {self._needed:,} micro-batches on every rank, and `batches` had "
                f"{self._taken + int(min(counts)):,}{where}. Give more (a loader may be repeated: "
                "itertools.chain), or a smaller budget."
            )
        self._taken += count
        total = sum(samples)
        known = self.samples is not None and math.isfinite(total)
        self.samples = (self.samples or 0) + int(total) if known else None
        return taken

    def _draw(self, count: int) -> list[object]:
        outside = random_state()
        set_random_state(self._random)
        try:
            return list(islice(self._batches, count))
        finally:
            self._random = random_state()
            set_random_state(outside)


def _size(batch: object) -> int | None:
    """Return the number of samples: the first dimension of a micro-batch's first tensor."""
    return next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim() > 0), None)


# -- the budget ------------------------------------------------------------------------------------


def branch_length(budget: int, steps: Sequence[int], repeats: int, held_out: int) -> int:
    """Return how many micro-batches each branch trains on; `steps` are the passes in its steps.

    >>> branch_length(budget=2000, steps=[1, 2, 4, 8], repeats=6, held_out=32)
    72
    """
    common = math.lcm(*steps)  # so that a branch of any scale has whole steps only
    share = budget / (repeats * len(steps)) - held_out / 3
    length = math.floor(share / common) * common
    fewest = math.ceil(FEWEST_STEPS * max(steps) / common) * common
    if length < fewest:
        least = math.ceil(_cost(fewest, len(steps), repeats, held_out))
        raise ValueError(
            f"a probe of {len(steps)} scales with {repeats} repeats needs a budget of at least "
            f"{least:,} passes, got {budget:,}: {FEWEST_STEPS} steps at the largest scale are "
            f"{fewest:,} passes for each branch. Give a larger budget, or leave out large scales."
        )
    return length


def _cost(length: int, scales: int, repeats: int, held_out: int) -> float:
    return scales * repeats * (length + held_out / 3)


# -- checks ----------------------------------------------------------------------------------------


def _check_rule(optimizer: Optimizer) -> ScalingRuleBase:
    if not isinstance(optimizer, ScalingRuleBase):
        raise TypeError(
            f"probe_batch() needs a scaling rule, which sets each branch's learning rate, got "
            f"{type(optimizer).__name__}. Write mh.AdaScale(optimizer) for SGD, "
            "mh.AdamScale(optimizer) for Adam and AdamW."
        )
    if optimizer._batch.counts_passes:
        raise TypeError(
            "probe_batch() sets the number of passes, but AdaptiveDataParallel counts them. Wrap "
            "the optimizer with mh.AdaScale(optimizer), the model with DistributedDataParallel."
        )
    if OptimizerLayers.of(optimizer).blocks is not None:
        raise TypeError(
            "probe_batch() cannot undo the sync rounds of blocks, which run in the background. "
            "Probe before the optimizer is wrapped with blocks, on one worker."
        )
    if optimizer._loss_scale.known:
        raise TypeError(
            "probe_batch() does not scale the loss, but this rule expects the loss scale of its "
            "grad_scaler. Probe with a rule without grad_scaler, in bfloat16 or float32."
        )
    return optimizer


def _check_settings(settings: dict[str, Any]) -> None:
    scales = settings["scales"]
    whole = all(isinstance(scale, Integral) for scale in scales)
    rising = whole and all(small < large for small, large in pairwise(scales))
    if not whole or len(scales) < 2 or scales[0] != 1 or not rising:
        raise ValueError(
            f"scales must be whole numbers that begin with 1 and rise, got {tuple(scales)}. The "
            "present batch, 1, is what the others are compared with."
        )
    for name in ("budget", "repeats", "held_out"):
        if not isinstance(settings[name], Integral):
            raise ValueError(f"{name} must be a whole number, got {settings[name]!r}.")
    for name in ("repeats", "held_out"):
        if settings[name] < 2:
            raise ValueError(
                f"{name} must be at least 2, got {settings[name]}: one value has no spread."
            )
    if not 0.0 <= settings["cooldown"] <= 1.0:
        raise ValueError(f"cooldown must be from 0 to 1, got {settings['cooldown']}.")
    if not 0.5 < settings["confidence"] < 1.0:
        raise ValueError(f"confidence must be above 0.5 and below 1, got {settings['confidence']}.")


def _check_scales(rule: ScalingRuleBase, scales: Sequence[int]) -> None:
    """Raise if the rule cannot scale its optimizer that far."""
    batch = replace(rule._batch)
    if batch.scale is not None:
        batch.set_scale(per_pass=batch.scale / batch.passes)
    rule._check_batch(batch, batch.passes * max(scales))


def _params_of(rule: ScalingRuleBase) -> list[Tensor]:
    return [param for group in rule.param_groups for param in group["params"]]

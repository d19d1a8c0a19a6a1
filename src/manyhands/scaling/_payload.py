"""Exchange a step's numbers between the ranks, in one small collective.

Each rank sends one vector, its *payload*:

    small_squares[group]   sum of |g_i|^2 over this rank's small batches
    mean_square[group]     |G|^2 over the parameters that this rank measures (`_mean_gradient.py`)
    report                 what this rank says of itself and of the step: see `RankReport`

The first two come back summed over the ranks, for the estimate. The reports come back as a table
with one row per rank. If ranks disagree, all of them notice it in the same step and raise the same
error. No further collective is needed, in which one of them could be left waiting.

Is this rank the one that the others wait for? Under DDP a rank that ran no backward, ran it inside
`no_sync()`, froze a parameter or left one out has not joined DDP's all-reduce. The other ranks wait
there until the process group's timeout, and this rank would wait as long for their payload. But it
knows that something was odd about its own gradients: a `GradientAnomaly`. It waits for `PATIENCE`
seconds, then looks for a DDP module that cannot have averaged such gradients, and raises an error
if there is one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from manyhands._optimizers.modules import modules_holding
from manyhands._ranks.agreement import raise_if_different
from manyhands._ranks.presence import explained
from manyhands._ranks.ranks import PendingSums, RankGroup, widest_float
from manyhands.scaling._hooks import Norm
from manyhands.scaling._noise import NormSums

Numbers = Tensor | list[float]

ANNOUNCES = "set_num_gradients_to_accumulate()"
SQUARE_TOLERANCE = 1e-5
CHECKSUM_TOLERANCE = 1e-9
RATES_TOLERANCE = 1e-6  # hosts may round a schedule differently


# -- what a rank says -----------------------------------------------------------------------------


class RankReport(NamedTuple):
    """What one rank says about itself, and what it believes about a step."""

    # Each rank may say something else.
    micro_batch: float = 0.0  # samples in its first training input, or 0 if unknown
    seconds: float = 0.0  # that the step before took, or 0 if unknown (`ramp/_ramp.py`)
    timed_passes: float = 0.0  # backward passes of that step
    batches: float = 0.0  # micro-batches that it has ready for the next steps
    stop: float = 0.0  # 1 if it was asked to stop (`_ranks/stop_notice.py`)
    # All ranks must agree about the rest.
    is_announcement: float = 0.0  # 1 in a payload that only announces a new number of passes
    passes: float = 0.0  # backward passes of a whole step
    # Passes that this rank has seen; fewer if its losses in the other passes used none of the
    # parameters, which is allowed on some ranks, but not on all.
    passes_seen: float = 0.0
    scale: float = 0.0  # size of the whole batch in small batches
    checksum: float = 0.0  # of the progress, the averages so far and the last factors
    rates: float = 0.0  # the sum of the parameter groups' learning rates
    unmeasured_left: float = 0.0  # steps until the next one that is measured; 0: this one is
    # Squared norm of some averaged gradients that every rank holds whole: equal on all ranks,
    # unless the gradients were not averaged. The last, because it may be on a device.
    shared_square: float = 0.0


CLAIMS = RankReport._fields


class StepObserver(Protocol):
    """Reports something at every step of a rule, and learns what all ranks reported."""

    def report(self) -> RankReport:
        """Return this rank's report, at the end of a step's last backward pass."""

    def after_step(self, reports: Sequence[RankReport]) -> None:
        """Act at the end of `optimizer.step()`; each rank is given the same reports.

        They are those of this step.
        """

    def after_load(self) -> None:
        """Act after the rule has loaded its state, which includes the batch of a step."""

    def after_sync(self, seconds: float) -> None:
        """Take note that blocks around the rule took so many seconds for a sync after its step."""


def parse_reports(numbers: Sequence[float]) -> list[RankReport]:
    """Return every rank's report, in rank order, from the numbers of all ranks."""
    table = []
    for start in range(0, len(numbers), len(CLAIMS)):
        table.append(RankReport(*numbers[start : start + len(CLAIMS)]))
    return table


def check_claims(
    table: Sequence[RankReport], *, short_allowed: bool = False, same_passes: bool = False
) -> None:
    """Raise if the ranks disagree about a step.

    A step that is short on all ranks has no numbers, unless that is allowed. The gradients of such
    a step must have been averaged too, over ranks that have seen equally many passes.
    """
    # The order of the checks matters: an announcement leaves most other entries at zero.
    columns = dict(zip(CLAIMS, zip(*table, strict=True), strict=True))
    announces = columns["is_announcement"]
    if min(announces) != max(announces):
        calls = {0.0: "step()", 1.0: ANNOUNCES}
        rows = [{"calls": calls[value]} for value in announces]
        raise_if_different(rows, "Call it on every worker.")
    passes = columns["passes"]
    if len(set(zip(passes, columns["scale"], strict=True))) > 1:
        raise_if_different(
            [{"backward passes per step": c.passes, "scale": c.scale} for c in table],
            "Set the same on every worker.",
        )
    seen = columns["passes_seen"]
    short = max(seen) < passes[0]
    if short and not (short_allowed and max(seen)):
        return  # the caller of `step` knows why, and raises or leaves the step out
    if same_passes or short:
        _check_equal(
            "numbers of backward passes in a step",
            seen,
            f"Give all workers as many batches; a whole step has {passes[0]:g} passes.",
        )
    _check_equal(
        "statistics, progress or factors (checksums)",
        columns["checksum"],
        "Load the state dict on every worker, and let scale_lr() depend only on what all "
        "workers know.",
        CHECKSUM_TOLERANCE,
    )
    _check_equal(
        "learning rates (sum over parameter groups)",
        columns["rates"],
        "Give ReduceLROnPlateau, and any other schedule, the same values on every worker.",
        RATES_TOLERANCE,
    )
    _check_equal(
        "numbers of steps until the next measured one",
        columns["unmeasured_left"],
        "Is there a Ramp on some workers only?",
    )
    _check_averaged(columns["shared_square"])


def _check_equal(name: str, values: Sequence[float], remedy: str, tolerance: float = 0.0) -> None:
    """Raise if the ranks' values differ by more than `tolerance` times the largest."""
    largest = max(values)
    if largest - min(values) > tolerance * abs(largest):
        raise_if_different([{name: value} for value in values], remedy)


def _check_averaged(shared_squares: Sequence[float]) -> None:
    """Raise if a gradient that all ranks hold is not the same on all of them."""
    largest = max(shared_squares)
    smallest = min(shared_squares)
    if not math.isfinite(largest + smallest):
        return  # gradients that are not finite are counted, and left out
    # a reduction may round differently on each rank
    if largest - smallest > SQUARE_TOLERANCE * abs(largest):
        raise_if_different(
            [{"gradients (norms after backward())": max(v, 0.0) ** 0.5} for v in shared_squares],
            "Is the model in DistributedDataParallel, and was the step's last backward() outside "
            "no_sync()? If it is averaged in another group, pass process_group=...; if each worker "
            "trains on its own, world_size=1.",
        )


@dataclass
class LocalNumbers:
    """What this rank has measured in a step."""

    numbers: Numbers  # `small_squares`, then `mean_square`
    small_batches: float  # on all ranks; 1 if there was nothing to compare the gradient with
    shared_square: Norm = 0.0  # see `RankReport`
    consecutive: bool = False  # whether two steps' gradients were compared
    norm_kind: str = "plain"
    steps: int = 1  # that this one stands for (`MeasuredSteps`)


# -- there and back -------------------------------------------------------------------------------


class StepExchange:
    """Sends a rank's payload to the others once a step, and announcements between steps."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks
        self._announcements: list[PendingSums] = []  # sent, and not checked yet

    def set_groups(self, groups: int, device: torch.device) -> None:
        """Send numbers of so many parameter groups from now on, from this device."""
        self._groups = groups
        self._device = device

    def send(
        self, local: LocalNumbers, claims: RankReport, *, short_allowed: bool, same_passes: bool
    ) -> SentStep:
        """Start the step's collective, and return what its result is read from."""
        # Kept until the next step's has begun: see `PendingSums`.
        self._last_sent = self._start(local.numbers, claims, local.shared_square)
        return SentStep(
            self._last_sent,
            self._groups,
            self.ranks.size,
            local,
            claims,
            short_allowed=short_allowed,
            same_passes=same_passes,
        )

    def _start(self, numbers: Numbers, claims: RankReport, shared_square: Norm) -> PendingSums:
        """Start a collective with this rank's payload, one vector."""
        if self.ranks.size == 1:  # numbers of the host stay there: reading them waits for nothing
            payload = to_tensor(numbers, torch.device("cpu"))
        elif isinstance(numbers, list) and isinstance(shared_square, float):
            payload = to_tensor([*numbers, *claims[:-1], shared_square], self._device)
        else:
            parts = [to_tensor(numbers, self._device), to_tensor(list(claims), self._device)]
            payload = torch.cat(parts)
            payload[-1] = shared_square  # on the device, without a copy to the host and back
        return self.ranks.sum_and_gather(payload, 2 * self._groups)

    def announce(self, passes: int, scale: float, checksum: float = 0.0) -> None:
        """Announce to the other ranks that steps have so many passes from now on.

        This does not wait. If a rank announces something else, or nothing until the end of its
        next step, all ranks notice: an announcement is as long as a step's payload, so it is
        paired with whatever the other ranks send next.
        """
        if self.ranks.own_group:
            claims = RankReport(
                is_announcement=1.0,
                passes=passes,
                passes_seen=passes,
                scale=scale,
                checksum=checksum,
            )
            self._announcements.append(self._start([0.0] * (2 * self._groups), claims, 0.0))

    def check_announcements(self, patience: float = math.inf) -> None:
        """Raise if other ranks announced something else. Wait for them, but at most `patience`."""
        deadline = time.monotonic() + patience
        while self._announcements:
            left = deadline - time.monotonic()
            if patience < math.inf and not self._announcements[0].done_within(left):
                return
            numbers = self._announcements.pop(0).read()
            check_claims(parse_reports(numbers[2 * self._groups :]))


@dataclass
class SentStep:
    """One step's numbers, on the device until `read`."""

    pending: PendingSums
    groups: int
    ranks: int
    local: LocalNumbers
    claims: RankReport  # this rank's
    short_allowed: bool  # whether a step that is short on all ranks counts
    same_passes: bool  # whether all ranks must have seen equally many passes
    anomaly: GradientAnomaly | None = None  # if any, an error instead of waiting forever
    # after `read`
    was_read: bool = False
    sums: NormSums | None = None
    reports: Sequence[RankReport] = ()  # of every rank
    most_passes_seen: float = 0.0  # by the rank that has seen the most
    _host: Tensor | None = None  # the numbers on the host, or on their way there
    _copied: torch.cuda.Event | None = None

    @property
    def is_short(self) -> bool:
        """After `read`: whether no rank has seen all passes."""
        return self.most_passes_seen < self.claims.passes

    @property
    def share(self) -> float:
        """After `read`: of the passes of a whole step, those that a short one had, if it counts."""
        if not (self.is_short and self.short_allowed and self.most_passes_seen):
            return 1.0
        return self.most_passes_seen / self.claims.passes

    def start_copy(self) -> None:
        """Begin to copy the numbers to the host, without waiting."""
        self._check_late()
        numbers = self.pending.wait()
        if numbers.device.type != "cuda":
            self._host = numbers
        else:
            # only a copy into pinned memory is asynchronous; the event says when it is done
            self._host = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self, extras: Sequence[Tensor] = ()) -> list[float]:
        """Wait for the numbers of all ranks, and return the values of the extras.

        Everything comes in one copy, because each copy from a GPU is a synchronization.
        """
        if self.was_read:
            return list(map(float, extras))
        numbers = self._numbers(extras)
        end = len(numbers) - len(extras)
        reports: Sequence[RankReport] = (self.claims,)
        if self.ranks > 1:
            reports = parse_reports(numbers[2 * self.groups : end])
            check_claims(reports, short_allowed=self.short_allowed, same_passes=self.same_passes)
        self.was_read = True
        self.reports = reports
        self.most_passes_seen = max(report.passes_seen for report in reports)
        self.sums = self._sums(numbers)
        return numbers[end:]

    def _sums(self, numbers: Sequence[float]) -> NormSums | None:
        """Return the norm sums in the numbers of all ranks; None if nothing was compared."""
        groups = self.groups
        share = self.share
        local = self.local
        small_batches = local.small_batches * share
        if small_batches < 2:
            return None
        scale = self.claims.scale * share
        if local.consecutive:
            scale *= 2.0  # two consecutive gradients stand for one step of twice the size
        # The losses were divided by the passes of a whole step, and their sum is the gradient.
        mean_square = [square / share**2 for square in numbers[groups : 2 * groups]]
        return NormSums(
            small_squares=tuple(numbers[:groups]),
            mean_square=tuple(mean_square),
            small_batches=small_batches,
            scale=scale,
            consecutive=local.consecutive,
            norm_kind=local.norm_kind,
            steps=local.steps,
        )

    def _numbers(self, extras: Sequence[Tensor]) -> list[float]:
        """Return the numbers of all ranks, then the extras."""
        numbers = self._host
        if numbers is None:
            self._check_late()
            with explained():
                if not extras:
                    return self.pending.read()
                numbers = self.pending.wait()
            flat = [extra.detach().to(numbers).view(1) for extra in extras]
            numbers = torch.cat([numbers, *flat])
        elif self._copied is not None:
            self._copied.synchronize()
        on_host: list[float] = numbers.tolist()
        return on_host

    def _check_late(self) -> None:
        """Raise instead of waiting forever, if this rank's gradients are odd and nothing comes."""
        if self.anomaly is not None:
            self.anomaly.wait(self.pending)


def to_tensor(numbers: Numbers, device: torch.device) -> Tensor:
    """Return the numbers as a tensor on the device, in the widest float there is."""
    if isinstance(numbers, Tensor):
        return numbers
    on_host = torch.tensor(numbers, dtype=widest_float(device))
    return on_host.to(device, non_blocking=True)


# -- late ranks -----------------------------------------------------------------------------------

PATIENCE = 2.0  # seconds

NO_BACKWARD = "step() was called without a backward() before it"
NOT_AVERAGED = (
    "the gradients after the step's last backward() are those that this rank computed alone. Was "
    "that pass inside no_sync()? Only the passes before it may be"
)


@dataclass(frozen=True)
class GradientAnomaly:
    """What was odd about a rank's gradients, and whether DDP may be configured to expect it."""

    rank: int
    params: Sequence[Tensor]
    text: str
    may_be_intended: bool = False

    def wait(self, pending: PendingSums) -> None:
        """Return if the other ranks' payloads are here or may still come; raise if they cannot."""
        if pending.done_within(PATIENCE):
            return

        def waits(module: nn.Module) -> bool:
            if not isinstance(module, DistributedDataParallel):
                return False
            # these two options make DDP average without gradients that a rank did not compute
            expected = module.find_unused_parameters or module.static_graph
            return not (expected and self.may_be_intended)

        if any(modules_holding(self.params, waits)):
            raise RuntimeError(
                f"the other ranks have not sent their part of this step for {PATIENCE:g} s: they "
                f"wait for rank {self.rank}, which is this one. Here {self.text}."
            )


def describe_missing(missing: Sequence[int], expected: int) -> str:
    """Return the text for parameters that had no gradient in the step's last pass."""
    listed = ", ".join(map(str, missing[:8]))
    if len(missing) > 8:
        listed += ", ..."
    return (
        f"{len(missing)} of {expected} parameters had no gradient in the step's last backward() "
        f"(numbers {listed}): frozen, or not used? Use find_unused_parameters=True"
    )

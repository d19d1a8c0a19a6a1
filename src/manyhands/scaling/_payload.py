"""Exchange a step's numbers between the ranks, in one small collective.

Each rank sends one vector, the *payload*:

    small_squares[group]   sum of |g_i|^2 over this rank's small batches
    mean_square[group]     |G|^2 over the parameters that this rank measures (`_mean_gradient.py`)
    report                 see `RankReport`

The collective sums the first two and gathers the reports. If ranks disagree, all ranks raise the
same error in this step, so no further collective can hang.

Under DDP, a rank that ran no backward pass, ran it inside `no_sync()`, or skipped a parameter has
not joined DDP's all-reduce. The other ranks wait there, and this rank would wait for their
payloads. Instead, this rank raises an error after `PATIENCE` seconds, if a DDP module cannot have
averaged its gradients (`GradientAnomaly`).
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


# -- reports ---------------------------------------------------------------------------------------


class RankReport(NamedTuple):
    """A rank's facts about a step."""

    # These entries may differ between ranks.
    seconds: float = 0.0  # duration of the previous step, or 0 if unknown (`ramp/_ramp.py`)
    timed_passes: float = 0.0  # backward passes of that step
    batches: float = 0.0  # micro-batches that are ready for the next steps
    stop: float = 0.0  # 1 after a stop notice (`_ranks/stop_notice.py`)
    # The other entries must be equal on all ranks.
    is_announcement: float = 0.0  # 1 in a payload that only announces a number of passes
    passes: float = 0.0  # backward passes of a full step
    # Fewer on a rank where losses used none of the parameters.
    passes_seen: float = 0.0
    scale: float = 0.0  # size of the full batch in small batches
    checksum: float = 0.0  # of progress, averages and last factors
    rates: float = 0.0  # sum of the parameter groups' learning rates
    unmeasured_left: float = 0.0  # steps until the next measured step; 0: this step
    # Squared norm of gradients that every rank stores, equal if they were averaged. Last, because
    # it may be on a device.
    shared_square: float = 0.0


CLAIMS = RankReport._fields


class StepObserver(Protocol):
    """Adds to a rule's report in every step, and receives all ranks' reports."""

    def report(self) -> RankReport:
        """Return this rank's report, after the last backward pass."""

    def after_step(self, reports: Sequence[RankReport]) -> None:
        """Handle the end of `optimizer.step()`, with all ranks' reports."""

    def after_load(self) -> None:
        """Handle a restored state of the rule, including the batch."""


def parse_reports(numbers: Sequence[float]) -> list[RankReport]:
    table = []
    for start in range(0, len(numbers), len(CLAIMS)):
        table.append(RankReport(*numbers[start : start + len(CLAIMS)]))
    return table


def check_claims(table: Sequence[RankReport], *, may_be_short: bool = False) -> None:
    """Raise if the ranks disagree about a step.

    With `may_be_short`, all ranks must have equally many passes. Otherwise, a step that is short on
    all ranks is not checked further.
    """
    # Check announcements first, because most of their other entries are zero.
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
    if max(seen) < passes[0] and not (may_be_short and max(seen)):
        return
    if may_be_short:
        _check_equal(
            "numbers of backward passes in a step",
            seen,
            f"Give all workers equally many batches; a full step has {passes[0]:g} passes.",
        )
    _check_equal(
        "statistics, progress or factors (checksums)",
        columns["checksum"],
        "Load the state dict on every worker, and make scale_lr() depend only on values that all "
        "workers have.",
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
        "Use a Ramp on all workers or on none.",
    )
    _check_averaged(columns["shared_square"])


def _check_equal(name: str, values: Sequence[float], remedy: str, tolerance: float = 0.0) -> None:
    """Raise if values differ by more than `tolerance` times the largest."""
    largest = max(values)
    if largest - min(values) > tolerance * abs(largest):
        raise_if_different([{name: value} for value in values], remedy)


def _check_averaged(shared_squares: Sequence[float]) -> None:
    largest = max(shared_squares)
    smallest = min(shared_squares)
    if not math.isfinite(largest + smallest):
        return  # handled by `History.add`
    # Reductions may round differently on each rank.
    if largest - smallest > SQUARE_TOLERANCE * abs(largest):
        raise_if_different(
            [{"gradients (norms after backward())": max(v, 0.0) ** 0.5} for v in shared_squares],
            "Wrap the model in DistributedDataParallel, and run the step's last backward() outside "
            "no_sync(). If gradients are averaged in another group, pass process_group=...; if "
            "each worker trains independently, world_size=1.",
        )


@dataclass
class LocalNumbers:
    numbers: Numbers  # `small_squares`, then `mean_square`
    small_batches: float  # on all ranks; 1 if there is no gradient for comparison
    shared_square: Norm = 0.0  # see `RankReport`
    consecutive: bool = False  # whether the gradients of two steps are compared
    norm_kind: str = "plain"
    steps: int = 1  # represented by this step (`MeasuredSteps`)


# -- collectives -----------------------------------------------------------------------------------


class StepExchange:
    """Sends a payload in each step, and announcements between steps."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks
        self._announcements: list[PendingSums] = []

    def set_groups(self, groups: int, device: torch.device) -> None:
        self._groups = groups
        self._device = device

    def send(self, local: LocalNumbers, claims: RankReport, *, may_be_short: bool) -> SentStep:
        # Stored until the next step's collective has started: see `PendingSums`.
        self._last_sent = self._start(local.numbers, claims, local.shared_square)
        return SentStep(self._last_sent, self._groups, self.ranks.size, local, claims, may_be_short)

    def _start(self, numbers: Numbers, claims: RankReport, shared_square: Norm) -> PendingSums:
        if self.ranks.size == 1:  # host numbers stay on the host
            payload = to_tensor(numbers, torch.device("cpu"))
        elif isinstance(numbers, list) and isinstance(shared_square, float):
            payload = to_tensor([*numbers, *claims[:-1], shared_square], self._device)
        else:
            parts = [to_tensor(numbers, self._device), to_tensor(list(claims), self._device)]
            payload = torch.cat(parts)
            payload[-1] = shared_square  # avoids a synchronization
        return self.ranks.sum_and_gather(payload, 2 * self._groups)

    def announce(self, passes: int, scale: float, checksum: float = 0.0) -> None:
        """Announce a new number of passes per step to the other ranks, without waiting.

        All ranks detect a different or missing announcement by the end of the next step: an
        announcement is paired with the other ranks' next payload.
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
        """Raise if ranks announced different numbers. Wait for up to `patience` seconds."""
        deadline = time.monotonic() + patience
        while self._announcements:
            left = deadline - time.monotonic()
            if patience < math.inf and not self._announcements[0].done_within(left):
                return
            numbers = self._announcements.pop(0).read()
            check_claims(parse_reports(numbers[2 * self._groups :]))


@dataclass
class SentStep:
    """The numbers of a step, in transit until `read`."""

    pending: PendingSums
    groups: int
    ranks: int
    local: LocalNumbers
    claims: RankReport
    may_be_short: bool  # whether a step may have fewer passes, equally many on all ranks
    anomaly: GradientAnomaly | None = None  # if any, `read` may raise instead of waiting
    # The following are set by `read`.
    was_read: bool = False
    sums: NormSums | None = None
    reports: Sequence[RankReport] = ()
    most_passes_seen: float = 0.0
    _host: Tensor | None = None  # the numbers on the host, possibly still being copied
    _copied: torch.cuda.Event | None = None

    @property
    def is_short(self) -> bool:
        """After `read`: whether all ranks have missed passes."""
        return self.most_passes_seen < self.claims.passes

    @property
    def share(self) -> float:
        """After `read`: the fraction of a full step's passes in a valid short step, otherwise 1."""
        if not (self.is_short and self.may_be_short and self.most_passes_seen):
            return 1.0
        return self.most_passes_seen / self.claims.passes

    def start_copy(self) -> None:
        self._check_late()
        numbers = self.pending.wait()
        if numbers.device.type != "cuda":
            self._host = numbers
        else:
            # Only copies to pinned memory are asynchronous.
            self._host = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            # The current device may be another.
            self._copied.record(torch.cuda.current_stream(numbers.device))

    def read(self, extras: Sequence[Tensor] = ()) -> list[float]:
        """Wait for all ranks' numbers. Return the extras, copied in the same synchronization."""
        if self.was_read:
            return list(map(float, extras))
        numbers = self._numbers(extras)
        end = len(numbers) - len(extras)
        reports: Sequence[RankReport] = (self.claims,)
        if self.ranks > 1:
            reports = parse_reports(numbers[2 * self.groups : end])
            check_claims(reports, may_be_short=self.may_be_short)
        self.was_read = True
        self.reports = reports
        self.most_passes_seen = max(report.passes_seen for report in reports)
        self.sums = self._sums(numbers)
        return numbers[end:]

    def _sums(self, numbers: Sequence[float]) -> NormSums | None:
        groups = self.groups
        share = self.share
        local = self.local
        small_batches = local.small_batches * share
        if small_batches < 2:
            return None
        scale = self.claims.scale * share
        if local.consecutive:
            scale *= 2.0  # two consecutive gradients form a batch of twice the size
        # The losses were divided by the passes of a full step.
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
        if self.anomaly is not None:
            self.anomaly.wait(self.pending)


def to_tensor(numbers: Numbers, device: torch.device) -> Tensor:
    """Return the numbers in the device's widest float."""
    if isinstance(numbers, Tensor):
        return numbers
    on_host = torch.tensor(numbers, dtype=widest_float(device))
    return on_host.to(device, non_blocking=True)


# -- late ranks -----------------------------------------------------------------------------------

PATIENCE = 2.0  # seconds

NO_BACKWARD = "step() was called without a backward() before it"
NOT_AVERAGED = (
    "the gradients after the step's last backward() were computed by this rank alone. Run the last "
    "pass outside no_sync()"
)


@dataclass(frozen=True)
class GradientAnomaly:
    """Unusual gradients of a rank, which DDP may be configured to expect."""

    rank: int
    params: Sequence[Tensor]
    text: str
    may_be_intended: bool = False

    def wait(self, pending: PendingSums) -> None:
        """Wait for the other ranks' payloads; raise if these ranks wait for this rank."""
        if pending.done_within(PATIENCE):
            return

        def waits(module: nn.Module) -> bool:
            if not isinstance(module, DistributedDataParallel):
                return False
            # With these options, DDP averages even if gradients are missing.
            expected = module.find_unused_parameters or module.static_graph
            return not (expected and self.may_be_intended)

        if any(modules_holding(self.params, waits)):
            raise RuntimeError(
                f"the other ranks have not sent their part of this step for {PATIENCE:g} s: they "
                f"wait for rank {self.rank}, which is this rank. Here {self.text}."
            )

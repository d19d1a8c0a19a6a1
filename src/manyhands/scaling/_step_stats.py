"""The numbers that one step sends through its one small collective, and what comes back.

Each rank sends one vector, its *payload*:

    small_squares[group]   sum of |g_i|^2 over this rank's small batches
    mean_square[group]     |G|^2 over the parameters that this rank measures (`_mean_gradient.py`)
    claims                 what this rank believes about the step: see `RankClaims`

The first two come back summed over the ranks, for the estimate. The claims come back as a table
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
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from manyhands._core.agreement import raise_if_different
from manyhands._core.modules import modules_holding
from manyhands._core.ranks import PendingSums, RankGroup, widest_float
from manyhands.scaling._noise import NormSums

# On a GPU norms stay there, as waiting for them would cost more than the work. On a CPU plain
# floats cost a fraction of what one-element tensors do.
Norm = Tensor | float
Numbers = Tensor | list[float]

ANNOUNCES = "set_num_gradients_to_accumulate()"
SQUARE_TOLERANCE = 1e-5
CHECKSUM_TOLERANCE = 1e-9


class RankReport(NamedTuple):
    """What one rank says about itself. Each rank may say something else."""

    micro_batch: float = 0.0  # samples in its first training input, or 0 if unknown
    seconds: float = 0.0  # that the step before took, or 0 if unknown (`ramp/_ramp.py`)
    timed_passes: float = 0.0  # backward passes of that step
    batches: float = 0.0  # micro-batches that it has ready for the next steps
    stop: float = 0.0  # 1 if it was asked to stop (`_core/stop_notice.py`)


NO_REPORT = RankReport()


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


@dataclass(frozen=True)
class RankClaims:
    """What one rank claims about a step. All ranks must agree, except on `report`.

    is_announcement  1 in a payload that only announces a new number of passes
    passes           backward passes of a whole step
    passes_seen      passes that this rank has seen; fewer if its losses in the other passes used
                     none of the parameters, which is allowed on some ranks, but not on all
    scale            size of the whole batch in small batches
    checksum         of the progress, the averages so far and the last factors
    unmeasured_left  steps until the next one that is measured; 0: this one is
    report           what the rank says about itself: see `RankReport`
    shared_square    squared norm of some averaged gradients that every rank holds whole: equal on
                     all ranks, unless the gradients were not averaged
    """

    is_announcement: float
    passes: float
    passes_seen: float
    scale: float
    checksum: float
    unmeasured_left: float
    report: RankReport
    shared_square: float

    SIZE: ClassVar[int] = 7 + len(RankReport._fields)

    @classmethod
    def parse_table(cls, numbers: Sequence[float]) -> list[RankClaims]:
        """Return every rank's claims, in rank order."""
        table = []
        for i in range(0, len(numbers), cls.SIZE):
            *common, shared_square = numbers[i : i + cls.SIZE]
            announced, passes, seen, scale, checksum, left, *own = common
            report = RankReport(*own)
            table.append(cls(announced, passes, seen, scale, checksum, left, report, shared_square))
        return table

    @staticmethod
    def check(
        table: Sequence[RankClaims], *, counts_short: bool = False, must_see_alike: bool = False
    ) -> bool:
        """Return whether any rank has seen all passes. Raise if the ranks disagree.

        If short steps count, their gradients must have been averaged too, over ranks that have
        seen equally many passes.
        """
        # The order of the checks matters: an announcement leaves most other entries at zero.
        calls = [ANNOUNCES if claims.is_announcement else "step()" for claims in table]
        raise_if_different([{"calls": call} for call in calls], "Call it on every worker.")
        raise_if_different(
            [{"backward passes per step": c.passes, "scale": c.scale} for c in table],
            "Set the same on every worker.",
        )
        seen = [claims.passes_seen for claims in table]
        complete = max(seen) >= table[0].passes
        if not complete and not (counts_short and max(seen)):
            return False  # the caller of `step` knows why, and raises or leaves the step out
        if must_see_alike or not complete:
            raise_if_different(
                [{"numbers of backward passes in a step": number} for number in seen],
                f"Give all workers as many batches; a whole step has {table[0].passes:g} passes.",
            )
        checksums = [claims.checksum for claims in table]
        if max(checksums) - min(checksums) > CHECKSUM_TOLERANCE * abs(max(checksums)):
            raise_if_different(
                [{"statistics, progress or factors (checksums)": each} for each in checksums],
                "Load the state dict on every worker, and let scale_lr() depend only on what all "
                "workers know.",
            )
        raise_if_different(
            [{"numbers of steps until the next measured one": c.unmeasured_left} for c in table],
            "Is there a Ramp on some workers only?",
        )
        _check_averaged([claims.shared_square for claims in table])
        return complete


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
    listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return (
        f"{len(missing)} of {expected} parameters had no gradient in the step's last backward() "
        f"(numbers {listed}): frozen, or not used? Use find_unused_parameters=True"
    )


@dataclass
class StepStats:
    """One step's numbers, on the device until `read`."""

    pending: PendingSums
    groups: int
    ranks: int
    passes: int
    passes_seen: int  # by this rank
    small_batches: float  # 1 if there was nothing to compare the gradient with
    scale: float
    consecutive: bool = False
    norm_kind: str = "plain"
    reports: Sequence[RankReport] = ()  # this rank's own, and after `read` every rank's
    counts_short: bool = False  # whether a step that is short on all ranks counts
    must_see_alike: bool = False  # whether all ranks must have seen equally many passes
    stands_for: int = 1  # steps
    anomaly: GradientAnomaly | None = None  # if any, an error instead of waiting forever
    incomplete_everywhere: bool = False  # after `read`: no rank has seen all passes
    most_passes_seen: float = 0.0  # after `read`: by the rank that has seen the most
    share: float = 1.0  # after `read`: of the passes of a whole step, if a short one counts
    _host: Tensor | None = None  # the numbers on the host, or on their way there
    _copied: torch.cuda.Event | None = None

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

    def read(self, extras: Sequence[Tensor] = ()) -> tuple[NormSums | None, list[float]]:
        """Return the norm sums, if any, and the values of the extras, from here or `start_copy`.

        Everything comes in one copy, because each copy from a GPU is a synchronization.
        """
        if self._host is not None:
            if self._copied is not None:
                self._copied.synchronize()
            numbers = self._host.tolist()
        else:
            self._check_late()
            numbers = self._join_extras(extras).tolist() if extras else self.pending.read()
        groups, end = self.groups, len(numbers) - len(extras)
        small, mean = numbers[:groups], numbers[groups : 2 * groups]
        small_batches = self.small_batches
        self.most_passes_seen = self.passes_seen
        if self.ranks > 1:
            table = RankClaims.parse_table(numbers[2 * groups : end])
            RankClaims.check(
                table, counts_short=self.counts_short, must_see_alike=self.must_see_alike
            )
            self.most_passes_seen = max(claims.passes_seen for claims in table)
            self.reports = [claims.report for claims in table]
        self.incomplete_everywhere = self.most_passes_seen < self.passes
        if self.incomplete_everywhere and self.counts_short and self.most_passes_seen:
            self.share = self.most_passes_seen / self.passes
            # The losses were divided by the passes of a whole step, and their sum is the gradient.
            mean = [square / self.share**2 for square in mean]
            small_batches *= self.share
        if small_batches < 2:
            return None, numbers[end:]
        sums = NormSums(
            *(tuple(small), tuple(mean), small_batches),
            *(self.scale * self.share, self.consecutive, self.norm_kind),
            steps=self.stands_for,
        )
        return sums, numbers[end:]

    @property
    def micro_batch(self) -> float:
        """Samples in a rank's first training input, averaged over the ranks; 0 if unknown."""
        known = [report.micro_batch for report in self.reports if report.micro_batch]
        return sum(known) / len(known) if known else 0.0

    def _check_late(self) -> None:
        """Raise if the other ranks wait for this one."""
        if self.anomaly is not None:
            self.anomaly.wait(self.pending)

    def _join_extras(self, extras: Sequence[Tensor]) -> Tensor:
        numbers = self.pending.wait()
        flat = [extra.detach().to(numbers).view(1) for extra in extras]
        return torch.cat([numbers, *flat]) if flat else numbers


@dataclass(frozen=True)
class StepFacts:
    """What is known about a step when its last backward pass is over.

    The small batches' gradients were divided by `small_batch_divided_by` when they were measured,
    and `.grad` is the mean times `mean_multiplied_by`: it depends on who divides by the passes.
    `small_batches` is how many were compared on all ranks, if not one in each pass.
    """

    passes: int
    passes_seen: int
    scale: float
    loss_scale: Tensor | float
    checksum: float
    report: RankReport
    small_batch_divided_by: int
    mean_multiplied_by: int
    valid: bool
    small_batches: float | None = None
    counts_short: bool = False
    must_see_alike: bool = False
    unmeasured_left: int = 0
    stands_for: int = 1

    @property
    def needs_no_correction(self) -> bool:
        """Whether the norms can be used as they were measured."""
        divided = self.small_batch_divided_by != 1 or self.mean_multiplied_by != 1
        scaled = isinstance(self.loss_scale, Tensor) or self.loss_scale != 1.0
        return self.valid and not divided and not scaled


@dataclass(frozen=True)
class LocalNumbers:
    """What this rank has measured in a step."""

    numbers: Numbers  # `small_squares`, then `mean_square`
    small_batches: float  # on all ranks
    shared_square: Norm = 0.0  # see `RankClaims`
    consecutive: bool = False


class StepExchange:
    """Sends a rank's payload to the others once a step, and announcements between steps."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks
        self._announcements: list[PendingSums] = []  # sent, and not checked yet

    def set_groups(self, groups: int, device: torch.device) -> None:
        """Send numbers of so many parameter groups from now on, from this device."""
        self._groups = groups
        self._device = device

    def send(self, local: LocalNumbers, facts: StepFacts, norm_kind: str) -> StepStats:
        """Start the step's collective and return the statistics that will come of it."""
        # in the order of the fields of `RankClaims`, whose last one is added in `_payload`
        common = facts.passes, facts.passes_seen, facts.scale, facts.checksum
        claims = 0.0, *common, float(facts.unmeasured_left), *facts.report
        payload = self._payload(local.numbers, claims, local.shared_square)
        # Kept until the next step's has begun: see `PendingSums`.
        self._last_sent = self.ranks.sum_and_gather(payload, 2 * self._groups)
        return StepStats(
            pending=self._last_sent,
            groups=self._groups,
            ranks=self.ranks.size,
            passes=facts.passes,
            passes_seen=facts.passes_seen,
            counts_short=facts.counts_short,
            must_see_alike=facts.must_see_alike,
            stands_for=facts.stands_for,
            small_batches=local.small_batches,
            # two consecutive gradients stand for one step of twice the size
            scale=2.0 * facts.scale if local.consecutive else facts.scale,
            consecutive=local.consecutive,
            norm_kind=norm_kind,
            reports=[facts.report],
        )

    def _payload(self, numbers: Numbers, claims: Sequence[float], shared_square: Norm) -> Tensor:
        """Return what this rank sends, as one vector."""
        if self.ranks.size == 1:
            return to_tensor(numbers, self._device)
        if isinstance(numbers, list) and isinstance(shared_square, float):
            return to_tensor([*numbers, *claims, shared_square], self._device)
        payload = torch.cat(
            [to_tensor(numbers, self._device), to_tensor([*claims, 0.0], self._device)]
        )
        payload[-1] = shared_square  # on the device, without a copy to the host and back
        return payload

    def announce(self, passes: int, scale: float, checksum: float = 0.0) -> None:
        """Announce to the other ranks that steps have so many passes from now on.

        This does not wait. If a rank announces something else, or nothing until the end of its
        next step, all ranks notice: an announcement is as long as a step's payload, so it is
        paired with whatever the other ranks send next.
        """
        if self.ranks.own_group:
            claims = [1.0, passes, passes, scale, checksum, 0.0, *NO_REPORT, 0.0]
            payload = to_tensor([0.0] * (2 * self._groups) + claims, self._device)
            self._announcements.append(self.ranks.sum_and_gather(payload, 2 * self._groups))

    def check_announcements(self, patience: float = math.inf) -> None:
        """Raise if other ranks announced something else. Wait for them, but at most `patience`."""
        deadline = time.monotonic() + patience
        while self._announcements:
            if patience < math.inf and not self._announcements[0].done_within(
                deadline - time.monotonic()
            ):
                return
            numbers = self._announcements.pop(0).read()
            RankClaims.check(RankClaims.parse_table(numbers[2 * self._groups :]))


def to_tensor(numbers: Numbers, device: torch.device) -> Tensor:
    """Return the numbers as a tensor on the device, in the widest float there is."""
    if isinstance(numbers, Tensor):
        return numbers
    on_host = torch.tensor(numbers, dtype=widest_float(device))
    return on_host.to(device, non_blocking=True)


def _check_averaged(shared_squares: list[float]) -> None:
    """Raise if a gradient that all ranks hold is not the same on all of them."""
    largest, smallest = max(shared_squares), min(shared_squares)
    if not math.isfinite(largest + smallest):
        return  # the noise tracker counts non-finite gradients and leaves them out
    # a reduction may round differently on each rank
    if largest - smallest > SQUARE_TOLERANCE * abs(largest):
        raise_if_different(
            [{"gradients (norms after backward())": max(v, 0.0) ** 0.5} for v in shared_squares],
            "Was the step's last backward() inside no_sync()? If the model is averaged in another "
            "group, pass process_group=...; if each worker trains on its own, world_size=1.",
        )

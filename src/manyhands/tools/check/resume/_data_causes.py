"""Hypotheses about samples that the resumed run repeats, skips or reorders."""

from dataclasses import dataclass
from typing import Any

from manyhands.tools.check._report import Finding, finding
from manyhands.tools.check.resume._case import ResumeCase, ResumeHypothesis
from manyhands.tools.check.resume._records import RankStep

FIT = 3  # steps that identify a position in the data

Samples = tuple[Any, ...]


@dataclass
class SampleOrder:
    """The samples of each step of a run on a rank."""

    steps: list[Samples]
    epochs: list[int]

    def position(self, step: int) -> int:
        """Return the number of earlier steps in the epoch."""
        return step - self.epochs.index(self.epochs[step])

    def epoch_number(self, step: int) -> int:
        """Return the step's epoch, from 1."""
        return len(set(self.epochs[: step + 1]))


def order_of(steps: list[RankStep], by_index: bool) -> SampleOrder:
    return SampleOrder([step.samples(by_index) for step in steps], [step.epoch for step in steps])


class EpochSamples:
    """The samples of an epoch on all ranks, before and after a step."""

    def __init__(self, case: ResumeCase, step: int, by_index: bool) -> None:
        self.seen: set[Any] = set()  # before the step
        self.rest: set[Any] = set()  # after the step, without interruption
        self.got: set[Any] = set()  # after the step, in the resumed run
        self.known: set[Any] = set()  # of all epochs
        self.complete = True  # the run without interruption reaches the next epoch
        for whole in case.whole:
            epochs = [one.epoch for one in whole.steps]
            self.complete &= len(epochs) > step and epochs[-1] != epochs[step]
            for number, one in enumerate(whole.steps):
                self.known.update(one.samples(by_index))
                if number < step:
                    part = self.seen
                else:
                    part = self.rest
                if epochs[number : number + 1] == epochs[step : step + 1]:
                    part.update(one.samples(by_index))
        for resumed in case.resumed:
            steps = resumed.steps[step - case.at :]
            for one in steps:
                if one.epoch == steps[0].epoch:
                    self.got.update(one.samples(by_index))

    @property
    def twice(self) -> int:
        return len(self.got & self.seen)

    @property
    def never(self) -> int:
        return len(self.rest - self.got)


def indexed(case: ResumeCase) -> bool:
    for history in [*case.whole, *case.resumed]:
        for step in history.steps:
            if len(step.samples(True)) != len(step.samples(False)):
                return False
    return True


def samples(case: ResumeCase) -> Finding | None:
    by_index = indexed(case)
    if not case.same_ranks:
        return samples_on_other_ranks(case, by_index)
    for rank in range(case.ranks):
        whole = order_of(case.whole[rank].steps, by_index)
        resumed = order_of(case.resumed[rank].steps, by_index)
        for number, expected in enumerate(whole.steps[case.at :]):
            if number < len(resumed.steps) and resumed.steps[number] != expected:
                return describe_difference(case, whole, resumed, number, by_index)
    return None


def variable_batch(case: ResumeCase) -> int | None:
    """Return the first step in which the runs differ only in the number of samples.

    A loop may adapt the batch to measured times. The saved size must be restored.
    """
    if not case.same_ranks:
        return None
    for number, (whole, resumed) in enumerate(case.pairs(0)):
        a = whole.samples(False)
        b = resumed.samples(False)
        if a != b:
            least = min(len(a), len(b))
            same = number > 0 and len(a) != len(b) and a[:least] == b[:least]
            return number if same else None
    return None


def describe_difference(
    case: ResumeCase, whole: SampleOrder, resumed: SampleOrder, number: int, by_index: bool
) -> Finding:
    step = case.at + number
    length = resumed.epochs[number:].count(resumed.epochs[number])
    there = matching_step(whole, resumed.steps[number:][:length], step)
    place = f"from step {step + 1} on"
    if there is None:
        return describe_order(case, step, by_index)
    epoch = whole.epoch_number(step)
    other = whole.epoch_number(there)
    if epoch != other and whole.position(step) == whole.position(there):
        return finding("epoch counter", f"{place}, epoch {epoch} has the order of epoch {other}")
    low, high = sorted((there, step))
    count = 0
    for history in case.whole:
        count += sum(len(one.samples(by_index)) for one in history.steps[low:high])
    if there < step:
        text = f"{place}, the run repeats {count} samples, from step {there + 1} on"
        return finding("samples repeated", text)
    text = f"{place}, the run skips {count} samples, and continues with step {there + 1}"
    return finding("samples skipped", text)


def matching_step(whole: SampleOrder, after: list[Samples], step: int) -> int | None:
    """Return the step nearest to `step` with the first samples of the resumed run."""
    found = []
    for there in range(len(whole.steps)):
        count = min(FIT, len(after), len(whole.steps) - there)
        if whole.steps[there : there + count] == after[:count] and after[0]:
            found.append(there)
    return min(found, key=lambda there: abs(there - step), default=None)


def describe_order(case: ResumeCase, step: int, by_index: bool) -> Finding:
    samples = EpochSamples(case, step, by_index)
    if len(samples.got & samples.known) < 0.5 * len(samples.got):
        text = f"the samples of step {step + 1} do not occur in the run without interruption"
        if random_differs(case):
            return finding("random state", f"{text}, and the random state was not restored")
        return finding("other samples", text)
    text = f"from step {step + 1} on, the order of samples differs"
    if samples.twice:
        text += f": the epoch has {samples.twice} samples twice"
    if random_differs(case):
        text += "; the random state was not restored either"
    return finding("shuffle order", text)


def random_differs(case: ResumeCase) -> bool:
    for rank in range(case.ranks):
        saved, restored = case.states(rank)
        if saved.random != restored.random:
            return True
    return False


def samples_on_other_ranks(case: ResumeCase, by_index: bool) -> Finding | None:
    """Compare the samples in the rest of the epoch."""
    samples = EpochSamples(case, case.at, by_index)
    if not samples.complete:
        return None  # the epoch's last sample is unknown
    ranks = f"after {len(case.killed)} ranks became {len(case.resumed)}"
    padding = max(len(case.killed), len(case.resumed))  # samples that fill the last batches
    if samples.twice > padding:
        text = f"{ranks}, the epoch has {samples.twice} samples twice"
        return finding("samples repeated", text)
    if samples.never > padding:
        text = f"{ranks}, the epoch omits {samples.never} samples"
        return finding("samples skipped", text)
    return None


def other_values(case: ResumeCase) -> Finding | None:
    """Find samples with equal indices and different values."""
    if not case.same_ranks or not indexed(case):
        return None
    for rank in range(case.ranks):
        for number, (whole, resumed) in enumerate(case.pairs(rank)):
            if whole.samples(True) != resumed.samples(True):
                return None
            if whole.samples(False) != resumed.samples(False):
                text = f"the samples of step {case.at + number + 1} have equal indices, and "
                text += "different values"
                if random_differs(case):
                    return finding("random state", f"{text}: the random state was not restored")
                return finding("other samples", text)
    return None


DATA_CAUSES: list[ResumeHypothesis] = [samples, other_values]

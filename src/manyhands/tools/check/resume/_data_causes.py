"""Find samples that the resumed run repeats, skips or has in another order."""

from dataclasses import dataclass
from typing import Any

from manyhands.tools.check._report import Finding
from manyhands.tools.check.resume._case import ResumeCase, ResumeHypothesis, finding
from manyhands.tools.check.resume._records import RankStep

FAR = 3  # steps that have to fit

Samples = tuple[object, ...]


@dataclass
class SampleOrder:
    """The samples of each step of a run on one rank."""

    steps: list[Samples]
    epochs: list[int]

    def position(self, step: int) -> int:
        """Return the number of earlier steps in the epoch of a step."""
        return step - self.epochs.index(self.epochs[step])

    def epoch_number(self, step: int) -> int:
        """Return the number of the step's epoch, from 1."""
        return len(set(self.epochs[: step + 1]))


def order_of(steps: list[RankStep], by_index: bool) -> SampleOrder:
    return SampleOrder([step.samples(by_index) for step in steps], [step.epoch for step in steps])


def indexed(case: ResumeCase) -> bool:
    """Return whether the index of every sample is known in all runs."""
    for history in [*case.whole, *case.resumed]:
        for step in history.steps:
            for one in step.passes:
                if len(one.indices) != len(one.hashes):
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
    """Return the first step in which the runs take different numbers of the same samples.

    A loop may choose the batch by measured times. The first resumed step must have the saved size.
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
    """Describe the first step of the resumed run with other samples."""
    step = case.at + number
    epoch = resumed.epochs[number]
    length = resumed.epochs[number:].count(epoch)
    there = matching_step(whole, resumed.steps[number:][:length], step)
    place = f"from step {step + 1} on"
    if there is None:
        return describe_order(case, step, by_index)
    epoch = whole.epoch_number(step)
    other = whole.epoch_number(there)
    if epoch != other and whole.position(step) == whole.position(there):
        text = f"{place}, epoch {epoch} has the order of epoch {other}"
        return finding("epoch counter", text + EpochSamples(case, step, by_index).counts())
    low, high = sorted((there, step))
    count = 0
    for history in case.whole:
        count += sum(len(one.samples(by_index)) for one in history.steps[low:high])
    if there < step:
        text = f"{place}, the run repeats {count} samples, which are those of step {there + 1}"
        if whole.epochs[there] and whole.position(there) == 0 and epoch == other:
            text += ", the first of the epoch"
        return finding("samples repeated", text)
    text = f"{place}, the run skips {count} samples, and goes on with those of step {there + 1}"
    return finding("samples skipped", text)


def matching_step(whole: SampleOrder, after: list[Samples], step: int) -> int | None:
    """Return the step nearest to `step` from which the samples are those of the resumed run."""
    found = []
    for there in range(len(whole.steps)):
        count = min(FAR, len(after), len(whole.steps) - there)
        if whole.steps[there : there + count] == after[:count] and after[0]:
            found.append(there)
    return min(found, key=lambda there: abs(there - step), default=None)


class EpochSamples:
    """The samples of an epoch on all ranks, before and after the first step that differs."""

    def __init__(self, case: ResumeCase, step: int, by_index: bool) -> None:
        self.seen: set[Any] = set()  # before the step
        self.rest: set[Any] = set()  # after it, without interruption
        self.got: set[Any] = set()  # after it, of the resumed run
        self.known: set[Any] = set()  # of all epochs
        for whole, resumed in zip(case.whole, case.resumed, strict=True):
            epochs = [one.epoch for one in whole.steps]
            for number, one in enumerate(whole.steps):
                found = one.samples(by_index)
                self.known.update(found)
                if epochs[number] != epochs[step]:
                    continue
                if number < step:
                    self.seen.update(found)
                else:
                    self.rest.update(found)
            length = epochs[step:].count(epochs[step])
            for one in resumed.steps[step - case.at :][:length]:
                self.got.update(one.samples(by_index))

    def counts(self) -> str:
        twice = len(self.got & self.seen)
        never = len(self.rest - self.got)
        if not self.seen or not (twice or never):
            return ""
        return f": {twice} samples come twice in the epoch, and {never} not at all"


def describe_order(case: ResumeCase, step: int, by_index: bool) -> Finding:
    """Describe samples in another order, or other samples."""
    samples = EpochSamples(case, step, by_index)
    if len(samples.got & samples.known) < 0.5 * len(samples.got):
        text = f"the samples of step {step + 1} are not those of the run without interruption"
        if random_differs(case):
            return finding("random state", f"{text}, and the random state was not restored")
        return finding("other samples", text)
    text = f"from step {step + 1} on, the samples come in another order{samples.counts()}"
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
    """Compare the samples of the rest of the epoch, on all ranks together."""
    seen: set[Any] = set()
    rest: set[Any] = set()
    got: list[Any] = []
    for whole in case.whole:
        epochs = [one.epoch for one in whole.steps]
        if len(epochs) <= case.at or epochs[-1] == epochs[case.at]:
            return None  # the epoch's last sample is unknown
        for number, one in enumerate(whole.steps):
            if epochs[number] != epochs[case.at]:
                continue
            if number < case.at:
                seen.update(one.samples(by_index))
            else:
                rest.update(one.samples(by_index))
    for resumed in case.resumed:
        for one in resumed.steps:
            if one.epoch == resumed.steps[0].epoch:
                got += one.samples(by_index)
    ranks = f"after {len(case.killed)} ranks became {len(case.resumed)}"
    padding = max(len(case.killed), len(case.resumed))  # samples that fill the last batches
    twice = len(seen.intersection(got))
    never = len(rest.difference(got))
    if twice > padding:
        text = f"{ranks}, {twice} samples come twice in the epoch"
        return finding("samples repeated", f"{text}, and {never} not at all")
    if never > padding:
        text = f"{ranks}, {never} samples of the epoch are left out"
        return finding("samples skipped", text)
    return None


def other_values(case: ResumeCase) -> Finding | None:
    """Find samples with the same indices and other values."""
    if not case.same_ranks or not indexed(case):
        return None
    for rank in range(case.ranks):
        for number, (whole, resumed) in enumerate(case.pairs(rank)):
            if whole.samples(True) != resumed.samples(True):
                return None
            if whole.samples(False) != resumed.samples(False):
                text = f"the samples of step {case.at + number + 1} have the same indices, and "
                text += "other values"
                if random_differs(case):
                    return finding("random state", f"{text}: the random state was not restored")
                return finding("other samples", text)
    return None


DATA_CAUSES: list[ResumeHypothesis] = [samples, other_values]

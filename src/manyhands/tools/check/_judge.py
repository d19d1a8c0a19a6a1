"""Run a script on several ranks and as one process, compare them, and look for the cause.

1  on ranks, under the recorder          hypotheses that need nothing else: drift, data, clearing
2  one process with the ranks' batches   joined; else one after the other, and the step waits
3  the same with every pass's batch the whole step's, if a step has several passes
4  where they differ: another order (rounding), the ranks' learning rates, one pass of one rank
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from manyhands.tools.check import _causes
from manyhands.tools.check._compare import Recording, compare
from manyhands.tools.check._feed import Feed, FeedPlan
from manyhands.tools.check._processes import CheckedScript, CheckRun, run
from manyhands.tools.check._report import DIFFERS, EQUAL, UNKNOWN, Finding, Verdict

# relative distances that are rounding: in float64, and else
TIGHT = 1e-6
NATIVE = 2e-4
CAP = 3e-2  # if rounding is larger, nothing is judged


class NotJudged(Exception):
    """Why there is no verdict."""


def check_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    ranks: int = 2,
    steps: int = 5,
    float64: bool | None = None,
    seconds: float = 300.0,
    module: bool = False,
) -> Verdict:
    """Return whether a script, or a module, trains on several ranks what it trains on one."""
    # The first optimizer imports half of torch: once, here, and not in every process.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with tempfile.TemporaryDirectory(prefix="manyhands-check-") as folder:
        job = CheckedScript(script, tuple(arguments), steps, float64 is not False, module)
        check = Check(job, ranks, Path(folder), time.monotonic() + seconds)
        try:
            check.run_ranks(fall_back=float64 is None)
            check.judge()
        except NotJudged as reason:
            check.verdict.code = UNKNOWN
            check.verdict.reason = str(reason)
    return check.verdict


class Check:
    """One script, its runs, and what they say."""

    def __init__(self, job: CheckedScript, world: int, folder: Path, deadline: float) -> None:
        self.job = job
        self.world = world
        self.folder = folder
        self.deadline = deadline
        self.verdict = Verdict(UNKNOWN, world)
        self.plan = FeedPlan("joined", tuple(range(world)))
        self.floor = TIGHT if job.float64 else NATIVE
        self.case = _causes.Case([], self.gradient_of)

    def run(self, job: CheckedScript, world: int, feed: Feed | None = None) -> CheckRun:
        return run(job, world, self.folder, max(self.deadline - time.monotonic(), 1.0), feed)

    def run_ranks(self, fall_back: bool) -> None:
        self.ranks = self.run(self.job, self.world)
        if self.ranks.errors and fall_back:
            native = replace(self.job, float64=False)
            if not (again := self.run(native, self.world)).errors:
                self.ranks = again
                self.job = native
                self.floor = NATIVE
        if self.ranks.errors or self.ranks.late:
            raise NotJudged(self.ranks.why(f"on {self.world} ranks"))
        self.case.ranks = self.ranks.records

    def replay(self, plan: FeedPlan, steps: int | None = None) -> CheckRun:
        feed = Feed(plan, self.ranks.folder, [*self.case.ranks, Recording()][0])
        job = replace(self.job, steps=steps or self.job.steps)
        made = self.run(job, 1, feed)
        if any("process group" in why or "no_sync" in why for why in made.errors.values()):
            made = self.run(replace(job, grouped=True), 1, feed)
        return made

    def gradient_of(self, step: int, rank: int, number: int) -> dict[str, Tensor]:
        """Return the gradient if a step sees only one rank's batch of one of its passes."""
        made = self.replay(replace(self.plan, only=(step, rank, number)), step + 1)
        found = [] if made.failed else made.records[0].steps[step:]
        return found[0].before or found[0].grads if found else {}

    def one_process(self) -> Recording:
        """Return the record of one process that was given the ranks' batches."""
        ranks = self.case.ranks
        keys = [{k for k, x in r.loaders.items() if x.trains} for r in ranks]
        given = [sum(map(len, x.epochs)) for r in ranks for x in r.training_loaders()]
        passes = sum(len(step.passes) for step in self.case.steps)
        leaves_out = max(given, default=0) > 1.5 * passes  # the batches of other ranks, say
        same = bool(keys[0]) and all(other == keys[0] for other in keys)
        loaders = [False] if same and not leaves_out else []
        plans = [(how, calls) for calls in (*loaders, True) for how in ("joined", "split")]
        reasons = []
        for how, calls in [*plans, *(("apart", calls) for calls in (*loaders, True))]:
            self.plan = replace(self.plan, how=how, calls=calls)
            made = self.replay(self.plan)
            if not made.failed and self.fits(made.records[0]):
                return made.records[0]
            other = "one process makes another number of steps or passes"
            reasons.append(made.why("as one process") if made.failed else other)
        raise NotJudged(f"one process cannot be given what the ranks were given: {reasons[0]}")

    def fits(self, record: Recording) -> bool:
        """Whether each step has as many passes as the ranks' batches make."""
        wanted = [len(step.passes) * self.plan.times for step in self.case.steps]
        return wanted == [len(step.passes) for step in record.steps[: len(wanted)]]

    def judge(self) -> None:
        if self.ranks.hangs:
            alone = self.replay(FeedPlan("natural", ()))
            if alone.failed:
                raise NotJudged("the ranks hang, and " + alone.why("as one process"))
            return self.differs(Finding("hang", "ranks wait for ever, where one process does not"))
        if not any(record.steps for record in self.case.ranks):
            raise NotJudged("no torch optimizer made a step in the processes that were started.")
        if not any(record.grouped for record in self.case.ranks):
            raise NotJudged(
                "the script makes no process group, so each rank trains alone. Call "
                "torch.distributed.init_process_group(). Crews are not checked."
            )
        self.note_what_is_off()
        if self.case.ranks[0].blocks:
            return self.judge_blocks()
        if self.find(_causes.ALONE):
            return
        one = self.one_process()
        self.verdict.code = EQUAL
        sure = not self.compare(one) or self.measure_rounding(one)
        if sure and self.compare(one):
            self.allow_rates(one)
        if self.case.difference and not (sure and self.find(_causes.BESIDE)) and not self.coupled():
            if not sure:
                raise NotJudged(
                    "the same batch in another order gives another gradient. Usually the loop "
                    "draws random numbers with a generator of its own."
                )
            self.differs(Finding("unknown", "none that was tried"))
        self.say_steps()
        if self.case.difference is None:
            self.check_whole_steps()
        if self.plan.how == "apart":
            self.verdict.untested.append("means weighted by tokens, as batches cannot be joined")

    def judge_blocks(self) -> None:
        """Ranks step on their own: look whether they are equal after a sync round."""
        if not self.find(_causes.IN_BLOCKS):
            if all(self.case.apart("params", number) for number in range(len(self.case.steps))):
                raise NotJudged("in blocks, and no sync round ends in these steps: take more.")
            self.verdict.code = EQUAL
            self.verdict.blocks = True
            self.verdict.notes.append("blocks: ranks step alone, and are equal after a round.")

    def coupled(self) -> bool:
        """Whether it can be judged with the ranks' batches one after the other."""
        joined = self.plan
        self.plan = replace(self.plan, how="apart")
        made = self.replay(self.plan)
        if joined == self.plan or made.failed or not self.fits(made.records[0]):
            return False
        if self.compare(made.records[0]) and not self.plan.rates:
            self.allow_rates(made.records[0])
        if self.case.difference is None:
            self.verdict.notes.append("the loss depends on which samples share a batch.")
        return self.case.difference is None or self.find(_causes.BESIDE)

    def compare(self, one: Recording) -> bool:
        """Whether the ranks and one process differ."""
        self.largest, self.case.difference = compare(self.case.ranks[0], one, self.floor)
        self.case.one = one
        return self.case.difference is not None

    def find(self, hypotheses: Sequence[_causes.Hypothesis]) -> bool:
        for found in (found for test in hypotheses for found in test(self.case)):
            self.differs(found)
            return True
        return False

    def measure_rounding(self, one: Recording) -> bool:
        """Measure how far another order of the batches goes, and return whether it is rounding."""
        made = self.replay(replace(self.plan, order=self.plan.order[::-1]))
        largest, difference = compare(made.records[0], one, CAP) if made.records else ([], None)
        if difference is None:
            self.floor = max(self.floor, 30 * max(largest, default=0.0))
        return difference is None

    def allow_rates(self, plain: Recording) -> None:
        """If only the learning rate depends on the number of ranks, say so in a note."""
        first = self.case.ranks[0]
        pairs = list(zip(first.steps, plain.steps, strict=False))
        ratios = {x / y for a, b in pairs for x, y in zip(a.rates, b.rates, strict=False) if y}
        powers = {self.world, self.world**2}
        note = "the learning rate or its schedule depends on the number of ranks"
        if not first.rule and any(a.schedules != b.schedules for a, b in pairs):
            if not first.accelerate:
                return
            note = "Accelerate steps a schedule once for each process, so its length is that of one"
        elif len(ratios) == 1 and not (first.rule or powers & {round(x**2, 6) for x in ratios}):
            return
        plan = replace(self.plan, rates=True)
        made = self.replay(plan)
        if not made.failed and (first.rule or not compare(first, made.records[0], self.floor)[1]):
            self.plan = plan
            self.verdict.notes.append(f"{note}; all else was compared with the ranks' rates.")
            self.compare(made.records[0])

    def check_whole_steps(self) -> None:
        """Compare a step of several passes with one whose every pass has all of the samples."""
        passes = sum(len(step.passes) for step in self.case.steps)
        seen = [sum(map(len, x.epochs)) for x in self.case.ranks[0].training_loaders()]
        several = passes > len(self.case.steps) and all(batches >= passes for batches in seen)
        if not several or self.plan.how == "apart":
            return
        self.plan = replace(self.plan, how="whole")
        made = self.replay(self.plan)
        if made.failed or not self.fits(made.records[0]):
            self.verdict.untested.append("whether passes are weighted by their tokens or samples")
            return
        self.floor = max(self.floor, 1e-5)
        if not self.compare(made.records[0]) or self.case.pair()[2].what == "params":
            return
        for found in _causes.weighted_otherwise(self.case):
            if found.cause in ("token weights", "uneven batches"):
                self.differs(found)
                self.say_steps()

    def differs(self, found: Finding) -> None:
        if found.cause == "uneven batches":
            self.verdict.notes.append(f"{found.text} ({found.place}); later steps were left out.")
        else:
            self.verdict.code = DIFFERS
            self.verdict.findings = [found]

    def note_what_is_off(self) -> None:
        first = self.case.ranks[0]
        add = self.verdict.notes.append
        if not self.job.float64:
            add("compared in the script's own precision: it fails in float64.")
        if first.noise:
            add(f"{' and '.join(first.noise)}: switched off, or the same for every sample.")
        if first.norms:
            add("batch norm uses each rank's own samples, and so did the one process.")
        if first.idle:
            self.verdict.untested.append("an optimizer that made no step")
        if not first.complete:
            add(f"the script ended after {len(first.steps)} steps.")

    def say_steps(self) -> None:
        difference = self.case.difference
        self.verdict.steps = []
        for number, far in enumerate(self.largest):
            text = f"equal (largest relative difference {far:.0e}, allowed {self.floor:.0e})"
            if difference is not None and difference.step == number:
                what = "parameters" if difference.what == "params" else "gradients"
                worst = max(difference.names, key=lambda name: round(difference.distances[name], 4))
                text = f"{what} differ: {min(difference.distances[worst], 9.99):.2%} in {worst}"
                text += f" ({len(difference.names)} of {len(difference.distances)} differ)"
            self.verdict.steps.append(f"step {number + 1}   {text}")

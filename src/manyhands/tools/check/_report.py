"""Define findings and verdicts, and write a verdict as text and as JSON."""

import json
import textwrap
from dataclasses import asdict, dataclass, field

# The command's exit codes.
EQUAL = 0
DIFFERS = 1
UNKNOWN = 2
EXCEPT = 3
RESULTS = ("equal", "differs", "not judged", "equal with exceptions")  # by exit code

# Intentional differences from a single process, by names for `--allow`.
EXCEPTIONS = {
    "batch-norm": "batch norm uses the samples of each rank",
    "schedule": "Accelerate steps a schedule once for each process",
    "learning-rate": "the learning rate or its schedule depends on the number of ranks",
    "coupled-loss": "the loss depends on which samples share a batch",
    "uneven-batches": "batches of unequal size have equal weights in the mean",
}

# The places to inspect for each cause.
LOOK = {
    "different start": "the seed before the model is made, and the broadcast of parameters",
    "not averaged": "calls that bypass DDP; no_sync() on the last pass; later gradients",
    "some not averaged": "parameters outside the module that DDP wraps, or omitted by the average",
    "drift": "optimizer state and settings of each rank; parameters changed outside step()",
    "state differs": "code that runs only on some ranks. Run it on every rank, or broadcast",
    "not sharded": "a DistributedSampler, or a seed or an offset that depends on the rank",
    "same order": "sampler.set_epoch(epoch)",
    "clipping norm": "the order (average, then clip), and the parameters in the norm",
    "constant factor": "the divisor of the loss, and DDP's mean",
    "factor of some": "parameters that are averaged twice, summed, omitted, or scaled by hand",
    "token weights": "division of the summed loss by the tokens of all ranks and all passes",
    "passes weighted": "a repeated average on every pass, and the divisor of each pass",
    "other update": "weight decay, momentum and other settings; parameters changed outside step()",
    # Causes of a wrong resume.
    "parameters": "model.load_state_dict(), before DDP and the optimizer are made",
    "adapter weights": "how the script loads the adapters, and whether they remain trainable",
    "running statistics": "the model's buffers in the checkpoint",
    "weight average": "saving and loading of the average, teacher or target",
    "optimizer state": "optimizer.state_dict() in the checkpoint, and load_state_dict()",
    "optimizer state of another rank": "the ranks that save and load the optimizer's state",
    "gradient scaler": "scaler.state_dict() in the checkpoint, and load_state_dict()",
    "schedule not restored": "scheduler.state_dict() in the checkpoint, and load_state_dict()",
    "schedule off": "last_epoch, calls of scheduler.step() while loading, and the step counter",
    "schedule stepped twice": "the calls of scheduler.step() per step after loading",
    "learning rate": "the learning rate, and the schedule's settings after loading",
    "samples repeated": "the position in the epoch, and skipping of batches already used",
    "samples skipped": "the position in the epoch, and batches that are skipped twice",
    "epoch counter": "the epoch in the checkpoint, sampler.set_epoch(), and range(start, ...)",
    "shuffle order": "the seed, from the epoch or a saved generator; sets and hashes of strings",
    "random state": "random states, saved for each rank and restored right before the loop",
    "random state of another rank": "saving a random state for each rank",
    "other samples": "the split of the data; sets and hashes of strings; random augmentation",
    "number of steps": "the number of remaining epochs or steps, and the restored counter",
}

WIDTH = 96
INDENT = " " * 9  # below the step that differs


@dataclass(frozen=True)
class Finding:
    """A cause of a difference between two runs."""

    cause: str  # a short name, for programs
    text: str
    place: str = ""  # file:line
    look: str = ""  # places to inspect

    def sentence(self, head: str) -> str:
        place = f" ({self.place})" if self.place else ""
        look = f"  Look at: {self.look}." if self.look else ""
        return f"{head}: {self.text}{place}.{look}"


def finding(cause: str, text: str, place: str = "") -> Finding:
    return Finding(cause, text, place, LOOK.get(cause, ""))


def describe(names: list[str], total: int = 0) -> str:
    """Name some of `total` parameters."""
    if len(names) == total > 1:
        return "all parameters"
    if len(names) > 1:
        return f"{names[0]} and {len(names) - 1} more"
    return "".join(names)


def wrap_text(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent)


@dataclass
class BaseVerdict:
    code: int
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)  # omitted comparisons
    reason: str = ""  # why there is no result

    def as_json(self) -> str:
        return json.dumps({"result": RESULTS[self.code], **asdict(self)}, indent=2)


@dataclass
class Verdict(BaseVerdict):
    ranks: int = 2
    steps: list[str] = field(default_factory=list)
    exceptions: dict[str, str] = field(default_factory=dict)  # how each was compared
    blocks: bool = False  # ranks step alone, and their values were not compared

    def as_text(self) -> str:
        lines = list(self.steps)
        head = f"{INDENT}Likely cause" if lines else "Found"  # before the first comparison
        for found in self.findings:
            lines += wrap_text(found.sentence(head), INDENT)
        for name, text in self.exceptions.items():
            lines += wrap_text(f"Exception {name}: {EXCEPTIONS[name]}{text}.")
        for note in self.notes:
            lines += wrap_text(f"Note: {note}")
        for feature in self.untested:
            lines += wrap_text(f"Not tested: {feature}.")
        return "\n".join(lines + wrap_text(self._result()))

    def _result(self) -> str:
        if self.code == UNKNOWN:
            return f"Could not judge: {self.reason}"
        if self.code == DIFFERS:
            return f"{self.ranks} ranks train differently from one process."
        if self.blocks:
            return (
                f"{self.ranks} ranks are equal after a sync round, in these steps. "
                "Their values were not compared with one process."
            )
        result = f"{self.ranks} ranks train like one process, in these steps"
        if self.exceptions:
            result += f", except for: {', '.join(self.exceptions)}"
        if self.code == EXCEPT:
            result += f". Accept this with --allow {','.join(self.exceptions)}"
        return f"{result}."

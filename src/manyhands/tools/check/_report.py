"""Write the result of a check as text and as JSON."""

import json
import textwrap
from dataclasses import asdict, dataclass, field

# The command's exit codes.
EQUAL = 0
DIFFERS = 1
UNKNOWN = 2
EXCEPT = 3

# Why several ranks may intentionally train otherwise than one process, by names for `--allow`.
EXCEPTIONS = {
    "batch-norm": "batch norm uses each rank's own samples",
    "schedule": "Accelerate steps a schedule once for each process",
    "learning-rate": "the learning rate or its schedule depends on the number of ranks",
    "coupled-loss": "the loss depends on which samples share a batch",
    "uneven-batches": "batches of unequal size count alike in the mean",
}

WIDTH = 96
INDENT = " " * 9  # of a finding below the step that differs


@dataclass(frozen=True)
class Finding:
    """A cause of a difference between ranks and one process."""

    cause: str  # a short name, for programs
    text: str
    place: str = ""  # file:line
    look: str = ""  # where to look for the mistake


@dataclass
class Verdict:
    """The result of a check."""

    code: int
    ranks: int
    steps: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    exceptions: dict[str, str] = field(default_factory=dict)  # how it was judged, by name
    untested: list[str] = field(default_factory=list)
    reason: str = ""  # why there is no result
    blocks: bool = False  # ranks step alone, and their values are not compared

    def as_json(self) -> str:
        result = ("equal", "differs", "not judged", "equal with exceptions")[self.code]
        return json.dumps({"result": result, **asdict(self)}, indent=2)

    def as_text(self) -> str:
        lines = list(self.steps)
        head = f"{INDENT}Likely cause" if lines else "Found"  # without a step that was compared
        for found in self.findings:
            text = f"{head}: {found.text}"
            if found.place:
                text += f" ({found.place})"
            text += "."
            if found.look:
                text += f"  Look at: {found.look}."
            lines += textwrap.wrap(text, WIDTH, subsequent_indent=INDENT)
        for name, text in self.exceptions.items():
            lines += textwrap.wrap(f"Exception {name}: {EXCEPTIONS[name]}{text}.", WIDTH)
        for note in self.notes:
            lines += textwrap.wrap(f"Note: {note}", WIDTH)
        for feature in self.untested:
            lines += textwrap.wrap(f"Not tested: {feature}.", WIDTH)
        lines += textwrap.wrap(self._result(), WIDTH)
        return "\n".join(lines)

    def _result(self) -> str:
        if self.code == UNKNOWN:
            return f"Could not judge: {self.reason}"
        if self.code == DIFFERS:
            return f"{self.ranks} ranks do not train what one process trains."
        if self.blocks:
            return (
                f"{self.ranks} ranks are equal after a sync round, in these steps. "
                "What they train was not compared with one process."
            )
        result = f"{self.ranks} ranks train what one process trains, in these steps"
        if self.exceptions:
            result += f", except for: {', '.join(self.exceptions)}"
        if self.code == EXCEPT:
            result += f". Accept this with --allow {','.join(self.exceptions)}"
        return f"{result}."

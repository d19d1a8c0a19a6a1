"""What a check found, as text and as JSON."""

import json
import textwrap
from dataclasses import asdict, dataclass, field

# the command's exit codes
EQUAL = 0
DIFFERS = 1
UNKNOWN = 2


@dataclass(frozen=True)
class Finding:
    """One thing that the ranks do otherwise than one process would."""

    cause: str  # a short name, for programs
    text: str
    place: str = ""  # file:line
    look: str = ""


@dataclass
class Verdict:
    """The result of a check."""

    code: int
    ranks: int
    steps: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)
    reason: str = ""  # why it could not be judged
    blocks: bool = False  # ranks step alone, and their values are not compared

    def as_json(self) -> str:
        result = ("equal", "differs", "not judged")[self.code]
        return json.dumps({"result": result, **asdict(self)}, indent=2)

    def as_text(self) -> str:
        equal = f"{self.ranks} ranks train what one process trains, in these steps."
        if self.blocks:
            equal = f"{self.ranks} ranks are equal after a sync round, in these steps. "
            equal += "What they train was not compared with one process."
        ending = (
            equal,
            f"{self.ranks} ranks do not train what one process trains.",
            f"Could not judge: {self.reason}",
        )
        lines = list(self.steps)
        indent = " " * 9
        head = f"{indent}Likely cause" if lines else "Found"  # without a step that was compared
        for found in self.findings:
            place = f" ({found.place})" if found.place else ""
            look = f"  Look at: {found.look}." if found.look else ""
            text = f"{head}: {found.text}{place}.{look}"
            lines += textwrap.wrap(text, 96, subsequent_indent=indent)
        told = [*(f"Note: {x}" for x in self.notes), *(f"Not tested: {x}." for x in self.untested)]
        for text in [*told, ending[self.code]]:
            lines += textwrap.wrap(text, 96)
        return "\n".join(lines)

"""Write the result of a resume check as text and as JSON."""

import json
import textwrap
from dataclasses import asdict, dataclass, field

from manyhands.tools.check._report import DIFFERS, UNKNOWN, WIDTH, Finding


@dataclass
class ResumeVerdict:
    """The result of a resume check."""

    code: int
    interrupted: str = ""  # where the script was killed
    compared: str = ""
    difference: str = ""  # the first step that differs
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # comparisons
    reason: str = ""  # why there is no result

    def as_json(self) -> str:
        result = ("equal", "differs", "not judged")[self.code]
        return json.dumps({"result": result, **asdict(self)}, indent=2)

    def as_text(self) -> str:
        lines = []
        for text in (self.interrupted, self.compared, self.difference):
            lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ")
        for found in self.findings:
            text = f"Likely cause: {found.text}."
            if found.look:
                text += f"  Look at: {found.look}."
            lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ")
        for note in self.notes:
            lines += textwrap.wrap(f"Note: {note}", WIDTH, subsequent_indent="  ")
        for comparison in self.skipped:
            lines += textwrap.wrap(f"Not compared: {comparison}.", WIDTH, subsequent_indent="  ")
        lines += textwrap.wrap(self._result(), WIDTH)
        return "\n".join(lines)

    def _result(self) -> str:
        if self.code == UNKNOWN:
            return f"Could not judge: {self.reason}"
        if self.code == DIFFERS:
            return "The resumed run does not train what the run without interruption trains."
        return "The resumed run trains what the run without interruption trains, in these steps."

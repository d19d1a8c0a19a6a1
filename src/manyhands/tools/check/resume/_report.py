"""Write the result of a resume check as text."""

from dataclasses import dataclass

from manyhands.tools.check._report import DIFFERS, UNKNOWN, BaseVerdict, wrap_text


@dataclass
class ResumeVerdict(BaseVerdict):
    interrupted: str = ""  # where the script was killed
    compared: str = ""
    difference: str = ""  # the first step that differs

    def as_text(self) -> str:
        lines = []
        for text in (self.interrupted, self.compared, self.difference):
            lines += wrap_text(text, "  ")
        for found in self.findings:
            lines += wrap_text(found.sentence("Likely cause"), "  ")
        for note in self.notes:
            lines += wrap_text(f"Note: {note}", "  ")
        for comparison in self.untested:
            lines += wrap_text(f"Not compared: {comparison}.", "  ")
        return "\n".join(lines + wrap_text(self._result()))

    def _result(self) -> str:
        if self.code == UNKNOWN:
            return f"Could not judge: {self.reason}"
        if self.code == DIFFERS:
            return "The resumed run trains differently from the uninterrupted run."
        return "The resumed run trains like the uninterrupted run, in these steps."

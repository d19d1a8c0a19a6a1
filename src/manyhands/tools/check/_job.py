"""Describe how a script is run."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CheckedScript:
    """The script, and how it is run."""

    script: str
    arguments: tuple[str, ...] = ()
    steps: int = 5
    float64: bool = True
    module: bool = False  # the name is a module's, as for `python -m`
    short: bool = True  # shorten epochs, so that the steps are of two epochs
    accelerators: int = 0  # that the script sees, with the CPU in place of each
    grouped: bool = False  # make the process group that the script makes for several ranks only

    @property
    def folder(self) -> Path:
        """The folder of the script, or of a module that runs with `-m`."""
        return Path.cwd() if self.module else Path(self.script).resolve().parent

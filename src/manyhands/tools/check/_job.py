"""Describe how a script runs."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CheckedScript:
    """The script, with the conditions of a run."""

    script: str
    arguments: tuple[str, ...] = ()
    steps: int = 5
    float64: bool = True
    module: bool = False  # `script` is the name of a module, as for `python -m`
    short: bool = True  # shorten epochs, to reach a second epoch
    accelerators: int = 0  # visible to the script; the CPU simulates each
    # For replays:
    grouped: bool = False  # make a process group on a single rank
    any_devices: bool = False  # Lightning accepts devices=2 on a single rank

    @property
    def folder(self) -> Path:
        """The folder of the script. With `-m`, the working folder."""
        return Path.cwd() if self.module else Path(self.script).resolve().parent

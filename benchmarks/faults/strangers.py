"""Processes that are no members: they write to the store, or try to join with other options."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from manyhands.blocks.crew._processes import die_with_parent
from manyhands.blocks.crew._shared_roster import ROSTER
from manyhands.blocks.crew._store import Signer, connect_to_store

BAD = ("every", "overlap", "codec", "float64", "order")  # in what a bad newcomer differs
GUEST = 100  # the first number of the workers that `manyhands run` does not start


class Writer:
    """A stranger: it reaches the store, and does not know the secret."""

    def __init__(self, address: str, dice: random.Random) -> None:
        self._address, self._dice = address, dice
        self._old: dict[str, bytes] = {}

    def write(self) -> str:
        """Change one key; return what was done."""
        client = connect_to_store(self._address)
        keys = sorted(key for key in client.list_keys() if key.startswith("manyhands/"))
        for key in keys:
            if client.check([key]):
                self._old.setdefault(key, client.get(key))
        key = ROSTER if self._dice.random() < 0.5 else self._dice.choice(keys)
        kind = self._dice.choice(["nonsense", "an end", "an old value", "nothing"])
        if kind == "nothing":
            client.delete_key(key)
        elif kind == "an old value" and key in self._old:
            client.set(key, self._old[key])
        elif kind == "an end":
            end = {"generation": 1, "members": [], "left": ["0.1"], "change": 10**9}
            client.set(key, Signer("the secret of a stranger").sign(key, json.dumps(end)))
        else:
            client.set(key, "nonsense")
        client.check([key])
        return f"{kind} to {key}"


class Guest:
    """An unexpected worker: a bad newcomer, or one that leaves in mid-block."""

    def __init__(
        self,
        arguments: Sequence[str],
        extra: Sequence[str],
        number: int,
        variables: Mapping[str, str],
        folder: Path,
    ) -> None:
        self.number, self.bad = number, "--bad" in extra
        self._output = folder / f"guest-{number}"
        environment = {**os.environ, **variables, "MANYHANDS_WORKER": str(number)}
        with self._output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments, *extra],
                stdout=file,
                stderr=file,
                env=environment,
                preexec_fn=die_with_parent(),
            )

    def end(self, seconds: float) -> str:
        """Wait for its end; return how it ended."""
        until = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            return "hung"
        said = self._output.read_text(errors="replace")
        if "the run has ended" in said or "is lost" in said:
            return "late"
        if self.bad:
            refused = self.process.returncode != 0 and "was not let in" in said
            return "refused" if refused else "let in"
        return "left" if self.process.returncode == 0 else f"failed: {said[-500:]}"

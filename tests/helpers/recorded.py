"""Read the values that were recorded from adaptdl, fairscale and fairseq."""

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "recorded_values"


@cache
def recorded_values(name: str) -> Any:
    """Return the content of a file in recorded_values/, where README.md describes the fields."""
    with lzma.open(FOLDER / f"{name}.json.xz", "rt") as file:
        return json.load(file)

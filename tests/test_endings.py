"""However a script ends, it ends at once, with its own exit code, and says nothing of ours.

The scripts clean up nothing: the model and the optimizer are alive when Python shuts down.
`ending_script.py` starts each of them as new processes: once, twice in the long tests, and fifty
times in the exhaustive ones.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ending_script

SCRIPT = Path(ending_script.__file__)
PARTS = [part.__name__ for part in ending_script.PARTS]


def run(part, way, times):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), part, way, str(times)],
        capture_output=True,
        text=True,
        timeout=60 + 20 * times,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == times
    return lines


def check(part, way, times):
    code = ending_script.WAYS[way]
    for line in run(part, way, times):
        assert line["codes"] == [code] * ending_script.RANKS, line
        for said in line["stderr"]:
            if way == "exception":
                assert said.count("Traceback") == 1, said
                assert said.rstrip().endswith("ValueError: of the script's own"), said
            else:
                assert said == ""


@pytest.mark.parametrize("part", ["fsdp", "loading"])  # all of them in the long tests
def test_a_script_that_returns_ends_with_0(part):
    check(part, "return", 1)


@pytest.mark.long
@pytest.mark.parametrize("way", ["return", "destroy", "exception"])
@pytest.mark.parametrize("part", PARTS)
def test_a_script_ends_with_its_own_exit_code(part, way):
    check(part, way, 2)


# One that listens to stop notices does not end by SIGTERM alone.
ENDINGS = [(part, way) for part in PARTS for way in ending_script.WAYS]
ENDINGS.remove(("loading", "sigterm"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("part", "way"), ENDINGS)
def test_a_script_ends_with_its_own_exit_code_fifty_times(part, way):
    check(part, way, 50)


@pytest.mark.long
def test_a_script_that_python_aborts_on_its_way_out_is_noticed():
    with pytest.raises(AssertionError, match=r"'codes': \[-6, -6\]"):
        check("aborting", "return", 1)

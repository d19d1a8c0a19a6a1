"""Wrong resumes that `manyhands check --resume` has to find, and right ones."""

import sys
from pathlib import Path

import pytest

from manyhands.tools.check._processes import CheckedScript
from manyhands.tools.check.resume import ResumeRequest, check_resume

sys.path.insert(0, str(Path(__file__).parent))
from check_scripts import fill, written
from resume_scripts import CHECKPOINTS_LATER, RESUME_BUGS, RESUME_RIGHT, RESUMING, RESUMING_DEFAULTS

QUICK_BUGS = {"schedule not saved", "optimizer not loaded", "last batch repeated"}
QUICK_RIGHT = {"plain", "checkpoint per epoch"}


def few(names, quick):
    return [
        pytest.param(name, id=name, marks=() if name in quick else pytest.mark.long)
        for name in names
    ]


def checked(folder, text, *arguments, **options):
    script = CheckedScript(written(folder, text), arguments, float64=False)
    verdict = check_resume(ResumeRequest(script, **options))
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    return verdict


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", few(RESUME_BUGS, QUICK_BUGS))
def test_a_wrong_resume_is_found_and_its_cause_named(name, tmp_path):
    right, bug, causes = RESUME_BUGS[name]
    text = fill(RESUMING, RESUMING_DEFAULTS, **{**right, **bug})
    verdict = checked(tmp_path, text, at=CHECKPOINTS_LATER.get(name, 1))
    assert verdict.code == 1, verdict.as_text()
    assert verdict.findings[0].cause in causes, verdict.as_text()


@pytest.mark.parametrize("name", few(RESUME_RIGHT, QUICK_RIGHT))
def test_a_right_resume_is_judged_right(name, tmp_path):
    verdict = checked(tmp_path, fill(RESUMING, RESUMING_DEFAULTS, **RESUME_RIGHT[name]))
    assert verdict.code == 0, verdict.as_text()

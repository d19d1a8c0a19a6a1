"""The pages about engines: their examples run, and their files are as the engines want them."""

import os
import shutil
import subprocess

import pytest

from helpers.pages import ROOT, has_examples, run_page

FILES = ROOT / "examples" / "engines"
PAGES = [page for page in sorted((ROOT / "docs" / "engines").glob("*.md")) if has_examples(page)]


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_runs_from_top_to_bottom(page, tmp_path):
    run_page(page, in_folder=tmp_path)


def test_every_file_is_in_the_table_of_what_was_tried():
    page = (ROOT / "docs" / "engines" / "manifests.md").read_text()
    names = {path.name for path in FILES.iterdir() if path.suffix != ".py" and path.is_file()}
    assert [name for name in sorted(names) if f"| `{name}` |" not in page] == []


def documents(name):
    yaml = pytest.importorskip("yaml", reason="PyYAML is missing: pip install pyyaml")
    return list(yaml.safe_load_all((FILES / name).read_text()))


def test_the_indexed_job_gives_a_worker_what_it_needs():
    *_, job = documents("indexed_job.yaml")
    pod = job["spec"]["template"]["spec"]
    (worker,) = pod["containers"]
    variables = {entry["name"]: entry.get("value") for entry in worker["env"]}
    assert job["spec"]["completionMode"] == "Indexed"
    assert int(variables["MANYHANDS_WORKERS"]) == job["spec"]["completions"]
    # A pod that has left with the stop code, or was evicted, comes back; both are not failures.
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "Ignore"]
    assert rules[0]["onExitCodes"]["values"] == [int(variables["MANYHANDS_STOP_CODE"])]
    assert int(variables["MANYHANDS_GRACE"]) == pod["terminationGracePeriodSeconds"]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it


def test_the_train_job_starts_torchrun():
    (job,) = documents("trainjob.yaml")
    assert job["kind"] == "TrainJob"
    assert job["spec"]["trainer"]["command"][:2] == ["torchrun", "train.py"]


def test_skypilot_gives_rank_and_world_size():
    (task,) = documents("skypilot.yaml")
    assert task["num_nodes"] == 2
    assert "RANK=$SKYPILOT_NODE_RANK WORLD_SIZE=$SKYPILOT_NUM_NODES" in task["run"]


@pytest.mark.parametrize("name", ["slurm.sh", "slurm_crew.sh"])
def test_bash_can_read_the_slurm_scripts(name):
    subprocess.run(["bash", "-n", FILES / name], check=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
def test_systemd_accepts_the_unit(tmp_path):
    unit = tmp_path / "manyhands.service"
    text = (FILES / "manyhands.service").read_text()
    unit.write_text(text.replace("/opt/venv/bin/manyhands", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, env=dict(os.environ)
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr

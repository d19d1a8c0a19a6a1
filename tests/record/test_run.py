"""Reading: a record as one run, whatever happened while it was written."""

import json
import os
import re
import resource
import signal
import time

import pytest

from manyhands import Record, read_record
from manyhands.tools.record._run import is_alive, this_process


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.jsonl"


def write(path, steps, **options):
    with Record(path, **options) as record:
        for step in range(steps):
            record.step(loss=float(step))


class Counter:
    """A training that can be resumed from any step."""

    def __init__(self, step=0):
        self.now = step

    def snapshot(self):
        return {"step": self.now}

    def train(self, path, until, loss, **options):
        with Record(path, self, **options) as record:
            while self.now < until:
                self.now += 1
                record.step(loss=loss)


def test_a_run_has_a_name_a_header_and_columns(path):
    write(path, 2, name="mine")
    run = read_record(str(path))
    assert (run.path, run.name, len(run.lines)) == (path, "mine", 2)
    assert run.header["date"][:2] == "20"
    assert run.columns == ["step", "time", "loss"]
    assert run.own == ["loss"]
    assert run.column("loss") == [0.0, 1.0]


def test_a_run_without_a_name_is_named_after_its_file(path):
    write(path, 0)
    assert read_record(path).name == "a"


def test_a_column_has_none_where_a_line_has_no_value(path):
    with Record(path) as record:
        record.step(loss=1.0)
        record.step(loss=2.0, accuracy=0.5)
    assert read_record(path).column("accuracy") == [None, 0.5]


def test_a_column_of_groups_is_read_whole_or_by_group(path):
    class Source:
        def snapshot(self):
            return {"lr": [0.1, None]}

    with Record(path, Source()) as record:
        record.step()
    run = read_record(path)
    assert run.columns == ["step", "time", "lr/0", "lr/1"]
    assert run.column("lr") == [[0.1, None]]
    assert run.column("lr/0") == [0.1]
    assert run.column("lr/1") == [None]


def test_a_column_that_is_not_there_is_refused_with_those_that_are(path):
    write(path, 1)
    with pytest.raises(KeyError, match=r"no column 'gian'\. It has: 'step', 'time', 'loss'"):
        read_record(path).column("gian")


def test_pandas_gets_a_row_for_each_step(path):
    pytest.importorskip("pandas", reason="pandas is missing")
    write(path, 3)
    frame = read_record(path).to_pandas()
    assert list(frame.columns) == ["step", "time", "loss"]
    assert frame["loss"].tolist() == [0.0, 1.0, 2.0]


def test_a_run_killed_while_writing_leaves_complete_lines(path):
    child = os.fork()
    if child == 0:
        record = Record(path)
        while True:
            record.step(loss=0.5, text=0.25)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (path.exists() and path.stat().st_size > 50_000):
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

    written = path.read_bytes()
    assert written.endswith(b"\n")
    steps = [json.loads(line)["step"] for line in written.splitlines()[1:]]
    assert steps == list(range(1, len(steps) + 1))
    assert read_record(path).column("step") == steps
    write(path, 1)
    assert read_record(path).column("step") == [*steps, len(steps) + 1]


@pytest.mark.parametrize("room", [0, 1, 2000], ids=["at a line's end", "in a line", "anywhere"])
def test_a_full_disk_is_an_error_and_cuts_no_line(path, room):
    write(path, 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, hard))
    try:
        with pytest.raises(OSError, match=f"no space left for the next line: '{path}'"):
            write(path, 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes().endswith(b"\n")
    assert len(read_record(path).lines) > (20 if room == 2000 else 19)


def test_a_last_line_that_was_cut_off_is_ignored_and_removed_on_resuming(path):
    write(path, 3)
    *lines, _ = path.read_bytes().splitlines(keepends=True)  # without its end
    path.write_bytes(b"".join(lines)[:-7])
    assert read_record(path).column("step") == [1, 2]
    write(path, 1)
    assert read_record(path).column("step") == [1, 2, 3]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_header_that_was_cut_off_is_written_anew(path):
    write(path, 0)
    path.write_bytes(path.read_bytes()[:-7])
    write(path, 2)
    assert read_record(path).column("step") == [1, 2]


@pytest.mark.parametrize(
    "damage",
    [
        '{"step": 2, "ti',
        "[]",
        '"manyhands"',
        "{}",
        '{"step": "2", "time": 0}',
        "\x00\x00",
        '{"step": 2, "time": 0, "deep": ' + "[" * 500 + "]" * 500 + "}",
        '{"step": 2, "time": 0, "deep": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
    ids=len,
)
def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(path, damage):
    write(path, 3)
    lines = path.read_text().splitlines()
    lines[2] = damage
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 3 is damaged")):
        read_record(path)


@pytest.mark.parametrize("content", ["", "import torch\n", '{"step": 1, "time": 0}\n', "[1, 2]\n"])
def test_a_file_that_is_no_record_is_refused_and_not_changed(path, content):
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"{path} is not a record of manyhands")):
        read_record(path)
    if not content:
        return  # an empty file is one to write to
    for mode in ("continue", "overwrite"):
        with pytest.raises(ValueError, match="not a record of manyhands"):
            Record(path, mode=mode)
    assert path.read_text() == content


def test_a_later_format_is_refused_and_not_changed(path):
    content = '{"manyhands":{"version":2}}\n'
    path.write_text(content)
    for use in (read_record, Record):
        with pytest.raises(ValueError, match="format version 2; this manyhands reads"):
            use(path)
    assert path.read_text() == content


def test_a_resumed_run_has_one_line_for_each_step(path):
    Counter().train(path, until=100, loss=1.0)
    Counter(step=90).train(path, until=95, loss=2.0)
    run = read_record(path)
    assert run.column("step") == list(range(1, 96))
    assert run.column("loss") == [1.0] * 90 + [2.0] * 5
    assert run.header["resumed"]
    times = run.column("time")
    assert times == sorted(times)


def test_a_checkpoint_may_be_loaded_after_the_record_was_made(path):
    Counter().train(path, until=10, loss=1.0)
    optimizer = Counter()
    with Record(path, optimizer) as record:
        optimizer.now = 9
        record.step(loss=2.0)
    assert read_record(path).column("loss") == [1.0] * 8 + [2.0]


def test_a_fresh_run_in_an_old_file_takes_its_place(path):
    Counter().train(path, until=10, loss=1.0, name="old")
    Counter().train(path, until=3, loss=2.0, name="fresh")
    run = read_record(path)
    assert run.name == "fresh"
    assert run.column("loss") == [2.0] * 3
    assert run.column("time")[0] < 1.0
    assert path.read_text().count('"loss":1.0') == 10  # nothing is lost from the file


def test_going_back_within_a_run_supersedes_too(path):
    optimizer = Counter()
    with Record(path, optimizer) as record:
        for step in (1, 2, 3, 2, 3):
            optimizer.now = step
            record.step(number=step)
    assert read_record(path).column("step") == [1, 2, 3]


def test_without_an_optimizer_a_resumed_run_counts_on(path):
    write(path, 3)
    write(path, 0)
    write(path, 2)
    assert read_record(path).column("step") == [1, 2, 3, 4, 5]


def test_new_refuses_a_file_that_exists_and_overwrite_empties_it(path):
    write(path, 3, mode="new")
    with pytest.raises(FileExistsError, match="exists"):
        Record(path, mode="new")
    write(path, 1, mode="overwrite", name="second")
    run = read_record(path)
    assert (run.name, len(run.lines)) == ("second", 1)
    assert not run.header["resumed"]
    assert len(path.read_text().splitlines()) == 3  # a header, a line and the end


def test_opening_a_pipe_or_a_device_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="not a regular file"):
            read_record(path)
        with pytest.raises((ValueError, OSError), match=r"not a regular file|No such device"):
            Record(path)


# -- whether the process that writes still runs ----------------------------------------------------


def test_a_record_says_how_it_ended(path):
    with Record(path) as record:
        record.step(loss=1.0)
        assert "ended" not in read_record(path).header
    assert read_record(path).header["error"] is None
    with pytest.raises(RuntimeError), Record(path):
        assert "ended" not in read_record(path).header  # it was opened again
        raise RuntimeError("out of memory")
    assert read_record(path).header["error"] == "RuntimeError: out of memory"
    with pytest.raises(SystemExit), Record(path):
        raise SystemExit(0)
    assert read_record(path).header["error"] is None


def test_another_process_of_the_same_number_is_not_the_writer():
    here = this_process()
    assert is_alive(here) is True
    assert is_alive({**here, "started": here["started"] + 1}) is False
    assert is_alive({**here, "pid": 2**22 + 1}) is False
    for unknown in ({**here, "boot": "x"}, {**here, "namespace": "y"}, {}, None, {"pid": "1"}):
        assert is_alive(unknown) is None

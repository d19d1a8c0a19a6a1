"""Writing: what is on a line, who writes it, what is refused, and what it costs."""

import json
import math
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.ranks import raises_on_ranks, run_ranks
from manyhands import Record, read_record
from manyhands.tools.report._curves import samples


class Optimizer:
    """What a record sees of one of our optimizers."""

    def __init__(self):
        self.steps = 0
        self.gain = 2.0

    def step(self):
        self.steps += 1

    def snapshot(self):
        return {
            "step": self.steps,
            "progress": self.steps * self.gain,
            "scale": 4.0,
            "workers": 2,
            "passes": 2,
            "gain": self.gain,
            "lr": [0.1, 0.01],
            "factor": [self.gain, self.gain],
            "sqr": [1.0, 2.0],
            "var": [3.0, 4.0],
            "noise_scale": [3.0, None],
            "skipped": 0,
            "nonfinite": 0,
        }


class Traffic:
    def snapshot(self):
        return {"bytes": 4096}


def raw_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_the_optimizers_values_and_the_users(tmp_path):
    path = tmp_path / "runs" / "of today" / "a.jsonl"  # the folders do not exist
    optimizer = Optimizer()
    with Record(path, optimizer, Traffic(), name="AdaScale ×32") as record:
        for loss in (2.5, torch.tensor([1.5])):
            optimizer.step()
            record.step(loss=loss, correct=torch.tensor(7))

    header, first, second, end = raw_lines(path)
    assert header["manyhands"]["version"] == 1
    assert header["manyhands"]["name"] == "AdaScale ×32"
    assert header["manyhands"]["workers"] == 1
    assert header["manyhands"]["keys"] == [*optimizer.snapshot(), "bytes"]
    assert second.items() >= {**optimizer.snapshot(), "bytes": 4096, "loss": 1.5}.items()
    assert second["correct"] == 7
    assert isinstance(second["correct"], int)
    assert 0 <= first["time"] <= second["time"] < 60
    ended = end["manyhands"].pop("ended")
    assert ended >= header["manyhands"]["date"]
    assert end["manyhands"].pop("error") is None
    assert end["manyhands"] == {**header["manyhands"], "step": 2}


def test_without_an_optimizer_the_record_counts_its_calls(tmp_path):
    with Record(tmp_path / "a.jsonl") as record:
        for _ in range(3):
            record.step()
    assert read_record(tmp_path / "a.jsonl").column("step") == [1, 2, 3]


def test_a_line_is_in_the_file_when_step_returns(tmp_path):
    record = Record(tmp_path / "a.jsonl")
    record.step(loss=0.5)
    assert raw_lines(tmp_path / "a.jsonl")[-1]["loss"] == 0.5
    record.close()


def test_every_writes_each_nth_step_only(tmp_path):
    with Record(tmp_path / "a.jsonl", every=10) as record:
        for step in range(1, 26):
            record.step(twice=2 * step)
    run = read_record(tmp_path / "a.jsonl")
    assert run.column("step") == [10, 20]
    assert run.column("twice") == [20, 40]


class Counting:
    """A source with a "step"."""

    def __init__(self, begun=0):
        self.step_now = begun

    def snapshot(self):
        return {"step": self.step_now, "snapshots": 1}


class CountingExactly(Counting):
    """It says its step without a snapshot, as blocks do."""

    @property
    def steps(self):
        return self.step_now


class CountingToALimit(Counting):
    """Its `steps` has another meaning."""

    steps = 1000


KINDS_OF_COUNTS = [Counting, CountingExactly, CountingToALimit]


@pytest.mark.parametrize("kind", KINDS_OF_COUNTS)
def test_every_counts_the_steps_of_the_run_and_not_those_since_a_resume(tmp_path, kind):
    path = tmp_path / "a.jsonl"
    for begun in (0, 10, 8):  # the last start has gone back to an earlier checkpoint
        source = kind(begun)
        with Record(path, source, every=3) as record:
            for source.step_now in range(begun + 1, begun + 11):
                record.step()
    steps = [line["step"] for line in raw_lines(path) if "step" in line]
    assert steps == [3, 6, 9, 12, 15, 18, 9, 12, 15, 18]
    assert read_record(path).column("step") == [3, 6, 9, 12, 15, 18]


@pytest.mark.parametrize("kind", KINDS_OF_COUNTS)
def test_every_counts_the_steps_of_a_checkpoint_that_was_loaded_after_the_record_was_made(
    tmp_path, kind
):
    source = kind()
    with Record(tmp_path / "a.jsonl", source, every=4) as record:
        for source.step_now in (*range(11, 19), *range(6, 10), *range(101, 106)):
            record.step()
    steps = [line["step"] for line in raw_lines(tmp_path / "a.jsonl") if "step" in line]
    if kind is CountingExactly:
        assert steps == [12, 16, 8, 101, 104]
    else:
        assert steps[:3] == [12, 16, 8]


@pytest.mark.parametrize("kind", KINDS_OF_COUNTS)
def test_steps_that_do_not_count_do_not_move_the_lines(tmp_path, kind):
    """A gradient scaler skips steps 3, 4 and 10."""
    source = kind()
    with Record(tmp_path / "a.jsonl", source, every=3) as record:
        for call in range(1, 15):
            source.step_now += call not in (3, 4, 10)
            record.step(call=call)
    run = read_record(tmp_path / "a.jsonl")
    assert run.column("step") == [3, 6, 9]
    assert run.column("call") == [5, 8, 12]


def test_a_line_is_due_when_the_count_passes_a_multiple(tmp_path):
    """As in blocks in which each worker takes steps of its own."""
    source = CountingExactly()
    with Record(tmp_path / "a.jsonl", source, every=5) as record:
        for source.step_now in (2, 4, 7, 7, 9, 12, 22, 24):
            record.step()
    assert read_record(tmp_path / "a.jsonl").column("step") == [7, 12, 22]


def test_a_record_that_counts_its_calls_goes_on_from_the_last_one_of_a_closed_record(tmp_path):
    for calls in (10, 5):
        with Record(tmp_path / "a.jsonl", every=3) as record:
            for _ in range(calls):
                record.step()
    assert raw_lines(tmp_path / "a.jsonl")[-1]["manyhands"]["step"] == 15
    assert read_record(tmp_path / "a.jsonl").column("step") == [3, 6, 9, 12, 15]


def test_every_counts_the_steps_of_an_optimizer_that_is_resumed(tmp_path):
    def learn(steps, load):
        model = torch.nn.Linear(2, 1)
        rule = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), world_size=1)
        if load:
            mh.load(tmp_path / "run", model=model, optimizer=rule)
        with Record(tmp_path / "a.jsonl", rule, every=3) as record:
            for _ in range(steps):
                model(torch.ones(4, 2)).square().mean().backward()
                rule.step()
                rule.zero_grad()
                record.step()
        mh.save(tmp_path / "run", model=model, optimizer=rule)

    learn(10, load=False)
    learn(10, load=True)
    assert read_record(tmp_path / "a.jsonl").column("step") == [3, 6, 9, 12, 15, 18]


def test_numbers_that_are_not_finite_are_strict_json_and_come_back(tmp_path):
    values = {"a": math.nan, "b": math.inf, "c": torch.tensor(-math.inf), "d": 1e308}
    optimizer = Optimizer()
    optimizer.gain = math.nan
    with Record(tmp_path / "a.jsonl", optimizer) as record:
        record.step(**values)

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    for line in (tmp_path / "a.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    (line,) = read_record(tmp_path / "a.jsonl").lines
    assert math.isnan(line["a"])
    assert (line["b"], line["c"], line["d"]) == (math.inf, -math.inf, 1e308)
    assert all(math.isnan(factor) for factor in line["factor"])


@pytest.mark.parametrize(
    "value",
    [True, 3, 0.5, torch.tensor(3), torch.tensor([[0.5]]), torch.tensor(0.5, dtype=torch.bfloat16)],
)
def test_numbers_and_one_element_tensors_are_recorded(tmp_path, value):
    with Record(tmp_path / "a.jsonl") as record:
        record.step(value=value)
    assert read_record(tmp_path / "a.jsonl").column("value") == [float(value)]


def test_a_tensor_with_a_graph_is_recorded(tmp_path):
    with Record(tmp_path / "a.jsonl") as record:
        record.step(loss=torch.ones((), requires_grad=True) * 2)
    assert read_record(tmp_path / "a.jsonl").column("loss") == [2.0]


def test_numpy_numbers_are_recorded(tmp_path):
    numpy = pytest.importorskip("numpy", reason="numpy is missing")
    with Record(tmp_path / "a.jsonl") as record:
        record.step(a=numpy.float32(0.5), b=numpy.int64(3), c=numpy.float64("nan"))
    (line,) = read_record(tmp_path / "a.jsonl").lines
    assert (line["a"], line["b"]) == (0.5, 3)
    assert math.isnan(line["c"])


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("low", "'low'"),
        (None, "None"),
        ([0.5], r"\[0.5\]"),
        (1j, "1j"),
        (torch.zeros(2, 3), "tensor"),
        (torch.tensor(1j), "tensor"),
    ],
)
def test_what_is_not_a_number_is_refused_by_name(tmp_path, value, named):
    record = Record(tmp_path / "a.jsonl")
    with pytest.raises(TypeError, match=f"got loss={named}"):
        record.step(loss=value)
    record.close()
    assert read_record(tmp_path / "a.jsonl").lines == []


@pytest.mark.parametrize("key", ["step", "time", "manyhands", "gain"])
def test_a_reserved_key_is_refused(tmp_path, key):
    record = Record(tmp_path / "a.jsonl", Optimizer())
    with pytest.raises(ValueError, match=f"got '{key}', a key of the record"):
        record.step(**{key: 0.5})
    record.close()


def test_two_sources_with_one_key_are_refused_before_the_file_is_made(tmp_path):
    with pytest.raises(ValueError, match="the key 'step': Optimizer and Optimizer"):
        Record(tmp_path / "a.jsonl", Optimizer(), Optimizer())
    assert not (tmp_path / "a.jsonl").exists()


def test_a_noise_scale_and_a_scaling_rule_share_a_record(tmp_path):
    model = torch.nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = mh.AdaScale(inner, num_gradients_to_accumulate=2)
    noise = mh.NoiseScale(optimizer, batch_size=8, num_gradients_to_accumulate=2)
    with Record(tmp_path / "a.jsonl", optimizer, noise) as record:
        for _ in range(4):
            for _ in range(2):
                (model(torch.randn(8, 4)).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            record.step()
    run = read_record(tmp_path / "a.jsonl")
    assert run.column("simple_noise_scale")[-1] == noise.noise_scale
    assert run.column("simple_noise_scale_error")[-1] == noise.standard_error
    assert run.column("noise_scale")[-1] == [optimizer.noise.noise_scale(0)]


def test_a_source_without_snapshot_is_refused(tmp_path):
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(TypeError, match=r"snapshot\(\), and SGD has none"):
        Record(tmp_path / "a.jsonl", sgd)


def test_a_snapshot_with_a_tensor_is_refused(tmp_path):
    class Source:
        def snapshot(self):
            return {"drift": torch.zeros(2)}

    with pytest.raises(TypeError, match="Tensor is not JSON serializable"):
        Record(tmp_path / "a.jsonl", Source())
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be a whole number of at least 1, got 0"),
        ({"rank": 1}, "rank must be one of 0, got 1"),
        ({"mode": "append"}, "got 'append'"),
    ],
)
def test_options_out_of_range_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        Record(tmp_path / "a.jsonl", **options)


def test_a_closed_record_refuses_further_steps(tmp_path):
    record = Record(tmp_path / "a.jsonl")
    record.close()
    record.close()
    with pytest.raises(RuntimeError, match="closed"):
        record.step()


@pytest.mark.parametrize("writing", [0, 2])
def test_only_one_rank_writes_to_the_disk(tmp_path, writing):
    def train():
        path = tmp_path / str(dist.get_rank()) / "a.jsonl"
        optimizer = Optimizer()
        with Record(path, optimizer, rank=writing) as record:
            for _ in range(5):
                optimizer.step()
                record.step(loss=float(dist.get_rank()))

    run_ranks(3, train)
    assert os.listdir(tmp_path) == [str(writing)]
    run = read_record(tmp_path / str(writing) / "a.jsonl")
    assert run.header["workers"] == 3
    assert run.column("loss") == [float(writing)] * 5


@pytest.mark.parametrize(
    ("values", "error"), [({"loss": "low"}, TypeError), ({"gain": 1.0}, ValueError)]
)
def test_a_mistake_is_an_error_on_every_rank(tmp_path, values, error):
    def train():
        Record(tmp_path / "a.jsonl", Optimizer()).step(**values)

    (key,) = values
    raises_on_ranks(2, error, train, match=key)


class Writer:
    def __init__(self):
        self.got = []

    def add_scalar(self, tag, value, step):
        self.got.append((tag, value, step))


class Logger:
    """What a run of Weights & Biases is to a record."""

    def __init__(self):
        self.got = []

    def log(self, data, step):
        self.got.append((step, data))


def test_a_run_of_weights_and_biases_gets_all_numbers_of_a_step_at_once(tmp_path):
    logger, optimizer = Logger(), Optimizer()
    with Record(tmp_path / "a.jsonl", optimizer, writer=logger) as record:
        for loss in (2.0, 1.0):
            optimizer.step()
            record.step(loss=loss)
    assert [step for step, _ in logger.got] == [1, 2]
    data = logger.got[1][1]
    assert data.items() >= {"manyhands/loss": 1.0, "manyhands/lr/1": 0.01}.items()
    assert data.keys().isdisjoint({"manyhands/step", "manyhands/noise_scale/1"})


def test_a_writer_without_a_method_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"add_scalar or log, and \[\] has neither"):
        Record(tmp_path / "a.jsonl", writer=[])


def test_options_for_readers_are_in_the_header(tmp_path):
    config = {"lr": 0.1, "path": tmp_path, "sizes": (1, 2), "nested": {"on": True, "no": None}}
    with Record(tmp_path / "a.jsonl", Optimizer(), batch_size=8, until=1e3, config=config):
        pass
    header = read_record(tmp_path / "a.jsonl").header
    assert (header["batch_size"], header["until"], header["every"]) == (8, 1000.0, 1)
    plain = {"path": str(tmp_path), "sizes": [1, 2], "nested": {"on": True, "no": None}}
    assert header["config"] == {"lr": 0.1, **plain}
    assert header["sources"] == ["Optimizer"]
    assert header["process"]["pid"] == os.getpid()


@pytest.mark.parametrize("option", ["batch_size", "until"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, "8"])
def test_options_for_readers_are_above_0(tmp_path, option, value):
    with pytest.raises(ValueError, match=f"{option} must be a finite number above 0, got"):
        Record(tmp_path / "a.jsonl", **{option: value})
    assert not (tmp_path / "a.jsonl").exists()


def test_a_writer_gets_every_number_under_its_group(tmp_path):
    writer, optimizer = Writer(), Optimizer()
    with Record(tmp_path / "a.jsonl", optimizer, writer=writer) as record:
        optimizer.step()
        record.step(loss=torch.tensor(0.5))
    assert ("manyhands/gain", 2.0, 1) in writer.got
    assert ("manyhands/lr/1", 0.01, 1) in writer.got
    assert ("manyhands/loss", 0.5, 1) in writer.got
    tags = {tag for tag, _, _ in writer.got}
    assert tags.isdisjoint({"manyhands/step", "manyhands/time", "manyhands/noise_scale/1"})


def test_tensorboard_reads_what_its_writer_got(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is missing")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "board"))
    with Record(tmp_path / "a.jsonl", Optimizer(), writer=writer) as record:
        record.step(loss=0.5)
    writer.close()
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [event.value for event in events.Scalars("manyhands/loss")] == [0.5]


def test_a_line_that_waits_for_a_gpu_keeps_its_place(tmp_path, monkeypatch):
    from manyhands.tools.record import _record

    class PendingNumber:
        here = False
        waited = 0

        def __init__(self, value):
            self.value = value

        def is_ready(self):
            return self.here

        def number(self):
            PendingNumber.waited += not self.here
            return self.value

    monkeypatch.setattr(_record, "PendingNumber", PendingNumber)
    monkeypatch.setattr(_record, "is_number", lambda value: True)
    monkeypatch.setattr(_record, "to_number", lambda value: value)
    record = Record(tmp_path / "a.jsonl")
    for step in range(1, 4):
        record.step(loss=PendingNumber(step))
    record.step(loss=4.0)
    assert len(raw_lines(tmp_path / "a.jsonl")) == 1  # nothing was waited for
    record.step(loss=5.0)
    assert PendingNumber.waited == 1  # one line too many
    PendingNumber.here = True
    record.step(loss=6.0)
    assert PendingNumber.waited == 1
    record.close()
    assert read_record(tmp_path / "a.jsonl").column("loss") == [1, 2, 3, 4, 5, 6]


@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger or coverage slows each line")
def test_a_line_costs_less_than_a_tenth_of_a_millisecond(tmp_path):
    """About 10 µs here; the bound leaves room for a busy machine."""
    optimizer = Optimizer()
    costs = []
    with Record(tmp_path / "a.jsonl", optimizer) as record:
        for _ in range(20):
            before = time.perf_counter()
            for _ in range(100):
                optimizer.steps += 1
                record.step(loss=0.123456789, accuracy=0.987654321)
            costs.append((time.perf_counter() - before) / 100)
    assert min(costs) < 100e-6


WRITER = """
import sys, manyhands as mh
record = mh.Record(sys.argv[1])
record.step(loss=1.0)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_file_that_another_process_writes_is_refused_until_it_has_ended(tmp_path):
    path = tmp_path / "a.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"ready\n"
        before = path.read_bytes()
        for mode in ("continue", "overwrite"):
            with pytest.raises(ValueError, match=r"another process is writing .*a\.jsonl"):
                Record(path, mode=mode)
        assert path.read_bytes() == before
        assert read_record(path).column("loss") == [1.0]
        other.kill()
    for _ in range(2):  # this process may open its own record again
        record = Record(path)
        record.step(loss=2.0)
    assert read_record(path).column("loss") == [1.0, 2.0, 2.0]


@pytest.mark.parametrize("ranks", [1, 2], ids="a worker of {}".format)
def test_samples_of_a_rule_inside_blocks_are_of_all_workers(tmp_path, ranks):
    def train():
        rank = dist.get_rank()
        groups = [dist.new_group(range(ranks * n, ranks * (n + 1))) for n in range(2)]
        across = [dist.new_group(range(n, 2 * ranks, ranks)) for n in range(ranks)]
        inner, outer = groups[rank // ranks], across[rank % ranks]
        model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=inner)
        rule = mh.LinearScale(torch.optim.SGD(model.parameters(), lr=0.1), process_group=inner)
        optimizer = mh.DiLoCo(rule, every=2, process_group=outer, inner_group=inner)
        with mh.Record(tmp_path / "a.jsonl", optimizer, batch_size=8) as record:
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.full((8, 2), 1.0 + rank)).sum().backward()
                optimizer.step()
                record.step()

    run_ranks(2 * ranks, train)
    run = read_record(tmp_path / "a.jsonl")
    assert run.column("scale") == [ranks] * 4
    assert samples(run) == [8 * 2 * ranks * steps for steps in (1, 2, 3, 4)]

"""Records to one page."""

import json
import math
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser

import pytest

from helpers.pages import ROOT
from manyhands.tools.record import Record, read_record
from manyhands.tools.report import write_report

pytest.importorskip("plotly", reason='plotly is missing: pip install "manyhands[cli]"')


class Optimizer:
    def __init__(self, gain=2.0, groups=1):
        self.steps, self.gain, self.groups = 0, gain, groups

    def snapshot(self):
        self.steps += 1  # the record's own first look makes the first line step 2
        return {
            "step": self.steps,
            "progress": self.steps * self.gain,
            "scale": 4.0,
            "gain": self.gain + self.steps,
            "lr": [0.1 * self.steps / (1 + group) for group in range(self.groups)],
            "factor": [self.gain] * self.groups,
            "noise_scale": [None if self.steps < 3 else 8.0 * self.steps] * self.groups,
            "skipped": 3,
            "nonfinite": 0,
            "bytes": 1000 * self.steps,
            "place": "here",
        }


class Page(HTMLParser):
    """What a browser would make of the file."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.cells, self.titles, self.data, self.texts = [], [[]], [], None, []
        self.feed(path.read_text(encoding="utf-8"))
        self.figures = dict(zip(self.titles, self.data["figures"], strict=True))
        heads = [cells[0] for cells in self.cells if cells]
        start = heads.index("always the same") if "always the same" in heads else len(heads)
        rows = [cells for cells in self.cells if cells][start + 1 :]
        self.constants = {title: values for title, *values in rows}

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "tr":
            self.cells.append([])

    def handle_data(self, data):
        if not data.strip():
            return
        self.texts.append(data)
        tag, attributes = self.tags[-1]
        if attributes.get("id") == "data":
            self.data = json.loads(data)
        elif tag in ("th", "td", "i"):
            self.cells[-1].append(data)
        elif tag == "h2":
            self.titles.append(data)

    def curves(self, title):
        return [(trace["name"], trace["y"]) for trace in self.figures[title]["data"]]


@pytest.fixture
def adascale(tmp_path):
    with Record(tmp_path / "adascale.jsonl", Optimizer(), name="AdaScale") as record:
        for step in range(5):
            record.step(loss=1.0 / (1 + step))
    return read_record(tmp_path / "adascale.jsonl")


@pytest.fixture
def plain(tmp_path):
    with Record(tmp_path / "plain.jsonl", name="plain") as record:
        for step in range(10):
            record.step(loss=2.0 - step / 10, **({"accuracy": 0.5} if step == 9 else {}))
    return read_record(tmp_path / "plain.jsonl")


def test_runs_with_different_keys_stand_in_the_same_figures(tmp_path, adascale, plain):
    path = write_report([adascale, plain.path], tmp_path / "new" / "page.html", title="Both")
    assert path == tmp_path / "new" / "page.html"
    page = Page(path)
    assert page.titles == [
        "loss", "accuracy", "Gain", "Noise scale", "Learning rate", "Throughput", "Bytes"
    ]  # fmt: skip
    assert [name for name, _ in page.curves("loss")] == ["AdaScale", "plain"]
    assert page.curves("accuracy") == [("plain", [0.5])]
    assert page.curves("Gain") == [("AdaScale", [4.0, 5.0, 6.0, 7.0, 8.0])]
    assert page.curves("Noise scale") == [("AdaScale", [24.0, 32.0, 40.0, 48.0])]
    (applied, rates), (small, schedule) = page.curves("Learning rate")
    assert (applied, small) == ("AdaScale", "AdaScale, small batch")
    assert rates == [2.0 * rate for rate in schedule]
    assert [len(rates) for _, rates in page.curves("Throughput")] == [4, 9]
    assert page.constants == {"Scale": ["4", "–"]}


def test_a_run_has_one_colour_in_all_figures(tmp_path, adascale, plain):
    page = Page(write_report([adascale, plain], tmp_path / "page.html"))
    colours = {
        (trace["name"].split(",")[0], trace["line"]["color"])
        for figure in page.figures.values()
        for trace in figure["data"]
    }
    assert len(colours) == 2
    for _, colour in colours:
        assert ("i", {"style": f"background:{colour}"}) in page.tags


def test_curves_stand_against_progress_steps_or_time(tmp_path, adascale, plain):
    page = Page(write_report([adascale, plain], tmp_path / "page.html"))
    first, second = (trace["meta"]["x"] for trace in page.figures["loss"]["data"])
    assert first["step"] == [2, 3, 4, 5, 6]
    assert first["progress"] == [4.0, 6.0, 8.0, 10.0, 12.0]
    assert first["time"] == adascale.column("time")
    assert second["progress"] == second["step"] == list(range(1, 11))
    assert list(page.data["axes"]) == ["progress", "step", "time"]
    assert "without it" in page.data["axes"]["progress"]

    page = Page(write_report(plain, tmp_path / "page.html"))
    assert list(page.data["axes"]) == ["step", "time"]


def test_the_table_sums_up_each_run(tmp_path, adascale, plain):
    page = Page(write_report([adascale, plain], tmp_path / "page.html"))
    head, first, second = page.cells[1:4]
    assert head == [
        "run", "steps", "progress", "time", "steps/s", "average gain", "skipped", "not finite",
        "last loss", "lowest loss", "last accuracy", "highest accuracy",
    ]  # fmt: skip
    for row in (first, second):
        assert float(row[4].replace(",", "")) > 0
        del row[3:5]
    assert first == ["AdaScale", "6", "12", "6", "3", "0", "0.2", "0.2 at 6", "–", "–"]
    assert second == ["plain", "10", *"––––", "1.1", "1.1 at 10", "0.5", "0.5 at 10"]


def test_the_page_fetches_nothing(tmp_path, adascale):
    path = write_report(adascale, tmp_path / "page.html")
    page = Page(path)
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "srcset", "data"} & attributes.keys()
    (policy,) = (
        attributes["content"]
        for tag, attributes in page.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none';")
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"@import|url\(\s*['\"]?http", text[: text.index("<body>")])
    assert [tag for tag, _ in page.tags].count("script") == 3  # plotly once, data, ours


def test_names_are_text_and_not_html(tmp_path):
    name, key = '</script><b>&"$title', "<i>loss"
    with Record(tmp_path / "a.jsonl", name=name) as record:
        record.step(**{key: 1.0})
    page = Page(write_report(tmp_path / "a.jsonl", tmp_path / "page.html", title=name))
    assert {"b", "i"} & {tag for tag, _ in page.tags} == {"i"}  # the dot of colour
    assert [tag for tag, _ in page.tags].count("i") == 1
    assert page.cells[2][0] == name
    assert page.titles == [key]
    assert [trace["name"] for trace in page.figures[key]["data"]] == [
        "&lt;/script&gt;&lt;b&gt;&amp;&quot;$title"
    ]


def test_runs_without_a_step_are_no_obstacle(tmp_path, plain):
    Record(tmp_path / "empty.jsonl", Optimizer()).close()
    page = Page(write_report([tmp_path / "empty.jsonl", plain], tmp_path / "page.html"))
    assert page.cells[2] == ["empty", *"–––––––", *"––––"]
    assert [name for name, _ in page.curves("loss")] == ["plain"]
    page = write_report(tmp_path / "empty.jsonl", tmp_path / "page.html")
    assert "no steps yet" in page.read_text(encoding="utf-8")


def test_runs_of_one_name_are_told_apart(tmp_path, plain):
    page = Page(write_report([plain, plain], tmp_path / "page.html"))
    names = [name for name, _ in page.curves("loss")]
    assert names == [f"plain ({plain.path}) #1", f"plain ({plain.path}) #2"]


def test_parameter_groups_have_a_curve_each_unless_they_are_equal(tmp_path):
    with Record(tmp_path / "a.jsonl", Optimizer(groups=2)) as record:
        for _ in range(4):
            record.step()
    page = Page(write_report(tmp_path / "a.jsonl", tmp_path / "page.html"))
    assert [name for name, _ in page.curves("Noise scale")] == ["a"]
    assert [name for name, _ in page.curves("Learning rate")] == [
        "a, group 0", "a, group 1", "a, small batch, group 0", "a, small batch, group 1"
    ]  # fmt: skip


def test_a_long_run_is_thinned_out_and_smoothed(tmp_path):
    with Record(tmp_path / "a.jsonl") as record:
        for step in range(20_000):
            record.step(loss=1e6 if step == 12_345 else 0.5 + step % 2)
    page = Page(write_report(tmp_path / "a.jsonl", tmp_path / "page.html"))
    traces = page.figures["loss"]["data"]
    assert [trace["meta"]["window"] for trace in traces] == [0.0, 0.005, 0.02, 0.1]
    faint, little, mean, strong = (trace["y"] for trace in traces)
    assert 1000 < len(faint) < 3100
    assert max(faint) == 1e6
    for smooth in (little, mean, strong):
        assert smooth[20] == pytest.approx(1.0, abs=0.01)
        assert 300 < len(smooth) < 800
    assert traces[0]["opacity"] < 1


def test_a_spike_is_cut_off_said_and_still_on_the_page(tmp_path):
    for name in ("calm", "spike"):
        with Record(tmp_path / name) as record:
            for step in range(100):
                record.step(loss=80.0 if (name, step) == ("spike", 50) else 2 - step / 100)
    path = write_report([tmp_path / "calm", tmp_path / "spike"], tmp_path / "page.html")
    page = Page(path)
    bottom, top = page.figures["loss"]["layout"]["yaxis"]["range"]
    assert bottom <= 1.01 and 2 <= top < 4
    assert max(page.curves("loss")[1][1]) == 80.0
    text = path.read_text(encoding="utf-8")
    assert "Cut off: values from 1.01 to 80; “all values” above shows them." in text


def test_a_diverged_run_puts_the_figure_on_a_log_scale(tmp_path):
    for name, growth in (("calm", -0.01), ("diverged", 1.0)):
        with Record(tmp_path / name) as record:
            for step in range(100):
                record.step(loss=2 + growth * step)
    page = Page(write_report([tmp_path / "calm", tmp_path / "diverged"], tmp_path / "page.html"))
    assert page.figures["loss"]["layout"]["yaxis"]["type"] == "log"
    assert "range" not in page.figures["loss"]["layout"]["yaxis"]


def test_the_reader_can_choose_the_axis_and_the_scale(tmp_path, plain):
    page = Page(write_report(plain, tmp_path / "page.html"))
    radios = [attributes for _, attributes in page.tags if attributes.get("type") == "radio"]
    assert [(radio["name"], radio["value"]) for radio in radios] == [
        ("axis", "step"), ("axis", "time"), ("height", "best"), ("height", "all"), ("height", "log")
    ]  # fmt: skip
    assert [radio["value"] for radio in radios if "checked" in radio] == ["step", "best"]


@pytest.mark.skipif(shutil.which("node") is None, reason="node is missing")
def test_each_choice_of_heights_gives_plotly_another_axis():
    script = ROOT / "src" / "manyhands" / "tools" / "report" / "page.js"
    function = re.search(r"^function heights.*?^}", script.read_text("utf-8"), re.M | re.S)[0]
    axis = {"title": "loss", "type": "log", "range": [0, 1]}
    code = f"{function}\nfor (const choice of ['best', 'all', 'log'])"
    code += f" console.log(JSON.stringify(heights({json.dumps(axis)}, choice)))"
    lines = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True).stdout
    best, whole, log = map(json.loads, lines.splitlines())
    assert best == axis
    assert whole == {"title": "loss", "type": "linear", "autorange": True}
    assert log == {"title": "loss", "type": "log", "exponentformat": "power", "autorange": True}


def test_values_that_are_not_finite_are_gaps_and_said_in_the_table(tmp_path):
    with Record(tmp_path / "a.jsonl") as record:
        for loss in (1.0, math.inf, 0.5, math.nan):
            record.step(loss=loss)
    page = Page(write_report(tmp_path / "a.jsonl", tmp_path / "page.html"))
    assert page.curves("loss") == [("a", [1.0, None, 0.5, None])]
    assert page.cells[2][-2:] == ["nan", "0.5 at 3"]


def test_a_users_value_over_decades_begins_on_a_log_scale(tmp_path):
    with Record(tmp_path / "a.jsonl") as record:
        for step in range(200):
            record.step(loss=2.0 * 0.95**step, near=1.0 + step / 100, below=0.5 - step)
    path = write_report(tmp_path / "a.jsonl", tmp_path / "page.html")
    page = Page(path)
    kinds = {title: page.figures[title]["layout"]["yaxis"].get("type") for title in page.titles}
    assert (kinds["loss"], kinds["near"], kinds["below"]) == ("log", None, None)
    text = path.read_text(encoding="utf-8")
    assert text.count('<label class="log">') == len(page.titles)  # each figure has a switch


def test_samples_are_an_axis_and_their_rate_a_column(tmp_path, plain):
    with Record(tmp_path / "a.jsonl", Optimizer(), batch_size=16) as record:
        for step in range(5):
            record.step(loss=1.0 / (1 + step))
            time.sleep(0.001)
    page = Page(write_report([tmp_path / "a.jsonl", plain], tmp_path / "page.html"))
    first, second = (trace["meta"]["x"] for trace in page.figures["loss"]["data"])
    # a step has four small batches of 16; the first line is that of step 2
    assert first["samples"] == [128, 192, 256, 320, 384]
    assert second["samples"] == [None] * 10
    assert list(page.data["axes"]) == ["progress", "step", "time", "samples"]
    assert page.cells[1][4] == "steps/s"
    page = Page(write_report(tmp_path / "a.jsonl", tmp_path / "page.html"))
    assert page.cells[1][4] == "samples/s"
    assert page.data["axes"]["samples"] == "Samples"


def test_the_configuration_is_shown_as_text(tmp_path):
    config = {"lr": 0.1, "model": "<b>tiny", "path": tmp_path, "layers": [1, {"x": None}]}
    with Record(tmp_path / "a.jsonl", Optimizer(), config=config, batch_size=8) as record:
        record.step(loss=1.0)
    page = Page(write_report(tmp_path / "a.jsonl", tmp_path / "page.html"))
    assert {"lr", "0.1", "<b>tiny", str(tmp_path), "batch_size", "8"} <= set(page.texts)
    assert "[1, {'x': None}]" in page.texts
    assert not any(tag == "b" for tag, _ in page.tags)


@pytest.mark.parametrize(
    "key",
    [
        "config",
        *(
            pytest.param(k, marks=pytest.mark.long)
            for k in ("sources", "batch_size", "workers", "date")
        ),
    ],
)
def test_any_header_makes_a_page(tmp_path, key):
    for value in ODD:
        header = {"manyhands": {**FIRST["manyhands"], key: value}}
        lines = [{**LINE, "step": step, "loss": 1.0 * step} for step in range(3)]
        Page(write_report(write_lines(tmp_path / "a", header, *lines), tmp_path / "page.html"))


def test_no_run_at_all_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], tmp_path / "page.html")


# -- records that somebody has made up -------------------------------------------------------------

FIRST = {"manyhands": {"version": 1, "name": "a", "date": "", "step": 0, "keys": ["progress"]}}
LINE = {"step": 1, "time": 1.0, "progress": 1.0, "loss": 0.5, "lr": [0.1, 0.2]}
ODD = (
    "<a href='javascript:alert(1)'>x</a>", "\ud800", "\x1b[31m", "", None, True, -1, 2**70, 10**400,
    -(10**400), 1e308, "nan", "inf", [], [[]], [[1], 2], {}, {"a": {}}, [10**400, "x", None],
    [1] * 50,
)  # fmt: skip


def write_lines(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_what_should_be_a_number_and_is_a_word_is_nowhere_on_the_page(tmp_path):
    word = "<a href='javascript:alert(1)'>x</a>"
    lines = [
        {**LINE, "step": step, "progress": word if step % 2 else 3.0, "gain": word, "lr": [word]}
        for step in range(4)
    ]
    page = write_report(write_lines(tmp_path / "a", FIRST, *lines), tmp_path / "page.html")
    assert "javascript:" not in json.dumps(Page(page).data)


def test_progress_that_is_a_word_is_a_gap_and_not_a_place(tmp_path):
    lines = [
        {**LINE, "step": step, "loss": step, "progress": [1.5, "x"][step % 2]} for step in range(4)
    ]
    page = Page(write_report(write_lines(tmp_path / "a", FIRST, *lines), tmp_path / "page.html"))
    (trace,) = page.figures["loss"]["data"]
    assert trace["meta"]["x"]["progress"] == [1.5, None, 1.5, None]


@pytest.mark.parametrize(
    "key", ["progress", "loss", "lr", "gain", "factor", "skipped", "\ud800<b>"]
)
def test_any_value_makes_a_page(tmp_path, key):
    lines = [{**LINE, "step": step, key: value} for step, value in enumerate(ODD)]
    run = write_lines(tmp_path / "a", FIRST, {**LINE, "step": 0, key: 0.5}, *lines)
    page = Page(write_report([run, run], tmp_path / "page.html"))
    for figure in page.figures.values():
        for trace in figure["data"]:
            for values in (trace["y"], *trace["meta"]["x"].values()):
                assert all(value is None or isinstance(value, int | float) for value in values)


@pytest.mark.parametrize("key", ["step", "time"])
def test_a_step_that_is_no_number_is_named_by_its_line(tmp_path, key):
    for value in ODD:
        if type(value) in (int, float) and 0 <= value < 2**53:
            continue
        run = write_lines(tmp_path / "a", FIRST, LINE, {**LINE, key: value})
        with pytest.raises(ValueError, match="line 3 is damaged"):
            write_report(run, tmp_path / "page.html")


@pytest.mark.parametrize("key", ["version", "name", "keys", "step"])
def test_a_header_of_other_kinds_is_refused(tmp_path, key):
    for value in ODD:
        header = {"manyhands": {**FIRST["manyhands"], key: value}}
        run = write_lines(tmp_path / "a", header, LINE)
        if (key, type(value)) in (("name", str), ("version", bool)) or (key, value) == ("keys", []):
            write_report(run, tmp_path / "page.html")
            continue
        with pytest.raises(ValueError, match=r"not a record|format version"):
            write_report(run, tmp_path / "page.html")


def test_groups_that_are_sometimes_one_number_make_a_page(tmp_path):
    lines = [{**LINE, "step": step, "lr": [0.1, [0.1, 0.2], None][step % 3]} for step in range(6)]
    run = read_record(write_lines(tmp_path / "a", FIRST, *lines))
    assert run.column("lr/1") == [None, 0.2, None] * 2
    Page(write_report(run, tmp_path / "page.html"))


def test_a_run_named_by_bytes_that_are_no_text_has_a_page(tmp_path):
    path = tmp_path / b"caf\xe9.jsonl".decode("utf-8", "surrogateescape")
    with Record(path) as record:
        record.step(loss=1.0)
    assert "caf?" in write_report(path, tmp_path / "page.html").read_text()


def test_many_values_take_time_in_proportion(tmp_path):
    """Processor time of choosing the figures: 600 values took 7 s, all of it in searches."""
    from manyhands.tools.report._panels import panels

    def seconds(many):
        lines = [
            {"step": step, "time": 1.0, **{f"value{n}": 1.0 for n in range(many)}}
            for step in range(3)
        ]
        run = read_record(write_lines(tmp_path / "a", FIRST, *lines))
        begun = time.process_time()
        assert len(panels([run], ["a"])) == many
        return time.process_time() - begun

    assert seconds(600) < 4.0


class Ramping:
    """What `Ramp` puts on record, with a batch that grows."""

    passes = 0

    def snapshot(self):
        self.passes += 1
        return {
            "batch_scale": 2.0 * self.passes,
            "batch_passes": self.passes,
            "batch_reason": "grow",
            "target_scale": 64.0,
            "efficiency": 0.9,
            "fixed_seconds": 4.0,
            "pass_seconds": 1.0,
            "step_seconds": 4.5 + self.passes,
            "predicted_seconds": 4.0 + self.passes,
        }


def test_a_ramp_has_its_figures(tmp_path):
    with Record(tmp_path / "ramp.jsonl", Optimizer(), Ramping(), name="Ramp") as record:
        for _ in range(3):
            record.step(loss=1.0)
    page = Page(write_report([tmp_path / "ramp.jsonl"], tmp_path / "page.html"))
    assert page.titles == [
        *("Gain", "Noise scale", "Learning rate", "Time of a step", "Throughput", "Bytes"),
    ]
    assert page.constants == {"loss": ["1"], "Scale": ["4, 64 (dotted)"], "Efficiency": ["0.9"]}
    assert page.curves("Time of a step") == [
        ("Ramp", [6.5, 7.5, 8.5]), ("Ramp, predicted", [6.0, 7.0, 8.0])
    ]  # fmt: skip

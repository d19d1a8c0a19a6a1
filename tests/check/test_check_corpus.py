"""Bugs that `manyhands check` has to find, and right scripts that it must not blame."""

import json
import socket
import sys
from pathlib import Path

import pytest
import torch

from manyhands.tools.check import EXCEPTIONS, check_script

sys.path.insert(0, str(Path(__file__).parent))  # as the other folders' tests do, by name
from check_scripts import (
    BUGS,
    COUPLED,
    DEFAULTS,
    FSDP2_BUG,
    PADDED,
    PADDED_PAIRS,
    RIGHT,
    SAME_SEED,
    fill,
    written,
)

SUM = "dist.all_reduce(count)"
QUICK_BUGS = {
    "loss divided by the world size",
    "not averaged at all",
    "mean of means of tokens",
    "statistic of the rank's labels",
    "teacher that rank 0 updates",
    "order of hashes",
    "only the last pass is averaged",
    "clipped before the average",
    "overlapping shards",
    "gradients not cleared",
    "some doubled",
}
QUICK_RIGHT = {"plain", "slices, averaged by hand", "batch norm", "get_batch", "mixup", "dropout"}


def few(names, quick):
    return [
        pytest.param(name, id=name, marks=() if name in quick else pytest.mark.long)
        for name in names
    ]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", few(BUGS, QUICK_BUGS))
def test_a_bug_is_found_and_its_cause_named(name, tmp_path):
    right, bug, causes = BUGS[name]
    verdict = check_script(written(tmp_path, fill(**{**right, **bug})))
    assert verdict.code == 1, verdict.as_text()
    assert verdict.findings[0].cause in causes, verdict.as_text()


@pytest.mark.parametrize("name", few([n for n in BUGS if BUGS[n][0]], ()))
def test_the_version_without_the_bug_is_right(name, tmp_path):
    verdict = check_script(written(tmp_path, fill(**BUGS[name][0])), allow=EXCEPTIONS)
    assert verdict.code == 0, verdict.as_text()


@pytest.mark.parametrize("name", few(RIGHT, QUICK_RIGHT))
def test_a_right_script_is_judged_right(name, tmp_path):
    verdict = check_script(written(tmp_path, RIGHT[name]), allow=EXCEPTIONS)
    assert verdict.code == 0, verdict.as_text()


def test_one_seed_on_all_ranks_is_found_in_a_loop_without_a_loader(tmp_path):
    verdict = check_script(written(tmp_path, SAME_SEED))
    assert [one.cause for one in verdict.findings] == ["not sharded"]
    # no step was compared
    assert verdict.as_text().startswith("Found: the ranks see the same samples")


PARTS = {
    "AdaScale": """
        model = DDP(model)
        optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
    """,
    "ShardedDataParallel": """
        optimizer = mh.OSS(model.parameters(), optim=torch.optim.AdamW, lr=0.01)
        model = mh.ShardedDataParallel(model, optimizer)
    """,
    "FSDP": """
        model = mh.FSDP(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    """,
    "DiLoCo": "optimizer = mh.DiLoCo(torch.optim.AdamW(model.parameters(), lr=0.01), every=3)",
}


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_parts_of_this_library_are_judged_right(part, tmp_path):
    slots = dict(wrap="import manyhands as mh", optimizer=PARTS[part])
    verdict = check_script(written(tmp_path, fill(**slots)))
    assert verdict.code == 0, verdict.as_text()
    assert verdict.blocks == (part == "DiLoCo")
    if part != "DiLoCo":
        verdict = check_script(
            written(tmp_path, fill(backward="(loss / world).backward()", **slots))
        )
        assert [one.cause for one in verdict.findings] == ["constant factor"], verdict.as_text()


RULE = dict(  # a schedule and a clipping norm that follow the gain, as docs/scaling.md has them
    wrap="import manyhands as mh\nmodel = DDP(model)",
    optimizer="""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        optimizer = mh.AdaScale(optimizer)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        schedule = mh.ProgressScheduler(schedule, optimizer, end=40)
    """,
    clip="nn.utils.clip_grad_norm_(model.parameters(), 0.1 / optimizer.gain(pg_idx=0) ** 0.5)",
    step="optimizer.step()\nschedule.step()",
)


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.long), 5])
def test_rates_gains_and_schedules_of_a_scaling_rule_are_taken_as_they_are(steps, tmp_path):
    verdict = check_script(written(tmp_path, fill(**RULE)), steps=steps)
    assert verdict.code == 0, verdict.as_text()
    assert len(verdict.steps) == steps
    assert "the ranks' rates" in verdict.notes[-1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("right", "wrong", "cause"),
    [
        ("loss.backward()", "(loss / world).backward()", "constant factor"),
        ("weight_decay=0.01", "weight_decay=0.1 * world", "other update"),
        ("/ optimizer.gain(pg_idx=0) ** 0.5", "/ world", "clipping norm"),
    ],
)
def test_bugs_beside_a_scaling_rule_are_found(right, wrong, cause, tmp_path):
    assert right in fill(**RULE)
    verdict = check_script(written(tmp_path, fill(**RULE).replace(right, wrong)))
    assert [one.cause for one in verdict.findings] == [cause], verdict.as_text()


def test_an_epoch_is_shortened_until_the_order_of_the_next_is_seen(tmp_path):
    verdict = check_script(written(tmp_path, fill(epoch="")))
    assert [one.cause for one in verdict.findings] == ["same order"], verdict.as_text()


@pytest.mark.parametrize(
    "guard", ["torch.accelerator.is_available()", "torch.cuda.device_count() >= 2"]
)
def test_the_cpu_passes_for_accelerators_that_a_script_requires(guard, tmp_path):
    wrap = f"if {guard}:\n    model = DDP(model.cuda(), device_ids=[rank])"
    verdict = check_script(written(tmp_path, fill(wrap=wrap)))
    assert verdict.code == 0, verdict.as_text()
    assert "the CPU simulated an accelerator" in verdict.notes[-1]


def test_a_script_that_changes_its_folder_gets_simulated_accelerators(tmp_path):
    guard = """
        import os
        os.makedirs("outputs", exist_ok=True)
        os.chdir("outputs")
        if not torch.cuda.is_available():
            raise SystemExit("needs GPUs")
        model = DDP(model)
    """
    script = written(tmp_path, fill(wrap=guard))
    verdict = check_script(Path(script).name)
    assert verdict.code == 0, verdict.as_text()


def test_random_states_can_be_forked(tmp_path):
    loss = "with torch.random.fork_rng():\n    torch.manual_seed(i)\n" + DEFAULTS["loss"]
    verdict = check_script(written(tmp_path, fill(loss=loss)))
    assert verdict.code == 0, verdict.as_text()


def test_an_exception_has_an_exit_code_and_can_be_allowed(tmp_path):
    norm = DEFAULTS["model"].replace("nn.ReLU()", "nn.BatchNorm1d(16)")
    script = written(tmp_path, fill(model=norm))
    verdict = check_script(script)
    assert verdict.code == 3
    assert "except for: batch-norm. Accept this with" in " ".join(verdict.as_text().split())
    assert check_script(script, allow=["batch-norm"]).code == 0
    assert check_script(script, allow=["schedule"]).code == 3


def test_a_loss_divided_by_the_world_size_is_found_under_fully_shard(tmp_path):
    verdict = check_script(written(tmp_path, FSDP2_BUG))
    assert [one.cause for one in verdict.findings] == ["constant factor"]


def test_a_loss_that_couples_samples_is_judged_with_batches_one_after_the_other(tmp_path):
    verdict = check_script(written(tmp_path, COUPLED))
    assert verdict.code == 3, verdict.as_text()
    assert list(verdict.exceptions) == ["coupled-loss"]
    bug = COUPLED.replace("loss.backward()", "(loss / world).backward()")
    verdict = check_script(written(tmp_path, bug))
    assert [one.cause for one in verdict.findings] == ["constant factor"]


def test_rows_in_pairs_are_the_reason_if_batches_cannot_be_replayed_one_by_one(tmp_path):
    pairs = """
        chosen, rejected = model(x).mean(1).chunk(2)  # the first half against the second
        loss = -F.logsigmoid(chosen - rejected).mean()
    """
    # as the Trainer of transformers clears gradients
    clear = dict(clear="", step="optimizer.step()\nmodel.zero_grad()")
    text = fill(loss=pairs, **clear)
    verdict = check_script(written(tmp_path, text), allow=["coupled-loss"])
    assert verdict.code == 0, verdict.as_text()
    counted = "optimizer.step()\npasses += 1\nif passes > 6:\n    raise SystemExit(0)"
    verdict = check_script(written(tmp_path, fill(loss=pairs, step=counted)))
    assert verdict.code == 2, verdict.as_text()
    assert "the samples that share a batch" in verdict.reason
    assert "one process makes a different number of steps" in verdict.reason


def test_batches_of_unequal_width_are_padded_if_labels_are_named(tmp_path):
    verdict = check_script(written(tmp_path, PADDED))
    assert verdict.code == 0, verdict.as_text()
    verdict = check_script(written(tmp_path, PADDED.replace("* world / count", "/ (y > 0).sum()")))
    assert [one.cause for one in verdict.findings] == ["token weights"], verdict.as_text()
    for pairs in (PADDED_PAIRS, PADDED_PAIRS.replace(SUM, f"with torch.no_grad(): {SUM}")):
        verdict = check_script(written(tmp_path, pairs))
        assert verdict.code == 2, verdict.as_text()
        assert "cannot repeat the sums over ranks" in verdict.reason


def test_a_sum_for_the_log_hides_no_bug(tmp_path):
    text = PADDED_PAIRS.replace(SUM, "count = count * world")
    text = text.replace("* world / count", "* world / count * (1 + (rank == 0))")
    text = text.replace("optimizer.step()", "optimizer.step(); dist.all_reduce(loss.detach())")
    verdict = check_script(written(tmp_path, text))
    assert verdict.code == 1, verdict.as_text()


def test_rounding_that_grows_with_each_step_is_no_coupling(tmp_path):
    loss = "loss = F.mse_loss(torch.sin(300 * model(x).sum(1)), y.double())"
    verdict = check_script(written(tmp_path, fill(loss=loss)))
    assert verdict.code == 0, verdict.as_text()
    assert verdict.notes == ["rounding grows, so batches were compared one by one."]


def test_loaders_of_unequal_length_are_noted(tmp_path):
    part = "data = torch.utils.data.Subset(data, range(12) if rank == 0 else range(12, 48))\n"
    loader = part + "loader = DataLoader(data, 4, shuffle=True)"
    verdict = check_script(written(tmp_path, fill(loader=loader, epoch="")))
    assert verdict.untested == ["the end of an epoch, as the ranks' loaders have [3, 9] batches"]


def test_a_bug_names_factor_and_line(tmp_path):
    text = fill(backward="(loss / world).backward()")
    verdict = check_script(written(tmp_path, text))
    line = text.splitlines().index("        (loss / world).backward()") + 1
    assert verdict.findings[0].place == f"train.py:{line}"
    assert "0.5000 times" in verdict.findings[0].text
    found = json.loads(verdict.as_json())
    assert (found["result"], found["code"]) == ("differs", 1)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("import nothing_of_this_name", "nothing_of_this_name"),
        ("print('no training')", "no torch optimizer made a step"),
        ("raise SystemExit(3)", "exit code 3"),
        (fill(optimizer=DEFAULTS["optimizer"].replace("0.1", "0.0")), "no parameter changes"),
        (fill(loss="loss = 0 * F.cross_entropy(model(x), y)"), "all gradients are zero"),
        (fill(data="data = TensorDataset(torch.ones(48, 6), torch.ones(48).long())"), "are equal"),
    ],
)
def test_what_cannot_be_judged_says_why(text, reason, tmp_path):
    verdict = check_script(written(tmp_path, text))
    assert verdict.code == 2
    assert reason in verdict.reason


def test_nothing_of_this_process_is_changed(tmp_path):
    before = torch.nn.Module.__call__, torch.optim.Optimizer.__init__, torch.get_default_dtype()
    check_script(written(tmp_path, fill()))
    after = torch.nn.Module.__call__, torch.optim.Optimizer.__init__, torch.get_default_dtype()
    assert after == before


OWN_BATCHES = """
KIND = "<kind>"
import collections
import dataclasses
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
Pair = collections.namedtuple("Pair", "x y")
class Bag(collections.UserDict): pass
@dataclasses.dataclass
class Item:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "a"
class Data(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.randn(4, generator=g), torch.randn(2, generator=g)
def collate(rows):
    x, y = (torch.stack(p) for p in zip(*rows))
    if KIND == "pair": return Pair(x, y)
    if KIND == "bag": return Bag(x=x, y=y, ids=["s"] * len(x), n=np.arange(len(x)))
    if KIND == "item": return Item(x, y)
    return {"x": x, "y": y, "n": np.float32(3), "a": np.arange(len(x))}
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 2)); opt = torch.optim.AdamW(model.parameters(), lr=0.1)
data = Data(); loader = DataLoader(data, 4, sampler=DistributedSampler(data), collate_fn=collate)
for b in loader:
    x, y = (b.x, b.y) if KIND in ("pair", "item") else (b["x"], b["y"])
    opt.zero_grad(); ((model(x) - y) ** 2).mean().backward(); opt.step()
"""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(k, marks=pytest.mark.long if k != "bag" else ())
        for k in ("pair", "bag", "item", "")
    ],
)
def test_batches_of_the_scripts_own_classes_are_given_again(kind, tmp_path):
    verdict = check_script(written(tmp_path, OWN_BATCHES.replace("<kind>", kind)))
    assert verdict.code == 0, verdict.as_text()


GROUP_OF_SEVERAL = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.manual_seed(0)
model, sampler = torch.nn.Linear(4, 2), None
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    dist.init_process_group("gloo")
    model, sampler = DDP(model), DistributedSampler(data)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for x, y in DataLoader(data, 4, sampler=sampler):
    optimizer.zero_grad()
    <backward>
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("backward", "cause"),
    [
        ("((model(x) - y) ** 2).mean().backward()", None),
        ("(((model(x) - y) ** 2).mean() / dist.get_world_size()).backward()", "constant factor"),
        ("with model.no_sync(): ((model(x) - y) ** 2).mean().backward()", "not averaged"),
    ],
)
def test_a_group_that_one_process_would_not_make(backward, cause, tmp_path):
    verdict = check_script(written(tmp_path, GROUP_OF_SEVERAL.replace("<backward>", backward)))
    assert [one.cause for one in verdict.findings] == ([cause] if cause else [])
    assert verdict.code == (1 if cause else 0), verdict.as_text()


LIGHTNING = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)
    def training_step(self, batch, _):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1]) / <divisor>
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)
L.seed_everything(0)
data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, **quiet)
trainer.fit(Net(), DataLoader(data, batch_size=4, shuffle=True))
"""


@pytest.mark.long
@pytest.mark.parametrize(("divisor", "code"), [("1", 0), ("self.trainer.world_size", 1)])
def test_a_lightning_trainer_with_two_devices(divisor, code, tmp_path):
    pytest.importorskip("lightning")
    verdict = check_script(written(tmp_path, LIGHTNING.replace("<divisor>", divisor)))
    assert verdict.code == code, verdict.as_text()


BLOCKS = """
import torch
import torch.distributed as dist
import manyhands as mh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
params, kept = list(model.parameters()), <kept>
optimizer = mh.DiLoCo(torch.optim.AdamW(params[:kept], lr=0.1), every=<every>)
others = torch.optim.SGD(params[kept:] or [torch.zeros(1, requires_grad=True)], lr=0.1)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
for x, y in DataLoader(data, 4, sampler=<sampler>):
    model.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
    others.step() if kept < 4 else None
"""


@pytest.mark.parametrize(
    ("every", "kept", "sampler", "code", "said"),
    [
        (3, 4, "DistributedSampler(data)", 0, "equal after a sync round"),
        pytest.param(9, 4, "DistributedSampler(data)", 2, "no sync round", marks=pytest.mark.long),
        (2, 2, "DistributedSampler(data)", 1, "differ after every step"),
        pytest.param(2, 4, "None", 1, "the ranks see the same samples", marks=pytest.mark.long),
    ],
)
def test_replicas_in_blocks_are_equal_after_a_round(every, kept, sampler, code, said, tmp_path):
    slots = {"every": str(every), "kept": str(kept), "sampler": sampler}
    text = BLOCKS
    for name, value in slots.items():
        text = text.replace(f"<{name}>", value)
    verdict = check_script(written(tmp_path, text))
    assert verdict.code == code, verdict.as_text()
    shown = " ".join(verdict.as_text().split())
    assert said in shown
    assert "ranks train like one process" not in shown  # it was not compared


DRAWN = {
    "normal": "x = x + torch.normal(0.0, 0.1, size=x.shape) + torch.normal(x, 0.1)",
    "gumbel": "x = F.gumbel_softmax(x)",
    "fills": "x = x * torch.empty_like(x).log_normal_() + torch.empty_like(x).geometric_(0.5)",
    "multinomial": "x = x + torch.multinomial(torch.ones(3), len(x), replacement=True)[:, None]",
    "rates": "x = torch.poisson(x.abs()) + torch.distributions.Gamma(x.abs(), 1.0).sample()",
    "beta": "x = x * torch.distributions.Beta(1.0, 1.0).sample()",
    "betas": "x = x * torch.distributions.Beta(1.0, 1.0).sample(x.shape[:1])[:, None]",
}


def drawn(line):
    """Return a script that draws random numbers in its loop, with a seed of the rank."""
    seed = DEFAULTS["optimizer"] + "\ntorch.manual_seed(100 + rank)"
    return fill(optimizer=seed, loss=f"{line}\nloss = F.cross_entropy(model(x), y)")


@pytest.mark.parametrize("name", few(DRAWN, {"normal"}))
def test_random_numbers_of_the_loop_are_the_same_for_every_sample(name, tmp_path):
    verdict = check_script(written(tmp_path, drawn(DRAWN[name])))
    assert verdict.code == 0, verdict.as_text()


def test_random_numbers_of_a_generator_of_each_rank_are_replayed(tmp_path):
    line = (
        "g = torch.Generator().manual_seed(i + 9 * rank)\nx = x + torch.rand(x.shape, generator=g)"
    )
    verdict = check_script(written(tmp_path, drawn(line)))
    assert verdict.code == 0, verdict.as_text()
    bug = drawn(line).replace("loss.backward()", "(loss / world).backward()")
    verdict = check_script(written(tmp_path, bug))
    assert [one.cause for one in verdict.findings] == ["constant factor"]


DEVICES = """
generator = torch.Generator("cuda").manual_seed(0)
if rank == 0:
    torch.save(model.state_dict(), "model.pt")
dist.barrier()
for device in (f"cuda:{rank}", torch.device("cuda", rank), {"cuda:0": f"cuda:{rank}"}):
    model.load_state_dict(torch.load("model.pt", map_location=device))
"""


def test_a_checkpoint_and_a_generator_of_a_gpu_are_of_the_cpu(tmp_path):
    verdict = check_script(written(tmp_path, fill(wrap=DEVICES + DEFAULTS["wrap"])))
    assert verdict.code == 0, verdict.as_text()


def test_a_port_of_the_scripts_own_may_be_taken(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = f'os.environ["MASTER_PORT"] = "{taken.getsockname()[1]}"'
        text = fill(start=f"{port}\n{DEFAULTS['start']}")
        verdict = check_script(written(tmp_path, text), steps=2, seconds=60)
    assert verdict.code == 0, verdict.as_text()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("os.kill(os.getpid(), 9)", "signal SIGKILL. Last output: no more"),
        ("os._exit(7)", "exit code 7. Last output: no more"),
    ],
)
def test_a_process_that_dies_leaves_its_last_words(end, reason, tmp_path):
    verdict = check_script(written(tmp_path, f"import os\nos.write(2, b'no more')\n{end}"))
    assert verdict.code == 2
    assert reason in verdict.reason


WRITES_FILES = """
import os, shutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if os.path.exists("last.pt"):
    optimizer.load_state_dict(torch.load("last.pt", weights_only=True)["optimizer"])
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
for step, (x, y) in enumerate(DataLoader(data, 4, sampler=DistributedSampler(data))):
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        torch.save({"optimizer": optimizer.state_dict()}, "last.pt")
        open("train.log", "a").write("a line")
        os.makedirs(f"steps/{step}")
        torch.save({}, f"steps/{step}/new.pt")
        os.replace("train.log", "moved.log")
        shutil.rmtree("old", ignore_errors=True)
        os.unlink("link") if os.path.islink("link") else None
"""


def test_files_of_the_user_are_what_they_were(tmp_path):
    start = torch.optim.SGD([torch.zeros(2, 4), torch.zeros(2)], lr=0.1, momentum=0.9)
    for param in start.param_groups[0]["params"]:
        start.state[param]["momentum_buffer"] = torch.ones_like(param)
    torch.save({"optimizer": start.state_dict()}, tmp_path / "last.pt")
    (tmp_path / "train.log").write_text("mine")
    (tmp_path / "old" / "part").mkdir(parents=True)
    (tmp_path / "old" / "part" / "a").write_text("kept")
    (tmp_path / "link").symlink_to("train.log")
    script = written(tmp_path, WRITES_FILES)

    def files():
        paths = sorted(tmp_path.rglob("*"))
        return {p: p.read_bytes() if p.is_file() else None for p in paths}, (
            tmp_path / "link"
        ).readlink()

    before = files()
    verdict = check_script(script)
    assert verdict.code == 0, verdict.as_text()
    assert files() == before
    for name in ("last.pt", "train.log"):
        (tmp_path / name).unlink()
    before = files()
    assert check_script(script).code == 0
    assert files() == before

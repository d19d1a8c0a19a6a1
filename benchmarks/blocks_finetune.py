"""Is a model that was pretrained in blocks as good a start for fine-tuning?

    python benchmarks/blocks_finetune.py --data FOLDER            # tinyshakespeare.txt.xz; writes
    python benchmarks/blocks_finetune.py --data FOLDER --quick    # a smoke test, writes nothing
    python benchmarks/blocks_finetune.py --draw                   # the page from the results so far

A transformer for characters is pretrained on Shakespeare until its loss on held-out text reaches
`TARGET`: by one worker with the batch of four (what DDP computes), or by four workers in blocks.
Then all are fine-tuned alike, by one worker, on the source code of Python's standard library. Each
finished run is one line in results/blocks-finetune.jsonl, and the same command goes on where it was
interrupted.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers

peers.this_checkout()

import json_lines  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from blocks.learning import WORKERS, Transformer, in_blocks, in_processes, loss_of  # noqa: E402
from quality.workloads import SHAKESPEARE  # noqa: E402
from torch import Tensor, nn  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "blocks-finetune.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "blocks-finetune.md"
SEEDS = (0, 1, 2)
SYNCHRONOUS = "synchronous"
DILOCO = {"kind": "DiLoCo", "lr": 1.0, "momentum": 0.8}
METHODS: dict[str, dict[str, Any] | None] = {
    SYNCHRONOUS: None,
    "DiLoCo, H = 32": {**DILOCO, "every": 32},
    "DiLoCo, H = 32, int4": {**DILOCO, "every": 32, "codec": "int4"},
    "DiLoCo, H = 128": {**DILOCO, "every": 128},
    "LocalSGD, H = 32": {"kind": "LocalSGD", "every": 32},
}
SYMBOLS, LENGTH = 128, 64
PASS = 4  # windows of text in one worker's step
TARGET, MOST = 2.0, 4000  # nats, and steps in which it is to be reached
LOOK = 32  # steps between two looks at the loss
WARMUP = 384  # steps in which blocks step together: a multiple of every H
PRETRAINING, FINE_TUNING = 1e-3, 3e-4  # learning rates
STEPS = (0, 25, 100, 400)  # of fine-tuning, after which the loss is taken
CHARACTERS = 200_000  # of the second text, a fifth of it held out


@dataclass(frozen=True)
class Text:
    train: Tensor
    test: Tensor

    @classmethod
    def of(cls, characters: str, test: float) -> Text:
        codes = torch.tensor([min(ord(one), SYMBOLS - 1) for one in characters])
        cut = round(len(codes) * (1 - test))
        return cls(codes[:cut], codes[cut:])

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.train) - LENGTH - 1, (count, 1), generator=generator)
        windows = self.train[starts + torch.arange(LENGTH + 1)]
        return windows[:, :-1], windows[:, 1:]

    @torch.no_grad()
    def loss(self, model: nn.Module, windows: int = 600) -> float:
        """On held-out text, spread over all of it."""
        starts = torch.linspace(0, len(self.test) - LENGTH - 1, windows).long()[:, None]
        x = self.test[starts + torch.arange(LENGTH + 1)]
        return loss_of(model, x[:, :-1], x[:, 1:]).item()


def shakespeare(folder: Path) -> Text:
    import lzma

    with lzma.open(folder / SHAKESPEARE, "rt", encoding="utf-8") as file:
        return Text.of(file.read(), test=0.1)


def python_code() -> Text:
    """Modules of the standard library, from the largest on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda p: -p.stat().st_size)
    code = [file.read_text(encoding="utf-8") for file in files[:8]]
    part = CHARACTERS // len(code)
    return Text.of("".join(one[:part] for one in code), test=0.2)


def pretrain(text: Text, seed: int, method: dict[str, Any] | None, target: float) -> Any:
    """Train until the loss on held-out text is at most the target; on this worker."""
    workers = dist.get_world_size()
    torch.manual_seed(seed)
    model = Transformer(SYMBOLS, LENGTH)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=PRETRAINING, betas=(0.9, 0.95))
    if method:
        optimizer = in_blocks(optimizer, warmup=WARMUP, **method)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    look = max(LOOK, method["every"]) if method else LOOK
    for step in range(1, MOST + 1):
        x, y = text.draw(PASS * WORKERS // workers, generator)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        # Just after a sync round: all workers have the same parameters, and decide alike.
        if step >= WARMUP and step % look == 0 and text.loss(model) <= target:
            return model, step
    raise RuntimeError(f"the loss was not at {target} after {MOST} steps")


def fine_tune(model: nn.Module, text: Text, seed: int) -> list[float]:
    """The same for everybody: one worker, and the rate falls to nothing in the last quarter."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=FINE_TUNING, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(7000 + seed)
    losses = []
    for step in range(STEPS[-1] + 1):
        if step in STEPS:
            losses.append(text.loss(model))
        left = min(1.0, (STEPS[-1] - step) / (STEPS[-1] / 4))
        optimizer.param_groups[0]["lr"] = FINE_TUNING * left
        x, y = text.draw(PASS * WORKERS, generator)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return losses


def run(folder: Path, seed: int, method: dict[str, Any] | None, target: float) -> dict[str, Any]:
    """Pretraining and fine-tuning, in processes of their own."""

    def work() -> dict[str, Any]:
        torch.set_num_threads(1)
        first, second = shakespeare(folder), python_code()
        model, steps = pretrain(first, seed, method, target)
        if dist.get_rank() > 0:
            return {}
        pretrained = first.loss(model, windows=1500)
        tuned = copy.deepcopy(model)
        losses = fine_tune(tuned, second, seed)
        kept = first.loss(tuned, windows=1500)
        return {"steps": steps, "pretrained": pretrained, "losses": losses, "kept": kept}

    return in_processes(WORKERS if method else 1, work, str(method))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with the data sets")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    if not options.draw:
        if options.data is None:
            parser.error("--data FOLDER is needed: where tinyshakespeare.txt.xz is")
        torch.set_num_threads(1)
        torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # imports once what it imports
        train_all(options.data, options.quick)
    if not options.quick:
        PAGE.write_text(page(json_lines.read(RESULTS)))


def train_all(folder: Path, quick: bool) -> None:
    done = set() if quick else {row["key"] for row in json_lines.read(RESULTS)}
    for seed in SEEDS[: 1 if quick else None]:
        for name, method in METHODS.items():
            key = f"{name}/{method}/{TARGET}/{STEPS}/{seed}"
            if key in done:
                continue
            found = run(folder, seed, method, 3.0 if quick else TARGET)
            print(f"seed {seed}, {name}: {found}", flush=True)
            if not quick:
                json_lines.append(RESULTS, {"key": key, "name": name, "seed": seed, **found})


def page(found: list[dict[str, Any]]) -> str:
    return f"""# Blocks: fine-tuning after them

```bash
python benchmarks/blocks_finetune.py --data FOLDER  # tinyshakespeare.txt.xz
```

Is a model that was pretrained in blocks as good a start for fine-tuning? [What happens when
nanochat meets DiLoCo?](https://arxiv.org/abs/2511.13761) found that it is not: the loss of
pretraining was level, and what was trained after it was worse.

Here a transformer for characters (0.6 M parameters) is pretrained on Shakespeare at a constant
rate until its loss on held-out text is at most {TARGET} nats: by one worker with the batch of
{WORKERS}, which is what DDP computes, or by {WORKERS} workers in blocks of H steps (of which the
first {WARMUP} steps are taken together). So all begin to be fine-tuned at the same loss. Then all
do the same: one worker, plain AdamW, {STEPS[-1]} steps on {CHARACTERS // 1000} thousand
characters of the source code of Python's standard library. Losses are on held-out text, in nats;
mean ± standard deviation of
{len(SEEDS)} seeds, which are the same for all, and the mean of the differences from synchronous
pretraining of the same seed with its standard error.

{verdict(found)}

{table(found)}

- "Steps" are those of pretraining. "Before" is the loss on code without fine-tuning.
- "Shakespeare after it" is what is left of the first text after fine-tuning on the second.
- After DiLoCo more of the first text is left, and less of the second is learned: at the same
  learning rate the model moves less. Whether another rate makes up for it was not tried.
- This is a small model, a small text and one kind of fine-tuning. The paper's models are a thousand
  times larger, and it looks at answers to questions, which no model of this size gives.
"""


def of(found: list[dict[str, Any]], name: str) -> dict[int, dict[str, Any]]:
    return {row["seed"]: row for row in found if row["name"] == name}


def differences(found: list[dict[str, Any]], name: str) -> list[float]:
    """Of the fine-tuned loss, over synchronous pretraining's with the same seed."""
    base, ours = of(found, SYNCHRONOUS), of(found, name)
    return [ours[s]["losses"][-1] / base[s]["losses"][-1] - 1 for s in ours if s in base]


def verdict(found: list[dict[str, Any]]) -> str:
    return "\n".join(_verdicts(found))


def _verdicts(found: list[dict[str, Any]]) -> Iterator[str]:
    for name in METHODS:
        if name == SYNCHRONOUS or len(apart := differences(found, name)) < 2:
            continue
        mean, error = statistics.mean(apart), statistics.stdev(apart) / len(apart) ** 0.5
        word = "level" if abs(mean) <= max(2 * error, 0.005) else "lower" if mean < 0 else "higher"
        yield f"- After {name} the fine-tuned loss is **{word}**: {mean:+.2%} ± {error:.2%}."


def table(found: list[dict[str, Any]]) -> str:
    after = [f"after {step} steps" for step in STEPS[1:]]
    lines = [
        f"| pretraining | steps | its loss | before | {' | '.join(after)} | Shakespeare after it |",
        "|---|--:|--:|--:|" + "--:|" * (len(after) + 1),
    ]
    for name in METHODS:
        rows = list(of(found, name).values())
        if not rows:
            continue
        columns = [[row["steps"] for row in rows], [row["pretrained"] for row in rows]]
        columns += [list(at) for at in zip(*(row["losses"] for row in rows), strict=True)]
        columns.append([row["kept"] for row in rows])
        cells = [f"{statistics.mean(columns[0]):.0f}", *map(_spread, columns[1:])]
        few = f" ({len(rows)} of {len(SEEDS)} seeds)" if len(rows) < len(SEEDS) else ""
        lines.append(f"| {name}{few} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    mean = f"{statistics.mean(values):.4f}"
    return f"{mean} ± {statistics.stdev(values):.4f}" if len(values) > 1 else mean


if __name__ == "__main__":
    main()

"""Fine-tuning in bfloat16: how much of a model changes in a block, and what codec="patch" sends.

    python benchmarks/blocks_patches.py --data FOLDER            # tinyshakespeare.txt.xz; writes
    python benchmarks/blocks_patches.py --data FOLDER --quick    # a smoke test, writes nothing
    python benchmarks/blocks_patches.py --draw                   # the page from the results so far

A transformer for characters is pretrained on Shakespeare in float32, and cast to bfloat16. Then it
is fine-tuned on the source code of Python's standard library, by one worker with the batch of four,
or by four workers in blocks. Bytes are what the workers' sockets have sent. Each finished run is
one line in results/blocks-patches.jsonl, and the same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import peers

peers.this_checkout()

import json_lines  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from blocks.learning import WORKERS, Transformer, in_blocks, in_processes, loss_of  # noqa: E402
from blocks_finetune import LENGTH, PASS, SYMBOLS, Text, python_code, shakespeare  # noqa: E402
from torch import nn  # noqa: E402

from sharding import traffic  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "blocks-patches.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "blocks-patches.md"
SEEDS = (0, 1, 2)
RATES = (1e-6, 1e-5, 1e-4)
CODECS = (None, "patch")  # None: one worker
EVERY, ROUNDS = 32, 6
PRETRAINING = 600  # steps
QUICK = 20


def pretrained(text: Text, seed: int, steps: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Transformer(SYMBOLS, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(1000 * seed)
    for _ in range(steps):
        x, y = text.draw(PASS * WORKERS, generator)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return model.to(torch.bfloat16)


def fine_tune(model: nn.Module, text: Text, seed: int, lr: float, codec: str | None) -> Any:
    """Return the loss on held-out text; in blocks also what changed and what was sent.

    This process is a fork, so the model is its own.
    """
    workers = dist.get_world_size()
    inner = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    optimizer: Any = inner
    if codec:
        optimizer = in_blocks(inner, "DiLoCo", EVERY, warmup=0, codec=codec)
    generator = torch.Generator().manual_seed(7000 + 100 * seed + dist.get_rank())
    params = list(model.parameters())
    changed, before = [], traffic.bytes_sent()
    for step in range(1, EVERY * ROUNDS + 1):
        x, y = text.draw(PASS * WORKERS // workers, generator)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        if codec and step % EVERY == 0:  # all but one of the block's steps have been taken
            changed.append(share_changed(optimizer, params))
        optimizer.step()
    dist.barrier()  # a connection that another worker has closed would not be counted
    sent = traffic.bytes_sent() - before
    elements = sum(param.numel() for param in params)
    found = {"loss": text.loss(model.float()), "elements": elements}
    if codec:
        found |= {"changed": statistics.mean(changed), "sent": sent / ROUNDS / elements}
    return found


def share_changed(optimizer: Any, params: list[torch.Tensor]) -> float:
    """Return the share of the parameters that differ from the anchor."""
    here = [param.detach().clone() for param in params]
    with optimizer.at_anchor():
        pairs = list(zip(params, here, strict=True))
        count = sum(int((param != value).sum()) for param, value in pairs)
    return count / sum(value.numel() for value in here)


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
        train_all(options.data, options.quick)
    if not options.quick:
        PAGE.write_text(page(json_lines.read(RESULTS)))


def train_all(folder: Path, quick: bool) -> None:
    done = set() if quick else {row["key"] for row in json_lines.read(RESULTS)}
    first, second = shakespeare(folder), python_code()
    for seed in SEEDS[: 1 if quick else None]:
        model = pretrained(first, seed, QUICK if quick else PRETRAINING)
        for lr in RATES[: 1 if quick else None]:
            for codec in CODECS:
                key = f"{lr}/{codec}/{EVERY}/{ROUNDS}/{PRETRAINING}/{seed}"
                if key in done:
                    continue

                work = partial(fine_tune, model, second, seed, lr, codec)
                found = in_processes(WORKERS if codec else 1, work, key)[0]
                print(f"seed {seed}, lr {lr}, {codec}: {found}", flush=True)
                if not quick:
                    known = {"key": key, "seed": seed, "lr": lr, "codec": codec}
                    json_lines.append(RESULTS, {**known, **found})


def page(found: list[dict[str, Any]]) -> str:
    return f"""# Blocks: patches in fine-tuning

```bash
python benchmarks/blocks_patches.py --data FOLDER  # tinyshakespeare.txt.xz
```

With parameters in bfloat16 most steps of fine-tuning are less than half of a parameter's last bit,
and change nothing. `codec="patch"` sends what has changed. How much is that, and does it train as
well?

A transformer for characters ({found[0]["elements"] / 1e6:.1f} M parameters) is pretrained on
Shakespeare in float32 for {PRETRAINING} steps, and cast to bfloat16. Then it is fine-tuned on the
source code of Python's standard library for {EVERY * ROUNDS} steps of plain AdamW in bfloat16: by
one worker with the batch of {WORKERS}, or by {WORKERS} workers under DiLoCo with H = {EVERY}. The
loss is on held-out code, in nats; means of {len(SEEDS)} seeds, with the standard deviation.

{table(found)}

- "Changed" is the share of a worker's parameters that differ from the anchor at the end of a block.
- "Bytes" are those that a worker has sent in a sync round, for each parameter. All-reducing the
  gradients in bfloat16 sends {ddp(1):.0f} bytes a parameter in a step, and {ddp(EVERY):.0f} in a
  block.
- A patch goes to all other workers, so that its bytes grow with N - 1. A value costs 3.1 bytes.
  With `codec="bfloat16"` all values of a sync round cost {ddp(1):.0f} bytes a parameter.
- The workers' mean with this codec is that of `codec="float32"`, which `tests/blocks/test_patch.py`
  checks: what differs from one worker is DiLoCo's doing.
"""


def ddp(steps: int) -> float:
    """Bytes a parameter that an all-reduce of 16-bit gradients sends in so many steps."""
    return steps * 2 * 2 * (WORKERS - 1) / WORKERS


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| learning rate | codec | loss | changed | bytes a parameter | times less than DDP |",
        "|--:|---|--:|--:|--:|--:|",
    ]
    for lr in RATES:
        for codec in CODECS:
            rows = [row for row in found if (row["lr"], row["codec"]) == (lr, codec)]
            if not rows:
                continue
            losses = [row["loss"] for row in rows]
            spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
            cells = [f"{lr:g}", f'`"{codec}"`' if codec else "one worker"]
            cells.append(f"{statistics.mean(losses):.4f}{spread}")
            if codec:
                changed = statistics.mean(row["changed"] for row in rows)
                sent = statistics.mean(row["sent"] for row in rows)
                cells += [f"{changed:.2%}", f"{sent:.3f}", f"{ddp(EVERY) / sent:,.0f}"]
            else:
                cells += ["", "", ""]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

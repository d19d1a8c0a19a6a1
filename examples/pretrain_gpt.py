"""Pretrain a GPT on text with a growing batch, on any number of ranks.

    python examples/pretrain_gpt.py --width 128 --layers 4 --heads 4 --block 64     # on a CPU
    torchrun --nproc-per-node 8 examples/pretrain_gpt.py --text fineweb.txt   # 11 M parameters
    torchrun --nproc-per-node 8 examples/pretrain_gpt.py --text fineweb.txt \\
        --width 768 --layers 12 --heads 12 --block 1024 --micro-batch 16 --memory 20GiB     # 86 M

--text is any file; its bytes are the tokens. By default, the text is the source of Python's
standard library. The learning rate is for steps of a single micro-batch, and --steps counts such
steps: a larger step counts by its gain. Muon trains the matrices of the blocks, AdamW all other
parameters.

SIGTERM lets the script save and exit. A restart on any number of ranks resumes with the next
window. `manyhands report runs/pretrain.jsonl` draws the record. At the end, the script prints a
sample.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import manyhands as mh

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--text", type=Path, help="default: the source of the standard library")
parser.add_argument("--width", type=int, default=384)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--heads", type=int, default=6)
parser.add_argument("--block", type=int, default=256, help="context length in bytes")
parser.add_argument("--micro-batch", type=int, default=12, help="windows per pass and rank")
parser.add_argument("--max-scale", type=int, default=16, help="maximum micro-batches per step")
parser.add_argument(
    "--lr", type=float, default=1e-3, help="tuned for steps of a single micro-batch"
)
parser.add_argument(
    "--steps",
    type=int,
    default=5000,
    help="length of the training, in steps of a single micro-batch",
)
parser.add_argument("--level", choices=["auto", "0", "1", "2", "3"], default="auto")
parser.add_argument("--memory", help="memory of a rank, such as 20GiB; default: free GPU memory")
parser.add_argument("--save-every", type=int, default=250, help="steps between two checkpoints")
parser.add_argument("--checkpoints", default="runs/pretrain", help="folder of the checkpoints")
parser.add_argument("--record", default="runs/pretrain.jsonl")
args = parser.parse_args()

# -- model -----------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(args.width, 3 * args.width, bias=False)
        self.out = nn.Linear(args.width, args.width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, args.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(args.width), Attention()
        self.norm2 = nn.LayerNorm(args.width)
        self.up = nn.Linear(args.width, 4 * args.width, bias=False)
        self.down = nn.Linear(4 * args.width, args.width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(256, args.width)
        self.positions = nn.Embedding(args.block, args.width)
        self.blocks = nn.Sequential(*(Block() for _ in range(args.layers)))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, 256, bias=False)
        self.head.weight = self.tokens.weight
        for name, param in self.named_parameters():
            if param.ndim == 2:  # as in GPT-2: smaller for additions to the residual stream
                into_stream = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * args.layers) if into_stream else 0.02
                nn.init.normal_(param, std=std)

    def forward(self, x, targets=None):
        x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# -- data: windows of bytes ------------------------------------------------------------------------


class Windows(torch.utils.data.Dataset):
    def __init__(self, text):
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self):
        return (len(self.bytes) - 1) // args.block

    def __getitem__(self, number):
        window = self.bytes[number * args.block :][: args.block + 1].long()
        return window[:-1], window[1:]


if args.text:
    text = args.text.read_bytes()
else:
    sources = sorted(Path(argparse.__file__).parent.glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)
cut = len(text) * 19 // 20
train, held_out = Windows(text[:cut]), Windows(text[cut:])

# -- ranks, model, optimizers ----------------------------------------------------------------------

job = mh.start(checkpoints=args.checkpoints)  # torchrun, Slurm, Ray, ... or a single process
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", job.local_rank)
    torch.cuda.set_device(device)
half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def show(text):
    """Print on the first rank."""
    if job.rank == 0:
        print(text, flush=True)


torch.manual_seed(0)
network = GPT().to(device)
size = sum(param.numel() for param in network.parameters())
matrices = [param for param in network.blocks.parameters() if param.ndim == 2]
among = set(matrices)
others = [param for param in network.parameters() if param not in among]
muon = torch.optim.Muon(matrices, args.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
adamw = torch.optim.AdamW(others, args.lr, betas=(0.9, 0.95), weight_decay=0.0)

# The lowest level that fits the memory.
example = torch.zeros(args.micro_batch, args.block, dtype=torch.long, device=device)
level = args.level if args.level == "auto" else int(args.level)
model, (muon, adamw) = mh.shard(
    network, [muon, adamw], level, memory=args.memory, input=example, auto_wrap_policy={Block}
)

# A rule for each optimizer. The ramp uses the noise of Muon's gradients.
muon = mh.SqrtScale(muon)
adamw = mh.AdaScale(adamw)
ramp = mh.Ramp(muon, args.max_scale, model=model)


def schedule(step):
    """Return the factor of --lr at a small step: warm-up, then a cosine to a tenth."""
    warmup = args.steps / 50
    return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * min(step / args.steps, 1)))


schedules = [
    mh.ProgressScheduler(LambdaLR(each, schedule), muon, end=args.steps) for each in (muon, adamw)
]
cursor = mh.Cursor(train, args.micro_batch, keep="micro", drop_last=True, optimizer=muon)
run = {
    "model": model,
    "optimizer": [muon, adamw],
    "scheduler": schedules,
    "ramp": ramp,
    "cursor": cursor,
}
step = job.load(**run).get("step", 0)  # from any number of ranks and any level
show(
    f"{size:,} parameters on {job.world_size} ranks in {type(model).__name__}, from step {step}, "
    f"progress {muon.progress:.0f}"
)


@torch.no_grad()
def evaluate():
    """Return the loss of held-out windows. Call on every rank: the model may be sharded."""
    model.eval()
    losses = []
    for first in range(0, min(len(held_out), 8 * args.micro_batch), args.micro_batch):
        numbers = range(first, min(first + args.micro_batch, len(held_out)))
        x, y = torch.utils.data.default_collate([held_out[number] for number in numbers])
        with half:
            losses.append(model(x.to(device), y.to(device)).item())
    model.train()
    return sum(losses) / len(losses)


@torch.no_grad()
def write(prompt, length=200):
    """Return a continuation of the prompt, equal on every rank."""
    model.eval()
    said, draw = list(prompt.encode()), torch.Generator().manual_seed(0)
    for _ in range(length):
        logits = model(torch.tensor([said[-args.block :]], device=device))[0, -1].float().cpu()
        said.append(int(torch.multinomial((logits / 0.8).softmax(0), 1, generator=draw)))
    return bytes(said).decode(errors="replace")


# -- training --------------------------------------------------------------------------------------

if step == 0:
    show(f"held-out loss {evaluate():.3f}")
with mh.Record(args.record, muon, ramp, name=f"GPT, {size:,} parameters") as record:
    while not schedules[0].done:
        for micro_batches in ramp.over(cursor):
            adamw.set_num_gradients_to_accumulate(len(micro_batches))
            total = torch.zeros((), device=device)
            for x, y in micro_batches:
                with half:
                    loss = model(x.to(device), y.to(device)) / len(micro_batches)
                loss.backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, scheduler in zip((muon, adamw), schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            record.step(loss=total)
            step += 1
            if step % 25 == 0:
                show(
                    f"step {step}, progress {muon.progress:.0f}: loss {total.item():.3f}, "
                    f"{len(micro_batches)} x {job.world_size} x {args.micro_batch} windows"
                )
            done, stopping = schedules[0].done, mh.stopping(muon)  # equal on all ranks
            if stopping or done or step % args.save_every == 0:
                job.save(**run, step=step)
                ramp.skip_time()  # exclude saving from the step time
            if stopping:
                show(f"asked to stop: saved step {step}")
                job.leave()
            if done:
                break

show(f"held-out loss {evaluate():.3f} after {step} steps")
show(write("def main("))

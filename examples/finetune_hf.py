"""Fine-tune a causal language model of transformers, fully or with LoRA, on any number of ranks.

    torchrun --nproc-per-node 2 examples/finetune_hf.py           # small model, no downloads
    torchrun --nproc-per-node 8 examples/finetune_hf.py --model ~/SmolLM2-360M --data pairs.jsonl \\
        --lora 16 --level 3

--model is a folder from `hf download`; by default, a small byte-level Llama with random weights.
--data is a file with a JSON object {"prompt": ..., "response": ...} per line; by default, functions
of Python's standard library with `def` lines as prompts and docstrings as responses.

SIGTERM lets the script save and exit. A restart resumes with the next pair, on any number of ranks
and at any level. At the end, the script exports the model as a folder for `from_pretrained` (an
adapter for `PeftModel.from_pretrained`), loads this folder, and continues a held-out prompt.

Requires transformers, and peft for --lora. Uses GPUs if available.
"""

import argparse
import ast
import json
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    get_cosine_schedule_with_warmup,
)

import manyhands as mh

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="downloaded folder; default: a small Llama with random weights")
parser.add_argument("--data", type=Path, help="JSON lines with a prompt and a response")
parser.add_argument("--lora", type=int, default=0, help="rank of the adapters; 0 trains everything")
parser.add_argument("--level", type=int, default=2, choices=range(4), help="level of mh.shard")
parser.add_argument("--steps", type=int, default=300, help="total number of steps")
parser.add_argument("--batch-size", type=int, default=32, help="pairs per step, on all ranks")
parser.add_argument("--micro-batch", type=int, default=8, help="maximum pairs per pass")
parser.add_argument("--length", type=int, default=256, help="maximum tokens of a pair")
parser.add_argument(
    "--lr", type=float, help="default: 2e-5, or 1e-3 for adapters and without --model"
)
parser.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints")
parser.add_argument("--checkpoints", default="runs/finetune", help="folder of the checkpoints")
parser.add_argument("--export", default="runs/finetuned", help="folder for the finished model")
args = parser.parse_args()

job = mh.start(checkpoints=args.checkpoints)  # torchrun, Slurm, Ray, ... or a single process
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", job.local_rank)
    torch.cuda.set_device(device)


def show(text):
    """Print on the first rank."""
    if job.rank == 0:
        print(text, flush=True)


# -- model -----------------------------------------------------------------------------------------

dtype = torch.bfloat16 if args.lora else torch.float32  # frozen weights do not need float32
tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else ByT5Tokenizer()  # bytes


def load_base():
    """Return the initial model, equal in all processes."""
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=args.length + 64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


network = load_base()
if args.lora:
    import peft

    torch.manual_seed(1)
    lora = peft.LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear")
    network = peft.get_peft_model(network, lora)  # the adapters are float32
network.to(device)

# -- data ------------------------------------------------------------------------------------------


def standard_library():
    """Yield pairs from the functions of Python's standard library."""
    for path in sorted(Path(ast.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                prompt = f"def {node.name}({ast.unparse(node.args)}):\n"
                yield {"prompt": prompt, "response": text.split("\n\n")[0]}


def encode(pair):
    """Return the tokens of a pair, and labels for the tokens of the response."""
    prompt = tokenizer(pair["prompt"], add_special_tokens=False).input_ids
    response = tokenizer(pair["response"], add_special_tokens=False).input_ids
    response = [*response, tokenizer.eos_token_id]
    labels = [-100] * len(prompt) + response
    return torch.tensor((prompt + response)[: args.length]), torch.tensor(labels[: args.length])


def collate(pairs):
    """Return tokens, attention mask and labels of a micro-batch, padded on the right."""
    tokens, labels = zip(*map(encode, pairs), strict=True)
    mask = pad_sequence([torch.ones_like(each) for each in tokens], batch_first=True)
    return (
        pad_sequence(tokens, batch_first=True),  # masked positions may contain any token
        mask,
        pad_sequence(labels, batch_first=True, padding_value=-100),
    )


if args.data:
    pairs = [json.loads(line) for line in args.data.read_text(encoding="utf-8").splitlines()]
else:
    pairs = list(standard_library())
held_out, train = pairs[::50], [pair for number, pair in enumerate(pairs) if number % 50]


def loss_sum(batch):
    """Return the sum over the pairs of the mean loss of each pair's response."""
    tokens, mask, labels = (each.to(device) for each in batch)
    logits = model(input_ids=tokens, attention_mask=mask).logits[:, :-1].float()
    losses = cross_entropy(logits.mT, labels[:, 1:], reduction="none")  # 0 for the prompt
    return (losses.sum(dim=1) / (labels[:, 1:] != -100).sum(dim=1).clamp(min=1)).sum()


# -- optimizer, ranks, schedule --------------------------------------------------------------------

rate = args.lr or (1e-3 if args.lora or not args.model else 2e-5)
trained = [param for param in network.parameters() if param.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.01)
model, optimizer = mh.shard(network, optimizer, level=args.level)
scheduler = get_cosine_schedule_with_warmup(optimizer, args.steps // 20, args.steps)

# Ranks divide the batch, and use multiple passes for more than --micro-batch pairs. Steps therefore
# do not depend on the number of ranks.
cursor = mh.Cursor(
    train,
    args.batch_size,
    max_local_batch_size=args.micro_batch,
    optimizer=optimizer,
    collate_fn=collate,
)
run = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "cursor": cursor}
step = job.load(**run).get("step", 0)  # at any level, from any level
show(
    f"{sum(map(torch.numel, trained)):,} of {sum(map(torch.numel, network.parameters())):,} "
    f"parameters train on {job.world_size} ranks at level {args.level}, from step {step}"
)


def evaluate():
    """Return the loss of held-out pairs. Call on every rank, because level 3 shards the model."""
    model.eval()
    with torch.no_grad():
        parts = [held_out[i : i + args.micro_batch] for i in range(0, 64, args.micro_batch)]
        total = sum(loss_sum(collate(part)).item() for part in parts if part)
    model.train()
    return total / len(held_out[:64])


# -- training --------------------------------------------------------------------------------------

if step == 0:
    show(f"held-out loss {evaluate():.3f}")
model.train()
while step < args.steps:
    for batch in cursor:  # the rest of the epoch
        # The cursor converts sums to the mean over the pairs of the step on all ranks.
        loss = loss_sum(batch)
        cursor.mean(loss).backward()
        if not cursor.last_pass:
            continue
        clip_grad_norm_(model.parameters(), 1.0)  # correct at every level
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1
        if step % 10 == 0:
            show(f"step {step}: loss {loss.item() / max(cursor.samples, 1):.3f}")
        stopping = mh.stopping(optimizer)  # the same answer on all ranks
        if stopping or step % args.save_every == 0 or step == args.steps:
            # Omit frozen weights: a checkpoint of adapters needs only a few MB.
            job.save(**run, step=step, frozen=False)
        if stopping:
            show(f"asked to stop: saved step {step}")
            job.leave()
        if step == args.steps:
            break
show(f"held-out loss {evaluate():.3f}")

# -- export on every rank, because level 3 shards the model ----------------------------------------

if args.lora:
    adapted = model if args.level == 3 else model.module  # has PEFT's methods
    adapted.save_pretrained(args.export, is_main_process=job.rank == 0)
else:
    mh.save_weights(model, args.export)

if job.rank == 0:  # load the model without manyhands
    tokenizer.save_pretrained(args.export)
    if args.lora:
        finished = peft.PeftModel.from_pretrained(load_base(), args.export)
    else:
        finished = AutoModelForCausalLM.from_pretrained(args.export)
    text = held_out[0]["prompt"]
    prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    said = finished.generate(**prompt, max_new_tokens=64, do_sample=False)[0]
    print(f"{args.export} continues:\n{text}{tokenizer.decode(said[prompt.input_ids.shape[1] :])}")

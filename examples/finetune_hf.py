"""Fine-tune a causal language model of transformers, all of it or by LoRA, on any number of ranks.

    torchrun --nproc-per-node 2 examples/finetune_hf.py           # a toy, nothing is downloaded
    torchrun --nproc-per-node 8 examples/finetune_hf.py --model ~/SmolLM2-360M --data pairs.jsonl \\
        --lora 16 --level 3

--model is a folder as `hf download` makes it. Without it the model is a small Llama with random
weights over bytes. --data is a file with a JSON object {"prompt": ..., "response": ...} on each
line. Without it the pairs are the functions of Python's standard library: their `def` lines, and
what their docstrings say.

Stop it by SIGTERM, and start it again on another number of ranks and at another level: it goes on
with the next pair. At the end it exports the model as a folder for `from_pretrained` (an adapter
for `PeftModel.from_pretrained`), reads that, and continues a held-out prompt.

Needs transformers, and peft for --lora. Uses GPUs if there are any.
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
parser.add_argument("--model", help="a downloaded folder; by default a small Llama, random weights")
parser.add_argument("--data", type=Path, help="JSON lines with a prompt and a response")
parser.add_argument("--lora", type=int, default=0, help="rank of the adapters; 0 trains everything")
parser.add_argument("--level", type=int, default=2, choices=range(4), help="of mh.shard")
parser.add_argument("--steps", type=int, default=300, help="where to stop")
parser.add_argument("--batch-size", type=int, default=32, help="pairs in a step, of all ranks")
parser.add_argument("--micro-batch", type=int, default=8, help="pairs that fit into a pass")
parser.add_argument("--length", type=int, default=256, help="tokens of a pair at most")
parser.add_argument("--lr", type=float, help="by default 1e-3 for adapters and the toy, else 2e-5")
parser.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints")
parser.add_argument("--checkpoints", default="runs/finetune", help="to save to, and to go on from")
parser.add_argument("--export", default="runs/finetuned", help="folder for the finished model")
args = parser.parse_args()

job = mh.start(checkpoints=args.checkpoints)  # torchrun, Slurm, Ray, ... or one process alone
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", job.local_rank)
    torch.cuda.set_device(device)


def show(text):
    """Print on the first rank."""
    if job.rank == 0:
        print(text, flush=True)


# -- model: nothing here knows of ranks ------------------------------------------------------------

dtype = torch.bfloat16 if args.lora else torch.float32  # what is frozen needs no float32
tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else ByT5Tokenizer()  # bytes


def load_base():
    """Return the model that training begins with: in every process the same one."""
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
    """Yield prompts and responses from the functions of Python's standard library."""
    for path in sorted(Path(ast.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                prompt = f"def {node.name}({ast.unparse(node.args)}):\n"
                yield {"prompt": prompt, "response": text.split("\n\n")[0]}


def encode(pair):
    """Return a pair's tokens, and as labels those of the response."""
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
        pad_sequence(tokens, batch_first=True),  # what is masked may be any token
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

# The batch is that of all ranks together: with more ranks each has fewer pairs of it, and a rank
# with more than fit takes several passes. So the run does not change with the number of ranks.
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
    """Return the loss of the held-out pairs. Every rank does it: at level 3 none has the model."""
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
        # Sums, which the cursor turns into the mean over the step's pairs on all ranks.
        loss = loss_sum(batch)
        cursor.mean(loss).backward()
        if not cursor.last_pass:
            continue
        clip_grad_norm_(model.parameters(), 1.0)  # torch's own: right at every level
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1
        if step % 10 == 0:
            show(f"step {step}: loss {loss.item() / max(cursor.samples, 1):.3f}")
        stopping = mh.stopping(optimizer)  # SIGTERM on any rank: all learn it in the same step
        if stopping or step % args.save_every == 0 or step == args.steps:
            # Without what is frozen: a checkpoint of adapters has some MB, whatever the base.
            job.save(**run, step=step, frozen=False)
        if stopping:
            show(f"asked to stop: saved step {step}")
            job.leave()
        if step == args.steps:
            break
show(f"held-out loss {evaluate():.3f}")

# -- export: on every rank, as at level 3 each has a part of the model -----------------------------

if args.lora:
    adapted = model if args.level == 3 else model.module  # has PEFT's methods
    adapted.save_pretrained(args.export, is_main_process=job.rank == 0)
else:
    mh.save_weights(model, args.export)

if job.rank == 0:  # read it as anybody would, without manyhands
    tokenizer.save_pretrained(args.export)
    if args.lora:
        finished = peft.PeftModel.from_pretrained(load_base(), args.export)
    else:
        finished = AutoModelForCausalLM.from_pretrained(args.export)
    text = held_out[0]["prompt"]
    prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    said = finished.generate(**prompt, max_new_tokens=64, do_sample=False)[0]
    print(f"{args.export} continues:\n{text}{tokenizer.decode(said[prompt.input_ids.shape[1] :])}")

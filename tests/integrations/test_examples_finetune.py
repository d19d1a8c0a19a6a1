"""examples/finetune_hf.py, shortened: stopped on two ranks, and finished on another number."""

import json
import os
import re
import signal
import warnings
from pathlib import Path

import pytest
import torch

import manyhands as mh
from helpers.pages import ROOT, in_forks
from manyhands.tools.cli._consolidate import open_newest

peft = pytest.importorskip("peft", reason="peft is not installed: make test-integrations")

with warnings.catch_warnings():  # once, before ranks are forked
    warnings.simplefilter("ignore")
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

transformers.utils.logging.disable_progress_bar()

SCRIPT = str(ROOT / "examples" / "finetune_hf.py")
SHORT = ["--steps", "24", "--batch-size", "8", "--micro-batch", "3", "--length", "64"]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # PEFT asks for it
LAST = 9  # the step in which SIGTERM comes; AdamW's ranks agree on the next one


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the script in forks; with `stop` each rank gets SIGTERM in step `LAST`."""
    monkeypatch.chdir(tmp_path)
    ask = mh.stopping

    def run(ranks, *arguments, folder="run", stop=False):
        steps = iter(range(1, 1000))

        def stopping(optimizer):
            if stop and next(steps) == LAST:
                os.kill(os.getpid(), signal.SIGTERM)
            return ask(optimizer)

        monkeypatch.setattr(mh, "stopping", stopping)
        options = [*SHORT, *arguments, "--checkpoints", folder, "--export", f"{folder}-out"]
        code, said = in_forks(ranks, SCRIPT, *options)
        assert code == 0, said
        return said

    return run


def held_out(said):
    return [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", said)]


def test_the_whole_model_goes_on_at_another_level(run):
    """Over the standard library's docstrings; a run that nobody stopped ends with the same loss."""
    first = run(2, "--level", "3", stop=True)
    (step,) = map(int, re.findall(r"asked to stop: saved step (\d+)", first))
    assert LAST <= step < 24
    second = run(None, "--level", "1")
    assert f"on 1 ranks at level 1, from step {step}" in second
    whole = run(None, "--level", "0", folder="whole")
    (begin,), (end,) = held_out(first), held_out(second)
    assert held_out(whole) == pytest.approx([begin, end], abs=0.003)
    assert end < begin - 0.8

    model = AutoModelForCausalLM.from_pretrained("run-out")
    tokenizer = AutoTokenizer.from_pretrained("run-out")
    text = re.search(r"run-out continues:\n(def .*:\n)", second)[1]
    prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=64, do_sample=False)[0]
    assert text + tokenizer.decode(generated[prompt.input_ids.shape[1] :]) in second


def test_an_adapter_goes_on_at_another_level(run):
    """Over a downloaded model, and a file of pairs."""
    tokenizer = transformers.ByT5Tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_config(config)
    base.save_pretrained("hub")
    tokenizer.save_pretrained("hub")
    with open("pairs.jsonl", "w") as file:
        for number in range(100):
            pair = {"prompt": f"{number} + 1 = ", "response": str(number + 1)}
            file.write(json.dumps(pair) + "\n")
    given = ["--model", "hub", "--data", "pairs.jsonl", "--lora", "4", "--lr", "0.02"]

    first = run(2, *given, "--level", "2", stop=True)
    (step,) = map(int, re.findall(r"asked to stop: saved step (\d+)", first))
    second = run(3, *given, "--level", "3")
    assert f"on 3 ranks at level 3, from step {step}" in second
    assert held_out(second)[0] < held_out(first)[0] - 0.3
    assert "run-out continues:\n0 + 1 = " in second
    with open_newest(Path("run")) as reader:
        kept = [key for key in reader.tensors if key.startswith("model/")]
    assert kept and all("lora_" in key for key in kept)
    adapted = peft.PeftModel.from_pretrained(base, "run-out")
    assert any(name.endswith("lora_B.default.weight") for name, _ in adapted.named_parameters())

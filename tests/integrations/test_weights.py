"""Weights between transformers and a model of any sharding, with the real `from_pretrained`."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import manyhands as mh
from helpers.ranks import run_ranks

with warnings.catch_warnings():  # once, before ranks are forked
    warnings.simplefilter("ignore")
    import accelerate
    import transformers
    from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, LlamaConfig

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

LLAMA = LlamaConfig(
    vocab_size=33,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    tie_word_embeddings=False,
    use_cache=False,
)
GPT2 = GPT2Config(vocab_size=33, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False)
LEVELS = (0, 1, 2, 3, "fully_shard")

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


def net(config, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def shard(model, level):
    if level == "fully_shard":
        return fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return mh.shard(model, optimizer, level=level)[0]


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(torch.arange(12).view(2, 6)).logits


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("config", "dtype"),
    [(LLAMA, torch.bfloat16), (GPT2, torch.float32)],  # the second has tied embeddings
    ids=["Llama in bfloat16", "GPT-2"],
)
def test_weights_go_in_and_out_equal_to_the_bit(config, dtype, level, tmp_path):
    plain = net(config, seed=1, dtype=dtype)
    plain.save_pretrained(tmp_path / "hub", max_shard_size="8KB")
    expected = logits(plain)

    def both():
        model = shard(net(config, dtype=dtype), level)
        mh.load_weights(model, tmp_path / "hub")
        files = mh.save_weights(model, tmp_path / "out", max_shard_size="8KB")
        return len(files), logits(model)

    for files, found in run_ranks(2, both):
        assert files >= 2
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for kind in (AutoModelForCausalLM, AutoModel):
        read = kind.from_pretrained(tmp_path / "out")
        assert read.dtype == dtype
        theirs = kind.from_pretrained(tmp_path / "hub").state_dict()
        torch.testing.assert_close(read.state_dict(), theirs, rtol=0, atol=0)
    assert type(read).__name__ in ("LlamaModel", "GPT2Model")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(read.state_dict(), plain.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["Llama", "GPT-2"])
def test_a_model_without_memory_is_sharded_and_then_loaded(config, tmp_path):
    plain = net(config, seed=1)
    plain.save_pretrained(tmp_path / "hub")
    expected = logits(plain)

    def load():
        with accelerate.init_empty_weights():
            model = net(config)
        model.tie_weights()
        model = shard(model, 3)
        mh.load_weights(model, tmp_path / "hub")
        return logits(model)

    for found in run_ranks(2, load):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_consolidate_to_hf_is_read_by_from_pretrained(tmp_path):
    from typer.testing import CliRunner

    from manyhands.tools.cli import app

    def save():
        model = net(GPT2, seed=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = mh.shard(model, optimizer, level=3)
        mh.save(tmp_path / "run", model=model, optimizer=optimizer)
        dist.barrier()

    run_ranks(2, save)
    command = ("checkpoint", "consolidate", str(tmp_path / "run"), str(tmp_path / "out"))
    result = CliRunner().invoke(app(), [*command, "--to", "hf", "--max-shard-size", "8KB"])
    assert result.exit_code == 0, result.output
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(read.state_dict(), net(GPT2, seed=1).state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("level", LEVELS[:4])
def test_save_pretrained_writes_the_whole_model_at_every_level(level, tmp_path):
    def save():
        model = shard(net(GPT2, seed=1), level)
        plain = model if level == 3 else model.module
        for step in range(2):  # after training, too
            model(torch.arange(12).view(2, 6), labels=torch.arange(12).view(2, 6)).loss.backward()
            plain.save_pretrained(tmp_path / f"{step}")
            plain.save_pretrained(tmp_path / f"{step} given", state_dict=plain.state_dict())
            dist.barrier()

    run_ranks(2, save)
    expected = net(GPT2, seed=1).state_dict()
    for path in tmp_path.iterdir():
        read = AutoModelForCausalLM.from_pretrained(path)
        torch.testing.assert_close(read.state_dict(), expected, rtol=0, atol=0)


def test_save_pretrained_on_rank_0_alone_is_told_at_level_3(tmp_path, monkeypatch):
    monkeypatch.setattr("manyhands.sharding._agreement.PATIENCE", 0.5)

    def save():
        model = shard(net(GPT2), 3)
        if dist.get_rank() == 0:
            model.save_pretrained(tmp_path)

    with pytest.raises(AssertionError, match=r"\[1\] have not called state_dict\(\)"):
        run_ranks(2, save)


@pytest.mark.parametrize("level", LEVELS[:-1])
def test_every_rank_generates_as_the_plain_model_does(level):
    asked = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    prompt = torch.arange(1, 7)[None]
    expected = net(LLAMA, seed=1).generate(prompt, **asked)

    def generate():
        model = shard(net(LLAMA, seed=1), level)
        return (model if level == 3 else model.module).generate(prompt, **asked)

    for found in run_ranks(2, generate):
        assert torch.equal(found, expected)

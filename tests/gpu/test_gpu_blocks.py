"""Blocks and codecs on a GPU: the same numbers as on a CPU."""

import pytest
import torch
from torch.optim import SGD, AdamW

from helpers.gpu_ranks import BLOCKS, WAYS, train_in_blocks, trained_by_two
from manyhands.blocks.averaging._codec import CODECS, encode_with_residual

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("elements", [0, 1, 63, 64, 1000, 100_003])
def test_a_codec_sends_the_same_bytes_from_a_gpu(name, dtype, elements, device):
    generator = torch.Generator().manual_seed(elements)
    values = torch.randn(elements, generator=generator).to(dtype)
    codec = CODECS[name]
    here, there = codec.encode(values.clone()), codec.encode(values.clone().to(device)).cpu()
    if codec.rounds:  # a scale may differ in its last bit: what arrives is compared
        here, there = (codec.decode(data, elements, dtype).double() for data in (here, there))
        torch.testing.assert_close(there, here, rtol=1e-2, atol=1e-2)
        assert (here != there).double().mean().nan_to_num() < 0.01
    else:
        assert torch.equal(here, there)


@pytest.mark.parametrize("name", CODECS)
def test_what_a_codec_rounds_off_stays_in_the_residual(name, device):
    values = torch.randn(1000, device=device, dtype=torch.float64)
    residual = torch.zeros_like(values)
    _, arriving = encode_with_residual(CODECS[name], values.clone(), residual)
    torch.testing.assert_close(arriving + residual, values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("inner", [SGD, AdamW])
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_train_as_on_a_cpu(kind, inner, device, group):
    ours, theirs = (train_in_blocks(kind, inner, on) for on in (device, "cpu"))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-9, atol=1e-12)


# -- two ranks on one GPU, through gloo (NCCL refuses two ranks on a card) ------------------------


@pytest.fixture(scope="module")
def by_two(device, tmp_path_factory):
    """What each way has trained on two ranks: on the device, and on CPUs."""
    return [trained_by_two(on, tmp_path_factory.mktemp("two")) for on in (device, "cpu")]


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_on_one_gpu_train_as_two_on_a_cpu(way, by_two):
    for found in by_two:
        for rank in found:
            assert isinstance(rank[way], list), rank[way]
    (first, second), (expected, _) = ([rank[way] for rank in found] for found in by_two)
    for p, q, r in zip(first, second, expected, strict=True):
        assert torch.equal(p, q)
        torch.testing.assert_close(p, r, rtol=1e-7, atol=1e-10)


def test_sharded_ddp_over_gloo_on_a_gpu_says_what_to_do(cuda, tmp_path):
    """gloo has no reduce_scatter for GPUs."""
    for rank in trained_by_two(cuda, tmp_path, ["ShardedDataParallel"]):
        assert "cpu:gloo,cuda:nccl" in rank["ShardedDataParallel"]

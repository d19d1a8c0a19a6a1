"""Codecs: what arrives is what was sent, up to the rounding that is stated."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.blocks.averaging._codec import CODECS, Integers, Ternary, encode_with_residual

pytestmark = pytest.mark.quick

DTYPES = st.sampled_from([torch.float32, torch.float64])
SIZES = st.integers(0, 700)


def made(seed, elements, dtype, spread=6):
    """Values of very different sizes, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    exponents = spread * (torch.rand(elements, generator=generator, dtype=dtype) - 0.5)
    values = torch.randn(elements, generator=generator, dtype=dtype) * 10**exponents
    return values * (torch.rand(elements, generator=generator) > 0.1)


#: The largest rounding error, relative to the largest value of the tensor.
LARGEST_ERROR = {
    "float32": 0.0,
    "bfloat16": 2**-8,
    "int8": 0.008,
    "int4": 0.08,
    "ternary": 1.0,
}


@pytest.mark.parametrize("name", CODECS)
@given(seed=st.integers(0, 99), elements=SIZES, dtype=DTYPES)
def test_a_codec_has_the_size_it_says_and_rounds_as_little_as_it_says(name, seed, elements, dtype):
    values, codec = made(seed, elements, dtype), CODECS[name]
    data = codec.encode(values.clone())
    size = codec.size(elements, dtype)
    assert data.dtype == torch.uint8
    assert data.numel() == size
    back = codec.decode(data, elements, dtype)
    assert back.dtype == dtype and back.shape == values.shape
    assert codec.rounds == (LARGEST_ERROR[name] > 0)
    if elements:
        assert (back - values).abs().max() <= LARGEST_ERROR[name] * values.abs().max()


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_keeps_zeros_and_makes_nothing_of_the_smallest_numbers(name):
    codec = CODECS[name]
    assert codec.decode(codec.encode(torch.zeros(5)), 5, torch.float32).tolist() == [0.0] * 5
    tiny = torch.full((5,), 1e-44)
    assert torch.isfinite(codec.decode(codec.encode(tiny), 5, torch.float32)).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
@given(seed=st.integers(0, 99), elements=st.integers(1, 700), dtype=DTYPES)
def test_integers_are_at_most_half_a_step_of_their_group_away(name, seed, elements, dtype):
    values, codec = made(seed, elements, dtype), CODECS[name]
    back = codec.decode(codec.encode(values.clone()), elements, dtype)
    largest = torch.tensor([float(part.abs().max()) for part in values.split(codec.group)])
    step = (largest.to(dtype) / codec.largest).repeat_interleave(codec.group)[:elements]
    # the scale is rounded to 8 bits as well, which the largest value feels in full
    assert ((back - values).abs() <= step * (0.5 + codec.largest / 256) * 1.01).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_times_a_scale_arrive_exactly(bits):
    largest = 2 ** (bits - 1) - 1
    values = torch.arange(-largest, largest + 1).float() / 8
    codec = Integers(bits, group=2 * largest + 2)
    back = codec.decode(codec.encode(values), values.numel(), torch.float32)
    assert torch.equal(back, values)


def test_four_bits_are_packed_two_in_a_byte():
    codec = Integers(4, group=4)
    data = codec.encode(torch.tensor([7.0, -7.0, 1.0, 0.0]))
    assert data[:2].view(torch.bfloat16).tolist() == [1.0]
    assert data[2:].tolist() == [0x17, 0x09]  # 7 and 1; -7, which is 9 in four bits, and 0


@given(
    seed=st.integers(0, 99),
    elements=st.integers(1, 1500),
    dtype=DTYPES,
    scale=st.sampled_from([2.0**-60, 1.5, 2.0**60]),
)
def test_ternary_keeps_values_of_one_size_whatever_their_signs(seed, elements, dtype, scale):
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(-1, 2, (elements,), generator=generator)
    values, codec = signs.to(dtype) * scale, CODECS["ternary"]
    assert torch.equal(codec.decode(codec.encode(values.clone()), elements, dtype), values)


def test_ternary_drops_what_is_small_in_its_group_and_sends_the_mean_size_of_the_rest():
    codec = Ternary(group=5)
    values = torch.tensor([4.0, -2.0, 1.0, -1.0, 0.0, 0.0, 0.0, 0.0, -3.0, 0.0])  # means 1.6, 0.6
    data = codec.encode(values)
    assert data[:4].view(torch.bfloat16).tolist() == [3.0, 3.0]
    assert len(data) == codec.size(10, values.dtype) == 4 + 2
    back = codec.decode(data, 10, values.dtype)
    assert back.tolist() == [3.0, -3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -3.0, 0.0]


def test_ternary_loses_a_fifth_of_the_square_of_normal_values():
    generator = torch.Generator().manual_seed(0)
    values, codec = torch.randn(256_000, generator=generator), CODECS["ternary"]
    back = codec.decode(codec.encode(values.clone()), len(values), values.dtype)
    lost = (back - values).square().sum() / values.square().sum()
    assert 0.18 < lost < 0.20  # three values at their best places lose 0.190


def test_ternary_takes_the_largest_numbers():
    values = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max])
    back = CODECS["ternary"].decode(CODECS["ternary"].encode(values), 2, torch.float32)
    torch.testing.assert_close(back, values, rtol=0.01, atol=0)


def test_ternary_sends_3000_times_less_than_ddp_in_blocks_of_160_steps():
    elements = 10_000_000  # the way there and back: 2 (N - 1)/N of it on either side
    assert 4 * elements * 160 / CODECS["ternary"].size(elements, torch.float32) > 3000


@pytest.mark.parametrize(
    ("name", "bytes_each"),
    [("int8", 1.01), ("int4", 0.54), ("ternary", 0.208)],
)
def test_what_a_value_costs(name, bytes_each):
    assert CODECS[name].size(10_000_000, torch.float32) <= bytes_each * 10_000_000


@pytest.mark.parametrize("name", CODECS)
def test_what_rounding_leaves_goes_with_the_next(name):
    """The sum of what has arrived is never further from what was sent than one rounding."""
    generator = torch.Generator().manual_seed(0)
    differences = torch.randn(50, 300, generator=generator)
    residual, arrived, largest = torch.zeros(300), torch.zeros(300), 0.0
    for difference in differences:
        largest = max(largest, float((difference + residual).abs().max()))
        data, arriving = encode_with_residual(CODECS[name], difference.clone(), residual)
        assert torch.equal(CODECS[name].decode(data, 300, torch.float32), arriving)
        arrived += arriving
    left = differences.sum(dim=0) - arrived
    torch.testing.assert_close(left, residual, rtol=0, atol=1e-4)
    assert left.abs().max() <= LARGEST_ERROR[name] * largest + 1e-4

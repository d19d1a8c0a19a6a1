"""Buckets by themselves: what goes into them, what is sent when, and what comes out.

The process is rank 0 of two. Rank 1 is played: it sends zeros, so each mean is half of what rank 0
has in its slice.
"""

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from manyhands._ranks.ranks import RankGroup
from manyhands._ranks.sharded_gradient import ShardedGradient
from manyhands._ranks.slices import PendingReduceScatter
from manyhands.sharding.fsdp._collectives import ReduceQueue, ReduceScatter
from manyhands.sharding.zero._flat_params import FlatBucket, Shards, SharedMemoryGather
from manyhands.sharding.zero._layout import ALIGN, BucketLayout
from manyhands.sharding.zero._reducer import Reducer

pytestmark = pytest.mark.quick

SLICE = 2 * ALIGN  # elements of each rank's slice, if a bucket holds 4 * ALIGN


class Done:
    """A collective that is over at once, or does something when it is waited for."""

    def __init__(self, then=lambda: None):
        self.then = then

    def wait(self):
        self.then()


@dataclass(frozen=True)
class FirstOfTwo(RankGroup):
    """Rank 0 of two, without a process group. It remembers what it sent."""

    size: int = 2
    sent: list = field(default_factory=list)
    order: tuple = ()  # of the buckets, as rank 0 would broadcast it

    def reduce_scatter_slices(self, bucket, cuts, into=None):
        self.sent.append(bucket.clone())
        own = bucket[cuts[0] : cuts[1]]
        return PendingReduceScatter(own, [torch.zeros_like(own)], [], bucket)

    def all_gather_slices(self, bucket, cuts):
        self.sent.append(bucket.clone())
        return [Done()]

    def start_all_reduce(self, tensor, *, largest):
        return Done(lambda: tensor[:-2].fill_(1))  # rank 1 used every parameter

    def broadcast_from_first(self, tensors):
        if self.order:
            tensors[0].copy_(torch.tensor(self.order))


def buckets_of(*params, ranks=None, largest=0, wire=None, even=True):
    """Return the ranks, the shards and the reducer of some parameters."""
    ranks = ranks or FirstOfTwo()
    shards = Shards(ranks, even=even, largest=largest, wire=wire)
    shards.extend(params)
    shards.lay_out()
    return ranks, shards, Reducer([shards], ranks, lambda: None, None)


def parameter(elements, value=0.0, **options):
    return torch.nn.Parameter(torch.full((elements,), value, **options))


def test_a_missing_gradient_is_sent_as_zeros_and_not_as_what_the_buffer_held():
    a, b = parameter(10), parameter(10)
    ranks, _, _reducer = buckets_of(a, b, largest=4 * ALIGN)
    (3 * a + 5 * b).sum().backward()
    (3 * a).sum().backward()  # b is not used
    # The layout goes backwards: b, padding, a.
    values = [(bucket[0].item(), bucket[ALIGN].item()) for bucket in ranks.sent]
    assert values == [(5, 3), (0, 3)]


def test_a_bucket_that_is_a_view_of_a_gradient_is_not_kept_as_a_buffer():
    """Only memory that was taken for sending may be filled again."""
    whole, small = parameter(2 * SLICE), parameter(3)
    _, _, reducer = buckets_of(whole, small)
    (2 * whole).sum().backward()
    kept = reducer._kept
    assert kept is None or kept.numel() < whole.numel()


def test_buckets_are_sent_in_the_order_in_which_they_were_full_on_rank_0():
    a, b, c = parameter(1), parameter(2), parameter(3)
    ranks, _, _reducer = buckets_of(a, b, c, ranks=FirstOfTwo(order=(1, 2, 0)))
    for _ in range(2):
        (1 * a.sum() + 2 * b.sum() + 3 * c.sum()).backward()
    # The layout goes backwards: c, b, a. Rank 0 then says: second, third, first.
    assert [bucket[0].item() for bucket in ranks.sent] == [3, 2, 1, 2, 1, 3]


def test_a_gradient_is_the_mean_of_this_pass_plus_those_of_earlier_passes():
    param = parameter(4)
    _, _, _reducer = buckets_of(param)
    for _ in range(3):
        (2 * param).sum().backward()
    assert isinstance(param.grad, ShardedGradient)
    assert param.grad.slices[0].tolist() == [3.0] * 4  # rank 1 sent zeros: 2 / 2 in each pass


def test_the_slices_of_a_parameter_that_lies_in_two_buckets_have_their_own_gradients():
    param = parameter(8 * ALIGN)
    _, shards, _reducer = buckets_of(param, largest=4 * ALIGN)
    weights = torch.arange(8.0 * ALIGN)
    (weights * param).sum().backward()
    owned = shards.slices[0]
    assert len(owned) == 2
    for each in owned:
        torch.testing.assert_close(shards.gradient(each), weights[each.start : each.stop] / 2)


def test_half_precision_slices_are_summed_in_float32():
    own, *rows = (torch.tensor([value], dtype=torch.bfloat16) for value in (1, 256, 1))
    pending = PendingReduceScatter(own, rows, [], own)
    # In bfloat16, 256 + 1 is 256.
    assert pending.mean(1, torch.float32).tolist() == [258.0]


def test_a_gather_from_shared_memory_reads_after_the_barrier():
    """Before it, an owner may still be writing its slice."""
    data, other = torch.zeros(4), torch.zeros(4)
    bucket = FlatBucket(BucketLayout((), (0, 2, 4)), data, [data, other])
    SharedMemoryGather(bucket, 0, Done(lambda: other.fill_(7.0))).wait()
    assert data.tolist() == [0, 0, 7, 7]


def test_an_owner_trains_with_the_rounded_values_that_it_sends():
    param = parameter(4, 1.0)
    ranks, shards, _ = buckets_of(param, wire=torch.bfloat16)
    (owned,) = shards.slices[0]
    with torch.no_grad():
        owned.data.fill_(1.01)  # the exact copy; bfloat16 has 1.0078125 and 1.015625
    shards.start_all_gather(list(shards.buckets))
    shards.wait()
    assert (ranks.sent[0].dtype, ranks.sent[0][0].item()) == (torch.bfloat16, 1.0078125)
    assert param.tolist() == [1.0078125] * 4
    assert owned.data.tolist() == pytest.approx([1.01] * 4)


# -- the queue of FSDP -------------------------------------------------------------------------


def queue():
    ranks = FirstOfTwo()
    return ReduceQueue(ranks, lambda: None, lambda: None)


def test_fsdp_reuses_the_memory_of_gradients_only_after_their_mean_has_arrived():
    reduce, total = queue(), torch.zeros(4)
    grads = reduce.memory(8, torch.float32, torch.device("cpu")).fill_(6.0)
    reduce.send(total, grads, 2.0, wait=False)
    assert reduce.memory(8, torch.float32, torch.device("cpu")).data_ptr() == grads.data_ptr()
    assert total.tolist() == [3.0] * 4
    assert reduce._in_flight == deque()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fsdp_puts_the_mean_into_the_engines_tensor_and_frees_the_gradients(dtype):
    reduce, total = queue(), torch.zeros(4)
    grads = torch.full((8,), 6.0, dtype=dtype)
    reduce.send(total, grads, 2.0, wait=True)
    assert total.tolist() == [3.0] * 4
    assert grads.untyped_storage().nbytes() == 0


def reduce_scatter(params=(), divide=(1.0, 2.0), op=torch.distributed.ReduceOp.AVG):
    """Call the engine's collective with gradients of 6; return the mean, and the queue."""
    reduce, total = queue(), torch.zeros(4)
    reduce.enter = lambda: None  # there is no backward pass here
    wrap = SimpleNamespace(params=params, divide=divide, on_gloo=True, overlap=True)
    collective = ReduceScatter(reduce, wrap)
    collective(total, torch.full((8,), 6.0), group=None, op=op)
    return total, reduce


def test_fsdp_waits_for_a_mean_that_the_engine_would_add_to_an_existing_gradient():
    fresh, used = parameter(4), parameter(4)
    used.grad = torch.zeros(4)
    total, reduce = reduce_scatter([fresh])
    assert (total.tolist(), len(reduce._in_flight)) == ([0.0] * 4, 1)
    total, reduce = reduce_scatter([used])
    assert (total.tolist(), len(reduce._in_flight)) == ([3.0] * 4, 0)


def test_fsdp_divides_by_the_users_divisors_and_leaves_the_world_size_to_the_engine():
    total, _ = reduce_scatter(divide=(2.0, 3.0), op=torch.distributed.ReduceOp.SUM)
    assert (total / 2).tolist() == [1.0] * 4  # 6 / 2 / 3; the engine divides by 2 ranks
    total, reduce = reduce_scatter(divide=(2.0, 3.0))
    assert reduce.memory(8, torch.float32, torch.device("cpu")).numel() == 8
    assert total.tolist() == [1.0] * 4

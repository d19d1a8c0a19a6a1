"""How large a batch is, in small batches: what counts, and what a saved run brings along."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands._optimizers.state_parts import SavedEntries
from manyhands.scaling._batch import Batch
from manyhands.scaling._port import CountingLoop

pytestmark = pytest.mark.quick

counts = st.integers(1, 64)


@given(workers=counts, passes=counts)
def test_the_scale_is_workers_times_passes_unless_it_is_set(workers, passes):
    batch = Batch(workers, passes)
    assert batch.scale_for(passes) == workers * passes
    batch.set_scale(per_pass=2.5)
    assert batch.scale_for(passes) == 2.5 * passes
    batch.set_scale(scale=7.0)
    assert batch.scale_for(passes) == 7.0


@given(workers=counts, passes=counts)
def test_the_default_smoothing_is_fairscales_or_where_passes_are_counted_adaptdls(workers, passes):
    assert Batch(workers, passes).smoothing_for(1.0) == max(1 - workers * passes / 1000, 0)
    counted = Batch(
        workers, passes, loop=CountingLoop(SimpleNamespace(require_backward_grad_sync=1))
    )
    assert counted.smoothing_for(float(workers)) == pytest.approx(0.999**workers)


def test_small_batches_of_a_full_step_do_not_depend_on_the_present_workers():
    full = Batch(4, 3)
    fewer = Batch(4, 6, pass_share=0.5)  # two of four workers take twice as many passes
    assert fewer.scale_for(6) == full.scale_for(3)
    assert fewer.scale_for(3) == full.scale_for(3) / 2
    assert fewer.smoothing_for(12.0) == full.smoothing_for(12.0)
    assert fewer.gradients == full.gradients == 12
    assert fewer.to_state() == full.to_state()
    full.set_scale(scale=7.0)
    assert fewer.parse_state(SavedEntries(full.to_state(), "batch")).scale == 7.0
    fewer.set_scale(per_pass=2.5)
    assert fewer.scale_for(6) == 7.5


def test_a_smoothing_that_was_set_is_kept_until_none_is_set():
    batch = Batch()
    batch.set_smoothing(0.5)
    assert batch.smoothing_for(64.0) == 0.5
    batch.set_smoothing(None)
    assert batch.smoothing_for(64.0) == 0.999 and not batch.smoothing_is_explicit


@given(before=counts, now=counts, passes=counts)
def test_a_saved_scale_keeps_its_proportion_on_another_number_of_workers(before, now, passes):
    batch = Batch(before, passes)
    batch.set_scale(scale=3.0 * before * passes)
    loaded = Batch(now, passes).parse_state(SavedEntries(batch.to_state(), "it"))
    assert loaded.scale_for(passes) == pytest.approx(3.0 * now * passes)


def test_what_is_set_in_this_run_wins():
    saved = Batch(2, 2)
    saved.set_scale(scale=16.0)
    saved.set_smoothing(0.9)
    ours = Batch(2, 2)
    ours.set_scale(scale=8.0)
    ours.set_smoothing(0.5)
    loaded = ours.parse_state(SavedEntries(saved.to_state(), "it"))
    assert (loaded.scale_for(2), loaded.smoothing_for(8.0)) == (8.0, 0.5)

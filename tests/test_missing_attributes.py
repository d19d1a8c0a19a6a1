"""What a wrapper of ours lacks is missing in its own name, and not in that of what it wraps."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

import manyhands as mh
from manyhands import adaptdl

pytestmark = pytest.mark.quick


def model():
    return nn.Linear(2, 1)


def sgd():
    return SGD(model().parameters(), lr=0.1)


def sharded_model():
    module = model()
    return mh.ShardedDataParallel(module, mh.OSS(module.parameters(), lr=0.1))


def adaptive_model():
    module = model()
    return adaptdl.AdaptiveDataParallel(
        module, SGD(module.parameters(), lr=0.1), scaling_rule=mh.AdaScale()
    )


WRAPPERS = {
    "OSS": (lambda: mh.OSS(model().parameters(), lr=0.1), None),
    "AdaScale": (lambda: mh.AdaScale(sgd()), "SGD"),
    "LinearScale": (lambda: mh.LinearScale(mh.OSS(model().parameters(), lr=0.1)), "OSS"),
    "DiLoCo": (lambda: mh.DiLoCo(sgd()), "SGD"),
    "BMUF": (lambda: mh.BMUF(sgd()), "SGD"),
    "ShardedDataParallel": (sharded_model, "Linear"),
    "FullyShardedDataParallel": (lambda: mh.FSDP(model()), "Linear"),
    "AdaptiveDataParallel": (adaptive_model, None),
    "ShardedGradScaler": (mh.ShardedGradScaler, None),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_missing_attribute_is_the_wrappers(name):
    make, inner = WRAPPERS[name]
    wrapper = make()
    with pytest.raises(AttributeError) as caught:
        _ = wrapper.buckets_of_gold
    expected = f"'{name}' object has no attribute 'buckets_of_gold'"
    assert str(caught.value).startswith(expected)
    if inner is not None:
        assert f"neither has the {inner}" in str(caught.value)
        assert caught.value.__cause__ is not None
    assert not hasattr(wrapper, "buckets_of_gold")
    assert getattr(wrapper, "buckets_of_gold", 3) == 3


def test_what_the_wrapped_object_has_is_found():
    assert sharded_model().in_features == 2
    assert mh.FSDP(model()).in_features == 2
    assert mh.AdaScale(mh.OSS(model().parameters(), lr=0.1)).world_size == 1


def test_an_error_inside_the_wrapped_objects_property_stays_to_be_seen():
    class Layer(nn.Linear):
        @property
        def broken(self):
            return torch.no_such_thing

    module = Layer(2, 1)
    with pytest.raises(AttributeError, match="'ShardedDataParallel' object has no") as caught:
        _ = mh.ShardedDataParallel(module, mh.OSS(module.parameters(), lr=0.1)).broken
    assert caught.value.__cause__ is not None

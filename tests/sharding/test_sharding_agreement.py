"""What ranks must be given alike is compared when it is made, before anything else is sent."""

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

import manyhands as mh
from helpers.ranks import on_ranks, run_ranks
from helpers.sharding_oracle import Lamb
from manyhands._ranks.agreement import Describer


def messages_of(*builds, world_size=2):
    """By build, the one error that all ranks got; a rank without an error is a failure."""

    def run():
        found = []
        for build in builds:
            try:
                build(dist.get_rank())
                found.append("no error")
            except ValueError as error:
                found.append(str(error))
        return found

    each = run_ranks(world_size, run, timeout=20)
    assert all(rank == each[0] for rank in each)
    return dict(zip((build.__name__ for build in builds), each[0], strict=True))


def parameters(*tensors):
    return [nn.Parameter(tensor) for tensor in tensors]


# -- parameters ----------------------------------------------------------------------------------


def of_another_type(rank):
    kinds = (torch.float32, torch.float64)[rank]
    mh.OSS(parameters(torch.zeros(2), torch.zeros(3, dtype=kinds)), lr=0.1)


def of_another_shape(rank):
    mh.OSS(parameters(torch.zeros(2), torch.zeros((2, 3) if rank else (3, 2))), lr=0.1)


def in_another_order(rank):
    pair = parameters(torch.zeros(2), torch.zeros(3))
    mh.OSS(pair[::-1] if rank else pair, lr=0.1)


def on_another_device(rank):
    mh.OSS(parameters(torch.zeros(2), torch.zeros(3, device="meta" if rank else "cpu")), lr=0.1)


def in_another_order_of_memory(rank):
    image = torch.zeros(2, 3, 2, 2)
    if rank:
        image = image.to(memory_format=torch.channels_last)
    mh.OSS(parameters(torch.zeros(2), image), lr=0.1)


def of_another_layout(rank):
    table = torch.eye(3)
    mh.OSS(parameters(torch.zeros(2), table.to_sparse() if rank else table), lr=0.1)


def under_other_names(rank):
    first, second = parameters(torch.zeros(2), torch.zeros(2))
    named = [("first", first), ("second", second)]
    mh.OSS(named[::-1] if rank else named, lr=0.1)


def none_on_one_rank(rank):
    mh.OSS([{"params": [] if rank else parameters(torch.zeros(2))}], lr=0.1)


def frozen_on_one(rank):
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(rank == 0)
    mh.OSS(module.parameters(), lr=0.1)


def in_other_groups(rank):
    first, second = parameters(torch.zeros(2), torch.zeros(2))
    groups = [{"params": [first]}, {"params": [second]}]
    mh.OSS([{"params": [first, second]}] if rank else groups, lr=0.1)


def under_adascale(rank):
    mh.AdaScale(mh.OSS(parameters(torch.zeros(2 + rank)), lr=0.1))


PARAMETERS = {
    of_another_type: "number 1: rank 0: (3) float32 on cpu; rank 1: (3) float64 on cpu",
    of_another_shape: "number 1: rank 0: (3, 2) float32 on cpu; rank 1: (2, 3) float32 on cpu",
    in_another_order: "number 0: rank 0: (2) float32 on cpu; rank 1: (3) float32 on cpu",
    on_another_device: "number 1: rank 0: (3) float32 on cpu; rank 1: (3) float32 on meta",
    in_another_order_of_memory: (
        "number 1: rank 0: (2, 3, 2, 2) float32 on cpu; "
        "rank 1: (2, 3, 2, 2) float32 on cpu with strides (12, 1, 6, 3)"
    ),
    of_another_layout: (
        "number 1: rank 0: (3, 3) float32 on cpu; rank 1: (3, 3) float32 on cpu as sparse_coo"
    ),
    under_other_names: (
        "number 0: rank 0: first (2) float32 on cpu; rank 1: second (2) float32 on cpu"
    ),
    none_on_one_rank: "numbers of parameters in group 0: rank 0: 1; rank 1: 0",
    frozen_on_one: "number 1: rank 0: (2) float32 on cpu; rank 1: (2) float32 on cpu frozen",
    in_other_groups: "group",
    under_adascale: "number 0: rank 0: (2) float32 on cpu; rank 1: (3) float32 on cpu",
}


def test_the_first_parameter_that_differs_is_named():
    messages = messages_of(*PARAMETERS)
    for build, expected in PARAMETERS.items():
        assert expected in messages[build.__name__].replace(",)", ")"), build.__name__


def test_ranks_that_agree_are_named_together():
    def build(rank):
        mh.OSS(parameters(torch.zeros(3 if rank == 2 else 2)), lr=0.1)

    (message,) = messages_of(build, world_size=4).values()
    assert "ranks 0, 1, 3: (2,) float32 on cpu; rank 2: (3,) float32 on cpu. " in message


def test_devices_are_told_apart_but_not_by_their_index():
    """(Each rank has a GPU of its own: cuda:0, cuda:1. Two of one rank are two.)"""
    one, two = Describer(), Describer()
    on = [torch.empty(1, device="meta"), torch.empty(1)]
    assert one.describe(on[0]) == two.describe(on[0]) == "(1,) float32 on meta"
    assert two.describe(on[1]) == "(1,) float32 on cpu"

    class Fake:
        layout, shape, dtype = torch.strided, (1,), torch.float32

        def __init__(self, index):
            self.device = torch.device("cuda", index)

        def is_contiguous(self):
            return True

    describer = Describer()
    assert [describer.describe(Fake(index)) for index in (3, 1, 3)] == [
        "(1,) float32 on cuda",
        "(1,) float32 on cuda, device 2",
        "(1,) float32 on cuda",
    ]


@on_ranks(2, timeout=20)
def test_an_optimizer_without_parameters_is_saved_and_loaded():
    optimizer = mh.OSS([{"params": []}], lr=0.1)
    optimizer.step()
    state = optimizer.state_dict(all_ranks=True)
    optimizer.load_state_dict(state)
    assert state["state"] == {}


# -- the module ----------------------------------------------------------------------------------


class Twins(nn.Module):
    """Two layers of one shape, in either order, and perhaps a buffer."""

    def __init__(self, names, buffer=None):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(2, 2, bias=False))
        if buffer is not None:
            self.register_buffer("seen", buffer)


def wrapped(module, **options):
    return mh.ShardedDataParallel(module, mh.OSS(module.parameters(), lr=0.1), **options)


def layers_of_one_shape_in_another_order(rank):
    wrapped(Twins("ba" if rank else "ab"))


def an_optimizer_of_layers_in_another_order(rank):
    module = Twins("ab")
    params = list(module.parameters())
    mh.ShardedDataParallel(module, mh.OSS(params[::-1] if rank else params, lr=0.1))


def optimizers_in_another_order(rank):
    module = Twins("ab")
    each = [mh.OSS(child.parameters(), lr=0.1) for child in module.children()]
    mh.ShardedDataParallel(module, each[::-1] if rank else each)


def other_buffers(rank):
    wrapped(Twins("ab", torch.zeros(2 + rank)))


def a_frozen_layer_that_no_optimizer_has(rank):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + rank).requires_grad_(False))
    mh.ShardedDataParallel(module, mh.OSS(module[0].parameters(), lr=0.1))


def one_takes_rank_0s_values(rank):
    wrapped(Twins("ab"), sync_models_at_startup=rank == 0)


def one_broadcasts_buffers(rank):
    wrapped(Twins("ab"), broadcast_buffers=rank == 0)


MODULES = {
    layers_of_one_shape_in_another_order: (
        "in the module. The first that differs is number 0: rank 0: a.weight (2, 2) float32 on "
        "cpu; rank 1: b.weight (2, 2)"
    ),
    an_optimizer_of_layers_in_another_order: (
        "parameters in group 0 of optimizer 0. The first that differs is number 0: rank 0: a.weight"
    ),
    optimizers_in_another_order: "of optimizer 0. The first that differs is number 0: rank 0: a.w",
    other_buffers: "buffers in the module. The first that differs is number 0: rank 0: seen (2,)",
    a_frozen_layer_that_no_optimizer_has: (
        "in the module. The first that differs is number 2: rank 0: 1.weight (3, 2) float32 on cpu "
        "frozen"
    ),
    one_takes_rank_0s_values: "values of sync_models_at_startup: rank 0: True; rank 1: False",
    one_broadcasts_buffers: "values of broadcast_buffers: rank 0: True; rank 1: False",
}


def test_what_differs_in_a_module_is_named():
    messages = messages_of(*MODULES)
    for build, expected in MODULES.items():
        assert expected in messages[build.__name__], build.__name__


def test_buffers_that_are_never_sent_may_differ():
    def build():
        module = Twins("ab", torch.zeros(2 + dist.get_rank()))
        wrapped(module, sync_models_at_startup=False, broadcast_buffers=False)
        return len(module.seen)

    assert run_ranks(2, build, timeout=20) == [2, 3]


# -- options -------------------------------------------------------------------------------------


def another_rate(rank):
    mh.OSS(parameters(torch.zeros(2)), lr=0.1 + rank)


def another_rate_in_a_tensor(rank):
    mh.OSS(parameters(torch.zeros(2)), lr=torch.tensor(0.25 + rank))


def other_betas(rank):
    mh.OSS(parameters(torch.zeros(2)), AdamW, betas=(0.5, 0.75 + rank / 8))


def a_rate_of_a_group(rank):
    first, second = parameters(torch.zeros(2), torch.zeros(2))
    mh.OSS([{"params": [first]}, {"params": [second], "lr": 0.5 + rank}], lr=0.1)


def a_rate_of_a_group_that_is_added(rank):
    optimizer = mh.OSS(parameters(torch.zeros(2)), lr=0.1)
    optimizer.add_param_group({"params": parameters(torch.zeros(2)), "lr": 0.5 + rank})


def maximize_on_one(rank):
    mh.OSS(parameters(torch.zeros(2)), lr=0.1, maximize=rank == 1)


OPTIONS = {
    another_rate: "values of lr in group 0: rank 0: 0.1; rank 1: 1.1",
    another_rate_in_a_tensor: "values of lr in group 0: rank 0: 0.25; rank 1: 1.25",
    other_betas: (
        "betas in group 0. The first that differs is number 1: rank 0: 0.75; rank 1: 0.875"
    ),
    a_rate_of_a_group: "values of lr in group 1: rank 0: 0.5; rank 1: 1.5",
    a_rate_of_a_group_that_is_added: "values of lr in group 1: rank 0: 0.5; rank 1: 1.5",
    maximize_on_one: "values of maximize in group 0: rank 0: False; rank 1: True",
}


def test_an_option_that_changes_the_numbers_is_named():
    messages = messages_of(*OPTIONS)
    for build, expected in OPTIONS.items():
        assert expected in messages[build.__name__], build.__name__


class Pausing(SGD):
    """As fairscale's tests have one: it is told its rank, and sleeps accordingly."""

    def __init__(self, params, rank, log, **options):
        super().__init__(params, **options)
        self.told = rank, log


def test_options_that_do_not_change_the_numbers_may_differ():
    def run():
        rank = dist.get_rank()
        group = {"params": parameters(torch.ones(4)), "name": f"of rank {rank}", "at": rank}
        options = {"rank": rank, "log": print if rank else list, "foreach": rank == 0}
        optimizer = mh.OSS([group], Pausing, lr=0.5, **options)
        group["params"][0].grad = torch.ones(4)
        optimizer.step()
        told, log = optimizer.optim.told
        assert log is options["log"]
        state = optimizer.state_dict(all_ranks=True)["param_groups"][0]
        assert "rank" not in state  # as in the plain optimizer's: it is not an option of groups
        return told, state["name"], group["params"][0].tolist()

    each = run_ranks(2, run, timeout=20)
    assert each == [(rank, f"of rank {rank}", [0.5] * 4) for rank in range(2)]


def test_an_option_that_one_rank_alone_has_is_absent_on_the_others():
    def build(rank):
        optimizer = mh.OSS(parameters(torch.zeros(2)), Lamb)
        optimizer.defaults["more"] = 2.0 if rank else print
        optimizer.add_param_group({"params": parameters(torch.zeros(2))})

    (message,) = messages_of(build).values()
    assert "values of more in group 1: rank 0: absent; rank 1: 2" in message

"""The gradients of single examples: exact for every layer, and unbiased as an estimate of noise."""

import copy

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from manyhands.scaling import _example_squares
from manyhands.scaling._example_squares import Examples, linear_squares
from manyhands.scaling._examples import ExampleNorms

BATCH = 5


class Attention(nn.Module):
    """One head, and all other layers of a transformer block."""

    def __init__(self, width=8, vocabulary=11, positions=6):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=3)
        self.places = nn.Embedding(positions, width)
        self.before = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.after = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.head = nn.Linear(width, vocabulary)

    def block(self, x):
        query, key, value = self.query_key_value(self.before(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.down(F.gelu(self.up(self.after(x))))

    def embed(self, ids):
        return self.tokens(ids) + self.places(torch.arange(ids.shape[1]))

    def forward(self, ids):
        return self.head(self.block(self.embed(ids)))


def mlp():
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 4, bias=False))


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.GroupNorm(2, 8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, groups=4, padding="same", dilation=2, padding_mode="reflect"),
        nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4),
    )  # fmt: skip


def cnn_1d():
    return nn.Sequential(nn.Conv1d(3, 6, 4, stride=2), nn.ReLU(), nn.Conv1d(6, 4, 2, bias=False))


def inputs_of(model, batch=BATCH):
    if isinstance(model, Attention):
        return torch.randint(11, (batch, 6))
    if isinstance(model[0], nn.Conv2d):
        return torch.randn(batch, 3, 8, 8)
    if isinstance(model[0], nn.Conv1d):
        return torch.randn(batch, 3, 12)
    return torch.randn(batch, 6)


def loss_of(output):
    """A mean over examples of something that is not linear in the output."""
    return (output.flatten(1) + 0.3).sin().square().cumsum(dim=1).sum(dim=1).mean()


def squares_one_by_one(model, inputs):
    """The oracle: a backward pass for each example."""
    total = torch.zeros(len(list(model.parameters())), dtype=torch.float64)
    for i in range(len(inputs)):
        grads = torch.autograd.grad(loss_of(model(inputs[i : i + 1])), list(model.parameters()))
        total += torch.stack([grad.double().square().sum() for grad in grads])
    return total / len(inputs)


def take(norms, model):
    grads = [p.grad for p in model.parameters()]
    return norms.take({i: float(grad.norm()) for i, grad in enumerate(grads) if grad is not None})


def check(model, inputs, left_out=(), forward=None, **options):
    """Compare every covered parameter with the oracle."""
    params = list(model.parameters())
    expected = squares_one_by_one(model, inputs)
    norms = ExampleNorms(model, params, Examples(**options))
    loss_of((forward or model)(inputs)).backward()
    measured = take(norms, model)
    assert measured.examples == len(inputs)
    assert sorted(norms.left_out) == sorted(left_out)
    assert set(measured.mean_squares) == norms.covered
    for index, value in measured.mean_squares.items():
        assert value == pytest.approx(float(expected[index]), rel=1e-4), index
    return norms


@pytest.mark.parametrize("make", [mlp, cnn, cnn_1d])
def test_every_layer_is_exact(make):
    torch.manual_seed(0)
    model = make()
    norms = check(model, inputs_of(model))
    assert norms.coverage.share == 1.0


@pytest.mark.parametrize("batch", [BATCH, 6])  # 6: as many as positions
def test_a_transformer_is_exact_but_for_positions(batch):
    torch.manual_seed(0)
    model = Attention()
    norms = check(model, inputs_of(model, batch), ["places"])
    assert "looks up positions" in norms.left_out["places"]


@pytest.mark.parametrize("positions", [1, 2, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_by_products_of_positions_and_by_gradients(positions, dtype):
    """Both ways give the squares, also if a chunk has one example only."""
    torch.manual_seed(0)
    x, delta = torch.randn(3, positions, 7).to(dtype), torch.randn(3, positions, 9).to(dtype)
    expected = torch.einsum("bti,bto->bio", x.double(), delta.double()).square().sum(dim=(1, 2))
    torch.testing.assert_close(linear_squares(x, delta).double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("make", [mlp, cnn, Attention])
def test_large_layers_are_measured_a_few_examples_at_a_time(make, monkeypatch):
    monkeypatch.setattr(_example_squares, "CHUNK", 200)
    torch.manual_seed(0)
    model = make()
    check(model, inputs_of(model), ["places"] if make is Attention else [])


@pytest.mark.parametrize(
    ("layers", "measured"),
    [
        ("norm", ["before", "after"]),
        ("linear", ["query_key_value", "up", "down", "head"]),
        (("norm", "embedding"), ["tokens", "before", "after"]),
    ],
)
def test_layers_can_be_chosen(layers, measured):
    torch.manual_seed(0)
    model = Attention()
    left_out = {name for name, _ in model.named_children()} - set(measured)
    norms = check(model, inputs_of(model), left_out, layers=layers)
    assert norms.layers == measured


class TimeFirst(nn.Module):
    """Inputs are (time, examples, features), and what is pooled is (examples, features)."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x):
        return self.down(self.norm(self.up(x)).mean(dim=0))


def test_the_examples_may_be_the_second_dimension():
    torch.manual_seed(0)
    model, x = TimeFirst(), torch.randn(7, BATCH, 6)
    params = list(model.parameters())
    norms = ExampleNorms(model, params, Examples(batch_dim=1))
    grads = [torch.autograd.grad(loss_of(model(x[:, i : i + 1])), params) for i in range(BATCH)]
    norms.forget()
    loss_of(model(x)).backward()
    for index, value in take(norms, model).mean_squares.items():
        expected = sum(float(grad[index].square().sum()) for grad in grads) / BATCH
        assert value == pytest.approx(expected, rel=1e-4)
    assert norms.left_out == {}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_is_measured_once(reentrant):
    torch.manual_seed(0)
    model = Attention()

    def forward(ids):
        return model.head(checkpoint(model.block, model.embed(ids), use_reentrant=reentrant))

    check(model, inputs_of(model), ["places"], forward=forward)


def test_a_checkpointed_block_is_not_kept():
    """The inputs of its layers go when forward is over, as without us."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    norms = ExampleNorms(model, list(model.parameters()))
    inputs = []

    def note(_, args):
        inputs.append(StorageWeakRef(args[0].untyped_storage()))

    model[1].register_forward_pre_hook(note)
    loss = loss_of(checkpoint(model, torch.randn(3, 4), use_reentrant=False))
    assert inputs[0].expired()
    loss.backward()
    assert take(norms, model).examples == 3


def test_autocast_measures_what_it_computes():
    torch.manual_seed(0)
    model = Attention()
    ids = inputs_of(model)
    params = list(model.parameters())
    exact = squares_one_by_one(model, ids)
    norms = ExampleNorms(model, params)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(ids).float())
    loss.backward()
    for index, value in take(norms, model).mean_squares.items():
        assert value == pytest.approx(float(exact[index]), rel=0.05)


def test_a_graph_may_be_retained_and_a_gradient_asked_for():
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(BATCH, 6, requires_grad=True)
    expected = squares_one_by_one(model, x.detach())
    norms = ExampleNorms(model, list(model.parameters()))
    loss = loss_of(model(x))
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    for index, value in take(norms, model).mean_squares.items():
        assert value == pytest.approx(float(expected[index]), rel=1e-4)


def test_frozen_parameters_are_not_measured():
    torch.manual_seed(0)
    model = mlp()
    model[0].weight.requires_grad_(False)
    norms = ExampleNorms(model, list(model.parameters()))
    loss_of(model(inputs_of(model))).backward()
    assert set(take(norms, model).mean_squares) == {1, 2, 3, 4}


class BiasesAlone(nn.Module):
    """Trains its biases, and changes inputs that autograd need not keep."""

    def __init__(self):
        super().__init__()
        self.image, self.group = nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(1, 2)
        self.rows, self.norm = nn.Linear(5, 5), nn.LayerNorm(5)
        for name, param in self.named_parameters():
            param.requires_grad_(name.endswith("bias"))

    def forward(self, x):
        for layer in (self.image, self.group, self.rows, self.norm):
            x = x * 1.0
            shift = layer(x).sin()
            # the other layers need their input for its own gradient
            x = x.add_(shift) if layer is self.rows else x + shift
        return x


def test_an_input_that_only_a_frozen_weight_would_need_may_be_changed_in_place():
    torch.manual_seed(0)
    model, inputs = BiasesAlone(), torch.randn(BATCH, 2, 3, 5)
    biases = [param for param in model.parameters() if param.requires_grad]
    norms = ExampleNorms(model, biases)
    loss_of(model(inputs)).backward()
    measured = norms.take({i: float(bias.grad.norm()) for i, bias in enumerate(biases)})
    for index, bias in enumerate(biases):
        rows = [torch.autograd.grad(loss_of(model(x[None])), bias)[0] for x in inputs]
        expected = sum(float(row.square().sum()) for row in rows) / BATCH
        assert measured.mean_squares[index] == pytest.approx(expected, rel=1e-4)


class Odd(nn.Module):
    """Has layers that cannot be measured."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)
        self.tied, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.other.weight = self.tied.weight
        self.by_hand = nn.Linear(4, 4)
        self.mixing = nn.BatchNorm1d(4)
        self.flattened = nn.Linear(2, 2)
        self.free = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = self.twice(self.twice(self.first(x)))
        x = self.mixing(self.other(self.tied(x))) * self.free
        x = F.linear(x, self.by_hand.weight, self.by_hand.bias)
        return self.flattened(x.reshape(-1, 2)).reshape(-1, 4)


def test_layers_that_cannot_be_measured_are_left_out_with_a_reason():
    model = Odd()
    model.mixing.eval()
    norms = ExampleNorms(model, list(model.parameters()))
    for _ in range(2):
        loss_of(model(torch.randn(BATCH, 4))).backward()
        assert set(take(norms, model).mean_squares) == {1, 2}
        model.zero_grad()
    assert norms.layers == ["first"]
    assert norms.left_out == {
        "": "Odd is not a layer that can be measured",
        "twice": "it is used more than once in a pass",
        "tied": "another layer has the same parameter",
        "other": "another layer has the same parameter",
        "by_hand": "its parameters are used elsewhere, or it is compiled",
        "mixing": "BatchNorm1d mixes the examples of a batch",
        "flattened": "its input has 10 examples, where the batch has 5",
    }


def test_a_layer_that_becomes_unusable_spoils_one_pass():
    model = mlp()
    norms = ExampleNorms(model, list(model.parameters()))
    loss_of(model(torch.randn(3, 6))).backward()
    assert take(norms, model).examples == 3
    model.zero_grad()
    loss_of(model[3](model[1](model[1](model[0](torch.randn(3, 6)))))).backward()
    assert take(norms, model) is None
    assert "1: it is used more than once" in norms.problem
    model.zero_grad()
    loss_of(model(torch.randn(3, 6))).backward()
    assert set(take(norms, model).mean_squares) == {0, 1, 4}


def test_a_multihead_attention_uses_its_layer_without_calling_it():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    check(model, torch.randn(BATCH, 3, 8), ["self_attn", "self_attn.out_proj"])


def test_a_pass_that_no_measured_layer_takes_part_in():
    model = mlp()
    norms = ExampleNorms(model, list(model.parameters()))
    assert norms.take({}) is None
    assert "no measured layer took part" in norms.problem


@pytest.mark.parametrize(
    ("model", "options", "match"),
    [
        (nn.BatchNorm1d(3), {}, "BatchNorm1d mixes the examples"),
        (nn.Linear(2, 2), {"layers": "norm"}, "layers='norm'"),
        (nn.ReLU(), {}, "none of the parameters"),
    ],
)
def test_a_model_without_a_layer_to_measure(model, options, match):
    with pytest.raises(ValueError, match=match):
        ExampleNorms(model, list(model.parameters()), Examples(**options))


@pytest.mark.parametrize("options", [{"layers": "lstm"}, {"layers": ()}, {"batch_dim": 2}])
def test_options_that_make_no_sense(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Examples(**options)


def test_a_copied_or_pickled_model_is_not_measured(tmp_path):
    model = mlp()
    norms = ExampleNorms(model, list(model.parameters()))
    twin = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (twin, loaded):
        loss_of(other(torch.randn(2, 6))).backward()
    assert norms.take({}) is None
    norms.remove()
    loss_of(model(torch.randn(2, 6))).backward()
    assert norms.take({}) is None


@pytest.mark.long
def test_compiled_layers_are_not_measured_and_the_graph_stays_whole():
    torch.manual_seed(0)
    model = mlp()
    norms = ExampleNorms(model, list(model.parameters()))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    loss_of(compiled(inputs_of(model))).backward()
    assert take(norms, model) is None
    assert "compiled are not measured" in norms.problem
    torch._dynamo.reset()


def test_it_goes_with_its_owner():
    model = mlp()
    norms = ExampleNorms(model, list(model.parameters()))
    loss = loss_of(model(torch.randn(2, 6)))
    del norms
    loss.backward()
    assert not model[0]._forward_hooks


def test_batch_statistics_leave_no_example_a_gradient_of_its_own():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    norms = ExampleNorms(model, list(model.parameters()))
    loss_of(model(torch.randn(BATCH, 6))).backward()
    assert take(norms, model) is None
    assert "BatchNorm1d in training mode mixes the examples" in norms.problem
    model.zero_grad()
    model.eval()
    loss_of(model(torch.randn(BATCH, 6))).backward()
    assert set(take(norms, model).mean_squares) == {0, 1, 4, 5}


def test_a_gradient_that_has_other_sources_is_not_measured():
    """A penalty on the parameters, and one on the gradient of the input."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    norms = ExampleNorms(model, list(model.parameters()))
    penalty = model[0].weight.square().sum()
    (loss_of(model(torch.randn(BATCH, 6))) + penalty).backward()
    assert set(take(norms, model).mean_squares) == {2, 3}
    assert norms.left_out == {"0": "its gradient does not come from its output alone"}
    x = torch.randn(BATCH, 6, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss_of(grad).backward()
    assert take(norms, model) is None
    assert "differentiated again" in norms.problem


@pytest.mark.parametrize("make", [mlp, cnn, Attention])
def test_the_noise_of_a_micro_batch_is_that_of_the_whole_data(make):
    """The truth comes from a pass over each example of the data, at parameters that stay."""
    torch.manual_seed(0)
    model, samples, steps = make(), 200, 150
    data = inputs_of(model, samples)
    if isinstance(model, Attention):
        data[:, 0] = 5  # something in common: a signal
    else:
        data += 0.5
    params = list(model.parameters())
    noise = mh.NoiseScale(params, model=model, examples=True, smoothing=0.999)
    for _ in range(steps):
        model.zero_grad()
        loss_of(model(data[torch.randint(samples, (16,))])).backward()
    covered = noise._tap.examples.covered
    noise.unhook()
    assert not any(module._forward_hooks for module in model.modules())
    small = float(squares_one_by_one(model, data)[sorted(covered)].sum())
    grads = torch.autograd.grad(loss_of(model(data)), params)
    sqr = sum(float(grads[i].square().sum()) for i in covered)
    assert noise.steps == steps
    assert noise.squared_norm == pytest.approx(sqr, rel=0.1)
    assert noise.variance == pytest.approx(small - sqr, rel=0.1)
    assert noise.noise_scale == pytest.approx((small - sqr) / sqr, abs=4 * noise.standard_error)

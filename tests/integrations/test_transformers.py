"""The Hugging Face Trainer with a scaling rule inside, against the same training written plainly.

The oracle is one process that takes all micro-batches of a step one at a time. The noise is the
formula in the docstring of `scaling/_weighted_mean.py`, applied by hand to their gradients.
"""

import contextlib
import math
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import manyhands as mh
from helpers.ranks import as_under_torchrun, on_ranks, raises_on_ranks, run_ranks
from manyhands import fairscale
from manyhands.ramp import _ramp

with warnings.catch_warnings():  # once, before ranks are forked
    warnings.simplefilter("ignore")
    import transformers
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from transformers.training_args import OptimizerNames

from manyhands.integrations.transformers import Attachment, attach

transformers.utils.logging.set_verbosity_error()

pytestmark = [
    # What accelerate and transformers say of themselves, or of torch.
    pytest.mark.filterwarnings("ignore:OMP_NUM_THREADS"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

VOCABULARY, LENGTH, SIZE = 16, 6, 2  # of tokens, of a sample, of a micro-batch
RATE, WARM_UP = 0.5, 2


def net():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config)


def samples(micro_batches, even=False):
    """Sequences, of which a part of the labels does not count: micro-batches differ in tokens."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(micro_batches * SIZE):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.clone()
        if not even:
            labels[: (number * 5) % LENGTH] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


def micro_batches_of(data):
    return [
        {name: torch.stack([sample[name] for sample in data[i : i + SIZE]]) for name in data[0]}
        for i in range(0, len(data), SIZE)
    ]


# -- the oracle -------------------------------------------------------------------------------


class Plain:
    """One process that sees all ranks' micro-batches: nothing of ours, and no Trainer."""

    def __init__(
        self, clip=1.0, schedule=lambda step: 1.0, autocast=None, weighted=True, smoothing=None
    ):
        self.model = net()
        # Trainer's two groups: matrices are decayed, norms and biases are not
        norms = [p for name, p in self.model.named_parameters() if "norm" in name]
        others = [p for name, p in self.model.named_parameters() if "norm" not in name]
        self.groups = [others, norms]
        self.optimizer = SGD([{"params": params} for params in self.groups], lr=RATE, momentum=0.9)
        self.clip, self.schedule, self.autocast = clip, schedule, autocast
        self.weighted, self.smoothing = weighted, smoothing
        self.sums = [[0.0, 0.0] for _ in self.groups]
        self.weight, self.progress, self.steps = 0.0, 0.0, 0
        self.gain = 1.0

    def loss_sum(self, batch):
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            logits = self.model(input_ids=batch["input_ids"]).logits
        labels = batch["labels"][:, 1:].flatten()
        return cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels, ignore_index=-100, reduction="sum"
        )

    def step(self, batches):
        params = [p for group in self.groups for p in group]
        counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
        grads = [torch.autograd.grad(self.loss_sum(batch), params) for batch in batches]
        if not self.weighted:  # each micro-batch's mean counts the same
            grads = [[g / n for g in each] for each, n in zip(grads, counts, strict=True)]
            counts = [1] * len(batches)
        total, scale = sum(counts), len(batches)
        for param, *parts in zip(params, *grads, strict=True):
            param.grad = sum(parts) / total
        theta = max(1 - scale / 1000, 0.0) if self.smoothing is None else self.smoothing
        self.weight = theta * self.weight + 1 - theta
        estimates, first = [], 0
        for group, sums in zip(self.groups, self.sums, strict=True):
            own = range(first, first + len(group))
            first += len(group)
            squares = [sum(float(each[i].square().sum()) for i in own) for each in grads]
            mean = sum(float(params[i].grad.square().sum()) for i in own)
            spread = sum(s / n for s, n in zip(squares, counts, strict=True)) - total * mean
            per_token = spread / (len(batches) - 1)
            new = (mean - per_token / total, per_token * scale / total)
            sums[:] = [
                theta * old + (1 - theta) * value for old, value in zip(sums, new, strict=True)
            ]
            sqr, var = (value / self.weight for value in sums)
            estimates.append((max(sqr, 0.0), max(var, 1e-6)))
        nn.utils.clip_grad_norm_(params, self.clip)
        base = RATE * self.schedule(self.steps)
        for group, (sqr, var) in zip(self.optimizer.param_groups, estimates, strict=True):
            group["lr"] = base * (var + sqr) / (var / scale + sqr)
        self.optimizer.step()
        sqr, var = (sum(each) for each in zip(*estimates, strict=True))
        self.gain = (var + sqr) / (var / scale + sqr)
        self.progress += self.gain
        self.steps += 1

    def train(self, data, ranks, passes, epochs):
        batches = micro_batches_of(data)
        for _ in range(epochs):
            for i in range(0, len(batches), ranks * passes):
                self.step(batches[i : i + ranks * passes])
        return self

    @property
    def values(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


# -- Trainer ----------------------------------------------------------------------------------


def trainer_of(
    data, folder, *, passes=3, rule=mh.AdaScale, by_progress=False, given=None, **options
):
    if dist.get_world_size() > 1:
        as_under_torchrun(OMP_NUM_THREADS="1")
    args = TrainingArguments(
        output_dir=str(folder),
        **{
            "optim": "sgd",
            "optim_args": "momentum=0.9",
            "learning_rate": RATE,
            "lr_scheduler_type": "constant",
            "per_device_train_batch_size": SIZE,
            "gradient_accumulation_steps": passes,
            "num_train_epochs": 2,
            "train_sampling_strategy": "sequential",
            "save_strategy": "no",
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        },
    )
    given = given or {}
    model = None if "model_init" in given else net()
    trainer = Trainer(model, args, train_dataset=data, **given)
    trainer.pop_callback(transformers.PrinterCallback)
    if rule is not False:
        attach(trainer, rule, by_progress=by_progress)
    return trainer


def rule_in(trainer):
    (attached,) = (each for each in trainer.callback_handler.callbacks if type(each) is Attachment)
    return attached.rule


def values(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def trained(trainer, resume=None):
    trainer.train(resume_from_checkpoint=resume)
    return values(trainer), rule_in(trainer).progress, trainer.state.global_step


def run(data, folder, resume=None, **options):
    return trained(trainer_of(data, folder, **options), resume)


def assert_as(ran, plain, rtol=2e-4, atol=2e-6):
    for params, progress, steps in ran:
        torch.testing.assert_close(params, plain.values, rtol=rtol, atol=atol)
        assert progress == pytest.approx(plain.progress, rel=rtol)
        assert steps == plain.steps


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("even", [True, False])
def test_accumulation_weighs_micro_batches_by_their_tokens(ranks, even, tmp_path):
    data = samples(ranks * 6, even)
    assert_as(run_ranks(ranks, run, data, tmp_path), Plain().train(data, ranks, 3, 2))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_step_of_an_epoch_is_the_smaller_batch_that_it_is(ranks, tmp_path):
    data = samples(ranks * 8)  # passes: 3, 3, 2
    assert_as(run_ranks(ranks, run, data, tmp_path), Plain().train(data, ranks, 3, 2))


class OwnLoss(Trainer):
    """A loss of one's own: the mean of a micro-batch."""

    loss_is_scaled_for_ga = False  # Trainer divides it by the passes

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, None)


@pytest.mark.parametrize(
    ("name", "value"), [("model_accepts_loss_kwargs", False), ("__class__", OwnLoss)]
)
def test_a_loss_that_is_a_mean_is_not_weighed_by_its_tokens(name, value, tmp_path):
    """The model takes no number of tokens, or the loss is one's own."""

    def train():
        trainer = trainer_of(data, tmp_path, rule=False)
        setattr(trainer, name, value)
        attach(trainer, mh.AdaScale)
        return trained(trainer)

    data = samples(16)
    assert_as(run_ranks(2, train), Plain(weighted=False).train(data, 2, 3, 2))


def test_gradients_are_measured_before_they_are_clipped(tmp_path):
    data, clip = samples(12), 0.05
    ran = run_ranks(2, run, data, tmp_path, max_grad_norm=clip)
    assert_as(ran, Plain(clip=clip).train(data, 2, 3, 2))


def test_bfloat16(tmp_path):
    data = samples(12)
    plain = Plain(autocast=torch.bfloat16).train(data, 2, 3, 2)
    assert_as(run_ranks(2, run, data, tmp_path, bf16=True), plain, rtol=5e-2, atol=1e-2)


def test_adamscale_on_two_ranks_is_one_rank_with_twice_the_passes(tmp_path):
    def train(passes):
        adam = {"optim": "adamw_torch", "optim_args": None, "learning_rate": 0.01}
        return run(data, tmp_path, passes=passes, rule=mh.AdamScale, **adam, num_train_epochs=4)

    data = samples(16)
    ((params, progress, steps),) = run_ranks(1, train, 6)
    assert steps == 12 and progress > 12
    for ran, worth, count in run_ranks(2, train, 3):
        torch.testing.assert_close(ran, params, rtol=1e-3, atol=1e-5)
        assert (worth, count) == (pytest.approx(progress, rel=1e-4), steps)


def test_a_rule_that_the_trainer_was_given(tmp_path):
    def train():
        trainer = trainer_of(data, tmp_path, rule=False)
        groups = [
            {"params": [p for n, p in trainer.model.named_parameters() if ("norm" in n) == norm]}
            for norm in (False, True)
        ]
        sgd = SGD(groups, lr=RATE, momentum=0.9)
        trainer.optimizer = mh.AdaScale(sgd, num_gradients_to_accumulate=3)
        attach(trainer)
        return trained(trainer)

    data = samples(16)
    assert_as(run_ranks(2, train), Plain().train(data, 2, 3, 2))


def linear(total):
    """Trainer's schedule of this name, with a warm-up."""

    def schedule(step):
        return step / WARM_UP if step < WARM_UP else max(0.0, (total - step) / (total - WARM_UP))

    return schedule


LINEAR = {"lr_scheduler_type": "linear", "warmup_steps": WARM_UP}


def test_its_schedule_follows_the_steps_unless_asked_otherwise(tmp_path):
    data = samples(12)
    ran = run_ranks(2, run, data, tmp_path, **LINEAR)
    assert_as(ran, Plain(schedule=linear(4)).train(data, 2, 3, 2))


def test_max_steps_and_its_schedule_counted_in_progress(tmp_path):
    end, data = 20, samples(12)
    plain = Plain()
    schedule = linear(end)
    plain.schedule = lambda _: schedule(math.floor(plain.progress + 1e-9))
    batches = micro_batches_of(data)
    while plain.progress < end:
        first = plain.steps * 6 % len(batches)
        plain.step(batches[first : first + 6])
    assert plain.steps < end - 5

    def train():
        trainer = trainer_of(data, tmp_path, by_progress=True, max_steps=end, **LINEAR)
        found = trained(trainer)
        assert trainer.optimizer.param_groups[0]["lr"] == 0.0
        return found

    assert_as(run_ranks(2, train), plain, rtol=1e-3, atol=1e-5)


class StopAt(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step >= self.step


@on_ranks(1)
def test_training_that_ends_before_its_progress_says_so(tmp_path):
    trainer = trainer_of(samples(12), tmp_path, by_progress=True, max_steps=20)
    trainer.add_callback(StopAt(1))
    with pytest.warns(UserWarning, match="small-batch steps of 20"):
        trainer.train()


def test_logs_have_the_gain_the_scale_and_the_progress(tmp_path):
    def train():
        trainer = trainer_of(data, tmp_path)
        trainer.train()
        return [line for line in trainer.state.log_history if "loss" in line]

    data = samples(16)
    plain = Plain()
    for logged in run_ranks(2, train):
        assert [line["scale"] for line in logged] == [6.0, 6.0, 4.0] * 2
    batches = micro_batches_of(data)
    for line, first in zip(logged, (0, 6, 12), strict=False):
        plain.step(batches[first : first + 6])
        assert line["gain"] == pytest.approx(plain.gain, rel=1e-3)
        assert line["progress"] == pytest.approx(plain.progress, rel=1e-3)


def test_data_that_runs_out_in_the_middle_of_a_step(tmp_path):
    """An iterable without a length: Trainer leaves the passes without a step, and we drop them."""

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(data)

    data = samples(4)
    plain = Plain()
    for _ in range(3):
        plain.step(micro_batches_of(data)[:3])
    assert_as(run_ranks(1, run, Stream(), tmp_path, max_steps=3), plain)


# -- a batch that sets itself -------------------------------------------------------------------


@pytest.fixture(autouse=True)
def decisions_after_each_step(monkeypatch):
    monkeypatch.setattr(_ramp, "EVERY", 1)


def ramping(rule):
    return mh.Ramp(rule, max_scale=12, goal="steps")


def run_ramp(data, folder, resume=None, end=30, ramp=ramping, passes=1, **options):
    """Return the parameters, the progress, the steps, and the scale of each step."""
    options = {"max_steps": end, **LINEAR, **options}
    trainer = trainer_of(data, folder, rule=False, passes=passes, **options)
    attach(trainer, mh.AdaScale, by_progress=True, ramp=ramp, smoothing=0.9)
    found = trained(trainer, resume)
    return *found, [line["scale"] for line in trainer.state.log_history if "loss" in line]


def test_a_ramp_takes_as_many_micro_batches_as_it_says(tmp_path):
    """An epoch's last batches, too few for a step, are left out."""
    data = samples(28)
    (*ran, scales), (*other, _) = run_ranks(2, run_ramp, data, tmp_path)
    assert set(scales) == {2.0, 4.0, 8.0, 12.0}
    plain, batches = Plain(smoothing=0.9), micro_batches_of(data)
    plain.schedule = lambda _: linear(30)(math.floor(plain.progress + 1e-9))
    first = 0
    for scale in map(int, scales):
        if first + scale > len(batches):
            first = 0
        plain.step(batches[first : first + scale])
        first += scale
    assert_as([ran, other], plain, rtol=2e-3, atol=2e-5)


def test_a_resumed_ramp_goes_on_where_it_was(tmp_path):
    def whole_and_resumed():
        whole = run_ramp(data, tmp_path, save_strategy="steps", save_steps=3)
        return whole, run_ramp(data, tmp_path, resume=str(tmp_path / "checkpoint-3"))

    data = samples(28)
    for whole, resumed in run_ranks(2, whole_and_resumed):
        torch.testing.assert_close(resumed[0], whole[0], rtol=0, atol=0)
        assert resumed[1:] == whole[1:]


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"passes": 2}, "ramp= sets .* gradient_accumulation_steps"),
        ({"end": -1}, "needs max_steps"),
        ({"ramp": lambda rule: mh.Ramp(rule, max_scale=64)}, "at most 28, the small batches"),
    ],
)
def test_what_a_ramp_cannot_do(changed, message, tmp_path):
    raises_on_ranks(2, ValueError, run_ramp, samples(28), tmp_path, match=message, **changed)


# -- checkpoints ------------------------------------------------------------------------------

OSS = {"optimizer_cls_and_kwargs": (mh.OSS, {"optim": SGD, "lr": RATE, "momentum": 0.9})}
KINDS = {
    "DDP": {},
    "OSS": {"given": OSS},
    "by progress": {"by_progress": True, "max_steps": 24, **LINEAR},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_whole_one(kind, tmp_path):
    """In the middle of an epoch, whose last step is a short one: bit for bit, and on one rank."""
    options = {**KINDS[kind], "save_strategy": "steps", "save_steps": 2}

    def whole_and_resumed():
        whole = run(data, tmp_path, **options)
        return whole, run(data, tmp_path, resume=str(tmp_path / "checkpoint-2"), **options)

    data = samples(16)
    for whole, resumed in run_ranks(2, whole_and_resumed):
        torch.testing.assert_close(resumed[0], whole[0], rtol=0, atol=0)
        assert resumed[1:] == whole[1:]
    at = str(tmp_path / "checkpoint-2")
    ((params, progress, steps),) = run_ranks(
        1, run, data, tmp_path, resume=at, **{**options, "passes": 6}
    )
    torch.testing.assert_close(params, whole[0], rtol=1e-3, atol=1e-5)
    assert (progress, steps) == (pytest.approx(whole[1], rel=1e-3), whole[2])


@pytest.mark.parametrize("by_progress", [False, True])
def test_a_run_without_a_rule_goes_on_with_one(by_progress, tmp_path):
    """Its steps count as progress, and its schedule goes on."""

    def train():
        options = {"max_steps": 30, **LINEAR}
        trainer = trainer_of(data, tmp_path, rule=False, save_strategy="steps", **options)
        trainer.args.save_steps = trainer.state.save_steps = 4
        trainer.add_callback(StopAt(4))
        trainer.train()
        trainer = trainer_of(data, tmp_path, by_progress=by_progress, **options)
        trainer.add_callback(StopAt(5))
        with contextlib.ExitStack() as stack:
            if by_progress:
                stack.enter_context(pytest.warns(UserWarning, match="small-batch steps of 30"))
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        (first, second) = trainer.state.log_history[-3:-1]
        return first["learning_rate"], second, trainer.lr_scheduler.get_last_lr()[0]

    data = samples(36)
    for before, logged, rate in run_ranks(2, train):
        assert before == pytest.approx(RATE * linear(30)(3))
        assert logged["step"] == 5
        assert logged["learning_rate"] == pytest.approx(RATE * linear(30)(4))
        assert logged["progress"] == pytest.approx(4 + logged["gain"])
        steps = math.floor(logged["progress"] + 1e-9) if by_progress else 5
        assert rate == pytest.approx(RATE * linear(30)(steps))


@on_ranks(1, raises=ValueError, match="Set by_progress=True, as in the run that saved it")
def test_a_checkpoint_that_counts_progress_is_not_taken_for_one_that_counts_steps(tmp_path):
    data, options = samples(12), {"max_steps": 12, "save_strategy": "steps", "save_steps": 1}
    run(data, tmp_path, by_progress=True, **options)
    run(data, tmp_path, resume=str(tmp_path / "checkpoint-1"), **options)


@pytest.mark.parametrize("rule", [None, mh.AdaScale])
def test_oss_is_the_plain_optimizer(rule, tmp_path):
    def train(given):
        trainer = trainer_of(data, tmp_path, rule=rule, given=given)
        trainer.train()
        return values(trainer)

    data = samples(12)
    if rule is None:
        plain, _ = run_ranks(2, train, {})
    else:
        plain = Plain().train(data, 2, 3, 2).values
    for params in run_ranks(2, train, OSS):
        torch.testing.assert_close(params, plain, rtol=1e-3, atol=1e-5)


def test_a_checkpoint_of_sharded_training_is_a_whole_model(tmp_path):
    """`from_pretrained` finds all weights, also those that are tied, in memory of OSS."""

    def train():
        trainer = trainer_of(samples(6), tmp_path, given=OSS, save_strategy="steps", save_steps=2)
        trainer.model.lm_head.weight = trainer.model.model.embed_tokens.weight
        trainer.model.config.tie_word_embeddings = True
        trainer.train()
        trainer.save_model(str(tmp_path / "own"))
        if dist.get_rank() == 0:
            trainer.model.save_pretrained(tmp_path / "pretrained")
        return values(trainer)

    params, _ = run_ranks(2, train)
    for folder in ("checkpoint-2", "own", "pretrained"):
        loaded, info = LlamaForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        loaded = dict(loaded.named_parameters())
        torch.testing.assert_close(loaded, params, rtol=0, atol=0)


# -- blocks -----------------------------------------------------------------------------------


def local_steps(data, ranks, passes, epochs, make):
    """The plain loop: each worker's own steps, and blocks of ours around a plain optimizer."""
    model, rank = net(), dist.get_rank()
    plain = Plain()
    optimizer = make(model)
    batches = micro_batches_of(data)
    for _ in range(epochs):
        for i in range(0, len(batches), ranks * passes):
            own = batches[i : i + ranks * passes][rank::ranks]
            tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in own)
            for batch in own:
                plain.model = model
                (plain.loss_sum(batch) / tokens).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    optimizer.synchronize()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def local_sgd(model, **_):
    return mh.DiLoCo(SGD(model.parameters(), lr=RATE), every=3, lr=0.7)


IN_BLOCKS = {"optimizer_cls_and_kwargs": (lambda: local_sgd, {})}


def in_blocks(data, folder, resume=None, **options):
    trainer = trainer_of(data, folder, rule=None, given=IN_BLOCKS, **options)
    trainer.train(resume_from_checkpoint=resume)
    return values(trainer), trainer.optimizer.optimizer.rounds, trainer.state.log_history


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_are_those_of_the_plain_loop(ranks, tmp_path):
    """Four steps and a round of three: the last round ends the training."""

    def both():
        plain = local_steps(data, ranks, 3, 2, local_sgd)
        return plain, in_blocks(data, tmp_path)

    data = samples(3 * ranks * 2)
    results = run_ranks(ranks, both)
    for plain, (params, rounds, _) in results:
        torch.testing.assert_close(params, plain, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(params, results[0][1][0], rtol=0, atol=0)
        assert rounds == (2 if ranks == 2 else 0)


def test_blocks_are_saved_and_evaluated_synchronized_and_go_on_on_other_ranks(tmp_path):
    data = samples(16)
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": SIZE}
    evaluated = {"eval_dataset": data[:8]}

    def run(passes=3, resume=None):
        trainer = trainer_of(
            data, tmp_path, rule=None, given=IN_BLOCKS | evaluated, passes=passes, **options
        )
        trainer.train(resume_from_checkpoint=resume)
        losses = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
        return values(trainer), losses

    whole = run_ranks(2, run)
    at_the_end = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    for params, losses in whole:
        torch.testing.assert_close(params, dict(at_the_end.named_parameters()), rtol=0, atol=0)
        assert losses == whole[0][1]
    resumed = run_ranks(2, run, resume=str(tmp_path / "checkpoint-2"))
    for params, losses in resumed:
        torch.testing.assert_close(params, whole[0][0], rtol=0, atol=0)
        assert losses == whole[0][1]
    run_ranks(1, run, resume=str(tmp_path / "checkpoint-2"))


def test_a_rule_inside_blocks(tmp_path):
    def make(model, **_):
        sgd = SGD(model.parameters(), lr=RATE)
        rule = mh.AdaScale(sgd, num_gradients_to_accumulate=3, world_size=1)
        return mh.LocalSGD(rule, every=2)

    def train():
        given = {"optimizer_cls_and_kwargs": (lambda: make, {})}
        trainer = trainer_of(samples(12), tmp_path, rule=None, given=given)
        trainer.train()
        logged = [each for each in trainer.state.log_history if "gain" in each]
        return rule_in(trainer).scale, values(trainer), len(logged)

    (scale, params, logged), (_, others, _) = run_ranks(2, train)
    assert (scale, logged) == (3.0, 4)
    torch.testing.assert_close(params, others, rtol=0, atol=0)


# -- fully_shard ------------------------------------------------------------------------------


def shard(trainer):
    """Set up what `fsdp=True` does on GPUs; on CPUs, accelerate leaves it out without a word.

    Saving whole state dicts, as is the default, fails on CPUs: safetensors gets tensors that are
    still being gathered. So shards are saved.
    """
    trainer.is_fsdp_enabled = True
    trainer.accelerator.state.distributed_type = DistributedType.FSDP
    trainer.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        reshard_after_forward=True,
    )


def run_sharded(data, folder, resume=None, **options):
    trainer = trainer_of(data, folder, rule=False, **options)
    shard(trainer)
    attach(trainer, mh.AdaScale)
    trainer.train(resume_from_checkpoint=resume)
    params = {n: p.full_tensor().detach() for n, p in trainer.model.named_parameters()}
    assert isinstance(trainer.model, FSDPModule)
    return params, rule_in(trainer).progress, trainer.state.global_step


def test_under_fully_shard(tmp_path):
    data = samples(16)
    assert_as(run_ranks(2, run_sharded, data, tmp_path), Plain().train(data, 2, 3, 2))


def test_a_resumed_run_under_fully_shard_is_the_whole_one(tmp_path):
    def whole_and_resumed():
        whole = run_sharded(data, tmp_path, save_strategy="steps", save_steps=2)
        return whole, run_sharded(data, tmp_path, resume=str(tmp_path / "checkpoint-2"))

    data = samples(16)
    for whole, resumed in run_ranks(2, whole_and_resumed):
        torch.testing.assert_close(resumed[0], whole[0], rtol=0, atol=0)
        assert resumed[1:] == whole[1:]


# -- float16, as on a GPU -----------------------------------------------------------------------


def run_half(data, folder, scale):
    """Train in float16 on a CPU, where accelerate itself would train in float32."""
    trainer = trainer_of(data, folder, rule=False)
    accelerator = trainer.accelerator
    accelerator.state._mixed_precision = "fp16"
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
    attach(trainer, mh.AdaScale)
    trainer.train()
    rule = rule_in(trainer)
    return (
        values(trainer),
        rule.progress,
        rule.snapshot()["skipped"],
        trainer.lr_scheduler.last_epoch,
    )


def test_float16_with_its_scaler(tmp_path):
    """The loss scale is in neither the noise nor the step."""
    data = samples(12)
    plain = Plain(autocast=torch.float16).train(data, 2, 3, 2)
    for params, progress, skipped, scheduled in run_ranks(2, run_half, data, tmp_path, 16.0):
        torch.testing.assert_close(params, plain.values, rtol=2e-2, atol=2e-3)
        assert progress == pytest.approx(plain.progress, rel=1e-2)
        assert (skipped, scheduled) == (0, 4)


def test_float16_steps_that_overflow_are_left_out(tmp_path):
    data = samples(12)
    ranks = run_ranks(2, run_half, data, tmp_path, 2.0**19)
    for _, progress, skipped, scheduled in ranks:
        assert 1 <= skipped < 4
        assert progress < 6 * (4 - skipped)
        assert scheduled == 4 - skipped


# -- what cannot be right ---------------------------------------------------------------------


def set_on(name, value):
    def change(trainer):
        setattr(trainer, name, value)

    return change


def set_argument(name, value):
    def change(trainer):
        setattr(trainer.args, name, value)

    return change


def first_fsdp(trainer):
    trainer.is_fsdp_enabled = True
    trainer.accelerator.state.fsdp_plugin = types.SimpleNamespace(fsdp_version=1)


MISTAKES = {
    "DeepSpeed": (set_on("is_deepspeed_enabled", True), "DeepSpeed.*mh.OSS"),
    "FSDP1": (first_fsdp, "first version of FSDP.*version 2"),
    "DataParallel": (set_argument("_n_gpu", 2), "DataParallel.*torchrun"),
    "tensor parallelism": (
        lambda trainer: setattr(trainer.model, "_tp_size", 2),
        "parallelism.*'tp': 2",
    ),
    "sharded loading": (
        set_on("is_distributed_loading_by_transformers", True),
        "sharded loading",
    ),
    "FSDP of ours": (
        lambda trainer: setattr(trainer, "model", mh.FSDP(trainer.model)),
        "a model in FullyShardedDataParallel",
    ),
    "LOMO": (set_argument("optim", OptimizerNames.LOMO), "inside backward"),
    "layerwise": (set_argument("optim", OptimizerNames.GALORE_ADAMW_LAYERWISE), "inside back"),
    "auto_find_batch_size": (set_argument("auto_find_batch_size", True), "changes the small batch"),
    "Megatron": (
        lambda trainer: setattr(
            trainer.accelerator.state, "distributed_type", DistributedType.MEGATRON_LM
        ),
        "Megatron-LM",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_a_rule_cannot_follow_is_an_error_that_says_what_to_use(name, tmp_path):
    change, message = MISTAKES[name]

    def make():
        trainer = trainer_of(samples(4), tmp_path, rule=False)
        change(trainer)
        attach(trainer, mh.AdaScale)

    raises_on_ranks(1, ValueError, make, match=message)


def test_tokens_that_are_weighed_by_rank_are_an_error(tmp_path):
    def make():
        trainer_of(samples(4), tmp_path, average_tokens_across_devices=False).train()

    raises_on_ranks(2, ValueError, make, match="Leave it at True")
    run_ranks(1, make)  # one rank has all tokens


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "needs max_steps"),
        (
            {"max_steps": 9, "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
            "follows a metric",
        ),
        ({"max_steps": 9, "rule": None}, "needs a rule"),
    ],
)
def test_what_cannot_be_counted_in_progress(options, message, tmp_path):
    def train():
        data = samples(4)
        given = {"eval_dataset": data}
        trainer_of(data, tmp_path, by_progress=True, given=given, **options).train()

    raises_on_ranks(1, ValueError, train, match=message)


def ramped(model, **options):
    rule = mh.AdaScale(SGD(model.parameters(), **options), num_gradients_to_accumulate=3)
    mh.Ramp(rule, max_scale=64)
    return rule


def other_passes(model, **options):
    return mh.AdaScale(SGD(model.parameters(), **options), num_gradients_to_accumulate=2)


@pytest.mark.parametrize(
    "made, message",
    [
        (ramped, "Pass ramp= to attach"),
        (other_passes, "gradient_accumulation_steps=3 .* num_gradients_to_accumulate=2"),
    ],
)
def test_an_optimizer_that_its_loop_cannot_drive_is_an_error_before_the_first_step(
    made, message, tmp_path
):
    def train():
        given = {"optimizer_cls_and_kwargs": (lambda: made, {"lr": RATE})}
        trainer = trainer_of(samples(12), tmp_path, rule=None, given=given)
        trainer.train()

    raises_on_ranks(2, ValueError, train, match=message)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rule": mh.AdaScale}, r"mh.DiLoCo\(mh.AdaScale\(optimizer, world_size=1, num_grad.*=3"),
        ({"by_progress": True, "max_steps": 4}, "Omit fsdp= and by_progress"),
    ],
)
def test_what_does_not_go_with_blocks(options, message, tmp_path):
    def train():
        trainer_of(samples(12), tmp_path, **{"rule": None, **options}, given=IN_BLOCKS).train()

    raises_on_ranks(2, ValueError, train, match=message)


def test_an_optimizer_class_that_has_the_rule_in_it(tmp_path):
    """fairscale's `AdaScaleWrapper`, as the class that Trainer makes its optimizer of."""

    def train():
        kind = {"optim_cls": SGD, "lr": RATE, "momentum": 0.9, "num_gradients_to_accumulate": 3}
        given = {"optimizer_cls_and_kwargs": (fairscale.AdaScaleWrapper, kind)}
        return run(data, tmp_path, rule=None, given=given)

    data = samples(16)
    assert_as(run_ranks(2, train), Plain().train(data, 2, 3, 2))


@on_ranks(1, raises=RuntimeError, match="attached to already")
def test_attach_is_called_once(tmp_path):
    attach(trainer_of(samples(4), tmp_path))


@on_ranks(2, raises=RuntimeError, match="Other counts 7.*Do not override")
def test_a_trainer_that_counts_its_tokens_in_another_way_is_an_error(tmp_path):
    class Other(Trainer):
        def _get_num_items_in_batch(self, batch_samples, device):
            return torch.tensor(7)

    trainer = trainer_of(samples(12), tmp_path, rule=False)
    trainer.__class__ = Other
    attach(trainer, mh.AdaScale)
    trainer.train()


def test_another_call_of_train_counts_from_the_beginning(tmp_path):
    def train():
        trainer = trainer_of(data, tmp_path, by_progress=True, max_steps=10)
        found = []
        for _ in range(2):
            trainer.train()
            found.append((trainer.state.global_step, rule_in(trainer).progress))
        return found

    data = samples(8)  # passes: 3, 3, 2
    ((first, second),) = run_ranks(1, train)
    for steps, progress in (first, second):
        assert steps < 10 <= progress < 13


@pytest.mark.parametrize("ramp", [None, ramping])
def test_a_model_that_is_made_anew_gets_a_rule_and_a_ramp_of_its_own(ramp, tmp_path):
    """As in a search over hyperparameters."""

    def train():
        trainer = trainer_of(
            data, tmp_path, rule=False, passes=1, max_steps=10, given={"model_init": net}
        )
        attached = attach(trainer, mh.AdaScale, by_progress=True, ramp=ramp)
        found = []
        for _ in range(2):
            trainer.train()
            rule = rule_in(trainer)
            assert ramp is None or rule.port.observer is attached.ramp
            found.append((values(trainer), trainer.state.global_step, rule.progress))
        return found

    data = samples(28)
    for first, second in run_ranks(2, train):
        torch.testing.assert_close(first, second, rtol=0, atol=0)

"""Shard models, or train in blocks, by strategies for Lightning's Trainer.

Each starts the ranks as Lightning's `DDPStrategy` does, and puts a wrapper of ours in the place of
DistributedDataParallel. So each takes DDPStrategy's options (`timeout`, `start_method`, ...).

    strategy               model                  optimizer           a checkpoint has
    OSSStrategy            DDP                    OSS                 the plain state, gathered
    ShardedDDPStrategy     ShardedDataParallel    OSS                 the plain state, gathered
    FullyShardedStrategy   FSDP                   -                   the plain state, gathered
    BlocksStrategy         -                      DiLoCo, BMUF, ...   rank 0's, synchronized

A checkpoint is one file of Lightning's, with the names and tensors of the plain model: it can be
loaded on any number of devices, and by any of the other strategies.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._optimizers.optimizers import constructor_arguments
from manyhands._optimizers.wrappers import find_layer
from manyhands.blocks._methods import DiLoCo
from manyhands.blocks._optimizer import Blocks
from manyhands.integrations._whole_state import load_whole_state, whole_state
from manyhands.integrations.lightning._callbacks import Scaling
from manyhands.integrations.lightning._trainer import (
    callbacks_of,
    check_no_averages,
    only_optimizer,
    replace_clipping,
    restore_clipping,
)
from manyhands.sharding._gradients import ShardedGradScaler
from manyhands.sharding.fsdp._wrapper import FullyShardedDataParallel
from manyhands.sharding.fsdp._wrapping import Classes, Policy, auto_wrap, enable_wrap
from manyhands.sharding.zero._ddp import ShardedDataParallel
from manyhands.sharding.zero._oss import OSS

# The options of Lightning's own strategy; it passes all others on to DistributedDataParallel.
OF_DDP_STRATEGY = {
    name
    for name, parameter in inspect.signature(DDPStrategy.__init__).parameters.items()
    if name != "self" and parameter.kind is not parameter.VAR_KEYWORD
}


class OwnStrategy(DDPStrategy):
    """Base of the strategies here: what they have in common."""

    model: Any  # Lightning's: the LightningModule, or the wrapper around it; None before `setup`
    optimizers: list[Optimizer]

    def setup(self, trainer: Trainer) -> None:
        """Set up model and optimizers, and Lightning's clipping for them."""
        super().setup(trainer)
        replace_clipping(self.precision_plugin)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients in the backward passes inside, without averaging them."""
        with getattr(self.model, "no_sync", nullcontext)():
            yield

    def teardown(self) -> None:
        """Give the precision plugin its own clipping back, and free what Lightning frees."""
        restore_clipping(self.precision_plugin)
        super().teardown()

    def _teardown_in_place(self) -> None:
        """Free what Lightning frees, but leave tensors where they can be gathered, to be saved."""
        restore_clipping(self.precision_plugin)
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator):
            assert part is not None
            part.teardown()
        self.checkpoint_io.teardown()


class OSSStrategy(OwnStrategy):
    """`OSS` under DistributedDataParallel: each device keeps 1/N of the optimizer's state.

    >>> import lightning
    >>> from manyhands.integrations.lightning import OSSStrategy
    >>> trainer = lightning.Trainer(
    ...     accelerator="cpu", strategy=OSSStrategy(), logger=False, enable_checkpointing=False
    ... )

    `configure_optimizers` returns the plain optimizer, which becomes an `OSS` of its class, or an
    `OSS`. Schedulers that were made for the plain optimizer schedule the OSS.

    Args:
        options: of `OSS`, such as `layout` and `bucket_size`, of Lightning's `DDPStrategy`, and of
            DistributedDataParallel.
    """

    def __init__(self, **options: Any) -> None:
        self._of_oss = _take(options, OSS)
        super().__init__(**options)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make an OSS of the plain optimizer."""
        super().setup_optimizers(trainer)
        optimizer = only_optimizer(self.optimizers, type(self).__name__)
        self.optimizers = [as_oss(optimizer, self._of_oss)]

    def teardown(self) -> None:
        """Take the wrapper away, and free what Lightning frees, but leave the state sharded."""
        if self.model is not None:
            self.model = self.lightning_module
            if self._layer_sync:
                self.model = self._layer_sync.revert(self.model)
        self._teardown_in_place()


class ShardedDDPStrategy(OSSStrategy):
    """`OSS` and `ShardedDataParallel`: gradients and the optimizer's state are sharded.

    >>> import lightning
    >>> from manyhands.integrations.lightning import ShardedDDPStrategy
    >>> trainer = lightning.Trainer(
    ...     accelerator="cpu", strategy=ShardedDDPStrategy(), logger=False,
    ...     enable_checkpointing=False
    ... )

    `configure_optimizers` returns the plain optimizer, as for `OSSStrategy`. `gradient_clip_val`
    clips by the norm of the whole gradient. With "16-mixed" the scaler is a `ShardedGradScaler`.

    Args:
        options: of `OSS` and `ShardedDataParallel`, and of Lightning's `DDPStrategy`.
    """

    def __init__(self, **options: Any) -> None:
        self._of_wrapper = _take(options, ShardedDataParallel)
        _check_options_known(options, type(self).__name__, "OSS, ShardedDataParallel")
        super().__init__(**options)

    def configure_ddp(self) -> None:
        """Leave the model as it is: it is wrapped once there is an optimizer."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the OSS, and wrap the model."""
        super().setup_optimizers(trainer)
        use_sharded_scaler(self.precision_plugin)
        self.model = ShardedDataParallel(self.model, self.optimizers, **self._of_wrapper)


class FullyShardedStrategy(OwnStrategy):
    """`FullyShardedDataParallel`: each device holds 1/N of everything.

    >>> import lightning, torch
    >>> from manyhands.integrations.lightning import FullyShardedStrategy
    >>> strategy = FullyShardedStrategy(policy={torch.nn.TransformerEncoderLayer})
    >>> trainer = lightning.Trainer(
    ...     accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False
    ... )

    The model is wrapped before `configure_optimizers`, which makes the optimizer from
    `self.parameters()` as ever. Modules that `configure_model` has wrapped in `mh.FSDP` stay so.

    Surprises: after `fit` the parameters are still sharded; `trainer.strategy.model.state_dict()`
    (on every rank) and `trainer.save_checkpoint` have them whole.

    Args:
        policy: the modules inside that are wrapped: classes, or a policy of `auto_wrap`.
        options: of `FullyShardedDataParallel`, and of Lightning's `DDPStrategy`.
    """

    def __init__(self, policy: Policy | Classes | None = None, **options: Any) -> None:
        self._policy = policy
        self._of_wrapper = _take(options, FullyShardedDataParallel)
        _check_options_known(options, type(self).__name__, "FullyShardedDataParallel")
        if options.get("start_method", "popen") != "popen":
            raise ValueError(
                "start_method= hands the trained model back to this process, and each rank has a "
                "shard of it. Leave start_method out, or use ShardedDDPStrategy."
            )
        self._root: FullyShardedDataParallel | None = None
        super().__init__(**options)

    def setup(self, trainer: Trainer) -> None:
        """Wrap the model, also to evaluate it; then set up the optimizers."""
        if trainer.state.fn == TrainerFn.FITTING:
            if not trainer.lightning_module.automatic_optimization:
                raise ValueError(
                    "training_step runs inside the forward of the sharded model, and manual "
                    "optimization would call backward() there. Use ShardedDDPStrategy."
                )
            check_no_averages(trainer, "each device has shards. Use ShardedDDPStrategy.")
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        Strategy.setup(self, trainer)
        use_sharded_scaler(self.precision_plugin)
        replace_clipping(self.precision_plugin)

    def model_to_device(self) -> None:
        """Leave the parameters where they are, until they are sharded."""
        if self.world_size == 1:
            super().model_to_device()
            return
        for module in self.model.modules():
            if next(module.parameters(), None) is None:  # such as a metric
                module.to(self.root_device)

    def _setup_model(self, model: nn.Module) -> FullyShardedDataParallel:  # type: ignore[override]
        """Return the model wrapped, once; Lightning asks again for each stage."""
        if self._root is None or self._root.module is not model:
            options = {"state_dict_device": "cpu", **self._of_wrapper}
            if self.root_device.type != "cpu":
                options.setdefault("compute_device", self.root_device)
            with enable_wrap(wrapper_cls=FullyShardedDataParallel, **options):
                whole = model if self._policy is None else auto_wrap(model, self._policy)
            if not isinstance(whole, FullyShardedDataParallel):
                whole = FullyShardedDataParallel(whole, **options)
            self._root = whole
        return self._root

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Average gradients in every pass: a device has no room for whole gradients."""
        yield

    def lightning_module_state_dict(self) -> StateDict:
        """Return the plain model's state; every rank takes part."""
        return self._model_in_use.state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the plain model's state: before the model is wrapped, or into its shards."""
        if self._root is None or self._root.module is not self.lightning_module:
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._root.load_state_dict(checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: Optimizer) -> StateDict:
        """Return the plain optimizer's state on rank 0; every rank takes part."""
        return whole_state(self._model_in_use, _bare(optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's slices of the plain optimizer's state."""
        # Fewer states than optimizers: `Scaling` loads a checkpoint without a rule by itself.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_whole_state(self._model_in_use, _bare(optimizer), state)

    @property
    def _model_in_use(self) -> FullyShardedDataParallel:
        assert isinstance(self.model, FullyShardedDataParallel)
        return self.model

    def teardown(self) -> None:
        """Free what Lightning frees, but leave the sharded model where it is."""
        self._teardown_in_place()


MakeBlocks = Callable[..., Blocks]


class BlocksStrategy(OwnStrategy):
    """Blocks: each device steps by itself, and all synchronize once in a block.

    >>> import lightning, manyhands as mh
    >>> from manyhands.integrations.lightning import BlocksStrategy
    >>> trainer = lightning.Trainer(
    ...     accelerator="cpu", strategy=BlocksStrategy(mh.DiLoCo, every=64), logger=False,
    ...     enable_checkpointing=False
    ... )

    `configure_optimizers` returns the plain optimizer, or one that is in blocks already.

    A sync round comes before each validation and each checkpoint, and after the last step, unless
    one has just taken place: what is validated and saved is what all devices train on from. Choose
    `val_check_interval` and `every_n_train_steps` as multiples of `every`, and none is added.

    Args:
        blocks: `DiLoCo`, `BMUF`, `SlowMo`, `LocalSGD`, or another function that is called with the
            optimizer and the options.
        options: of the blocks, and of Lightning's `DDPStrategy`.
    """

    def __init__(self, blocks: MakeBlocks = DiLoCo, **options: Any) -> None:
        if options.get("crew") is not None:
            raise ValueError(
                "give each worker of a crew a Trainer of its own (devices=1), and return "
                "mh.DiLoCo(optimizer, crew=mh.Crew()) from configure_optimizers."
            )
        of_strategy = {name: options.pop(name) for name in OF_DDP_STRATEGY & options.keys()}
        self._make = blocks
        self._options = options
        super().__init__(**of_strategy)

    def setup(self, trainer: Trainer) -> None:
        """Set up model and optimizers."""
        check_no_averages(trainer, "in blocks the devices' parameters differ between sync rounds.")
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Leave the model as it is: gradients are not averaged."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Put the rule of a `Scaling` around the optimizer, and the blocks around that."""
        super().setup_optimizers(trainer)
        name = type(self).__name__
        optimizer = only_optimizer(self.optimizers, name)
        if find_layer(optimizer, Blocks) is not None:
            if self._options:
                raise ValueError(
                    f"configure_optimizers returned blocks already, and {name} was given options."
                )
            return
        for callback in callbacks_of(trainer):
            if isinstance(callback, Scaling):
                # inside the blocks: each device has a separate batch
                optimizer = callback.make_rule(trainer, optimizer, world_size=1)
        self.optimizers = [self._make(optimizer, **self._options)]

    def lightning_module_state_dict(self) -> StateDict:
        """Return the model's state after a sync round; every rank takes part."""
        self._synchronize()
        return super().lightning_module_state_dict()

    def on_validation_start(self) -> None:
        """Synchronize: all devices validate one model."""
        self._synchronize()

    def on_train_end(self) -> None:
        """Synchronize: one model comes out of the training."""
        self._synchronize()

    def _synchronize(self) -> None:
        """End the present block, so that all devices have the same parameters."""
        for optimizer in self.optimizers:
            blocks = find_layer(_bare(optimizer), Blocks)
            if blocks is not None:
                blocks.synchronize()


# -- helpers ---------------------------------------------------------------------------------------


def as_oss(optimizer: Optimizer, options: Mapping[str, Any]) -> Optimizer:
    """Return an OSS of this plain optimizer's class, arguments and parameter groups."""
    if find_layer(optimizer, OSS) is not None:
        if options:
            raise ValueError(f"configure_optimizers returned an OSS already. Give it {[*options]}.")
        return optimizer
    kind = type(optimizer)
    if optimizer.state:
        raise ValueError(f"this {kind.__name__} has state already, which an OSS would lose.")
    arguments, unknown = constructor_arguments(optimizer)
    # OSS gets the same dicts of the groups, into which schedulers write the learning rate.
    oss = OSS(optimizer.param_groups, optim=kind, **options, **arguments)
    if unknown or oss.optim.defaults != optimizer.defaults:
        raise ValueError(
            f"not all arguments of {kind.__name__} are among its defaults. Return the OSS itself: "
            f"mh.OSS(self.parameters(), optim={kind.__name__}, lr=...)."
        )
    # torch's schedulers warn unless the optimizer that they were made for has stepped. It never
    # steps now: the OSS does.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return oss


def use_sharded_scaler(plugin: object) -> None:
    """Let all ranks skip a step together if one of them has an overflow in its shard."""
    if not isinstance(plugin, MixedPrecision):
        return
    scaler = plugin.scaler
    if scaler is None or isinstance(scaler, ShardedGradScaler) or not scaler.is_enabled():
        return
    plugin.scaler = ShardedGradScaler(
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        device=plugin.device,
    )


def _bare(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _take(options: dict[str, Any], of: type) -> dict[str, Any]:
    """Remove the options that this class takes, and return them."""
    names = set(inspect.signature(of).parameters) - {"params", "module", "optim", "optimizer"}
    return {name: options.pop(name) for name in sorted(names & options.keys())}


def _check_options_known(options: Mapping[str, object], name: str, wrapper: str) -> None:
    """Raise for options that neither our wrapper nor Lightning's strategy has."""
    unknown = sorted(options.keys() - OF_DDP_STRATEGY)
    if unknown:
        raise TypeError(
            f"{name} takes no {', '.join(unknown)}: options are those of {wrapper} and DDPStrategy."
        )

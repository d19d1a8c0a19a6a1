"""Strategies for sharding and blocks in Lightning's Trainer.

The strategies derive from Lightning's `DDPStrategy`, including its options (`timeout`,
`start_method`, ...), and replace DistributedDataParallel:

    strategy               model                  optimizer           state in a checkpoint
    ShardedDDPStrategy     ShardedDataParallel    OSS                 plain, gathered
    FullyShardedStrategy   FSDP                   -                   plain, gathered
    BlocksStrategy         -                      DiLoCo, BMUF, ...   rank 0's, synchronized

A checkpoint is a single file with the names and tensors of the plain model. Any of these strategies
loads it, on any number of devices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._optimizers.optimizers import constructor_arguments
from manyhands._optimizers.state_parts import OptimizerLayers
from manyhands._optimizers.wrappers import find_layer
from manyhands.blocks._methods import DiLoCo
from manyhands.blocks._optimizer import Blocks
from manyhands.integrations.lightning._callbacks import Scaling
from manyhands.integrations.lightning._trainer import (
    check_no_averages,
    only_optimizer,
    replace_clipping,
    restore_clipping,
)
from manyhands.scaling._binding import KEY
from manyhands.sharding._gradients import ShardedGradScaler
from manyhands.sharding.fsdp._wrapper import FullyShardedDataParallel
from manyhands.sharding.fsdp._wrapping import Classes, Policy, auto_wrap, enable_wrap
from manyhands.sharding.zero._ddp import ShardedDataParallel
from manyhands.sharding.zero._oss import OSS


class OwnStrategy(DDPStrategy):
    """Base class of the strategies."""

    model: Any  # the LightningModule, or the wrapper around it; None before `setup`
    optimizers: list[Optimizer]

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        replace_clipping(self.precision_plugin)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging in this context."""
        with getattr(self.model, "no_sync", nullcontext)():
            yield

    def teardown(self) -> None:
        restore_clipping(self.precision_plugin)
        super().teardown()

    def _teardown_in_place(self) -> None:
        """Tear down as Lightning does, except for moving tensors, so that a save can gather."""
        restore_clipping(self.precision_plugin)
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator):
            assert part is not None
            part.teardown()
        self.checkpoint_io.teardown()


class ShardedDDPStrategy(OwnStrategy):
    """`OSS` and `ShardedDataParallel`: gradients and the optimizer's state are sharded.

    >>> import lightning
    >>> from manyhands.integrations.lightning import ShardedDDPStrategy
    >>> trainer = lightning.Trainer(
    ...     accelerator="cpu", strategy=ShardedDDPStrategy(), logger=False,
    ...     enable_checkpointing=False
    ... )

    `configure_optimizers` returns an `OSS`, or a plain optimizer, which the strategy replaces by an
    `OSS`. Schedulers of the plain optimizer then schedule the `OSS`. `gradient_clip_val` applies to
    the norm of the full gradient. With "16-mixed", the scaler is a `ShardedGradScaler`.

    Args:
        options: options of `OSS`, `ShardedDataParallel` and Lightning's `DDPStrategy`.
    """

    def __init__(self, **options: Any) -> None:
        self._of_wrapper = _take(options, ShardedDataParallel)
        self._of_oss = _take(options, OSS)
        _check_options_known(options, type(self).__name__, "OSS, ShardedDataParallel")
        super().__init__(**options)

    def configure_ddp(self) -> None:
        """Omit DDP. `setup_optimizers` wraps the model."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        optimizer = only_optimizer(self.optimizers, type(self).__name__)
        self.optimizers = [as_oss(optimizer, self._of_oss)]
        use_sharded_scaler(self.precision_plugin)
        self.model = ShardedDataParallel(self.model, self.optimizers, **self._of_wrapper)

    def teardown(self) -> None:
        """Remove the wrapper and tear down. The state remains sharded."""
        if self.model is not None:
            self.model = self.lightning_module
            if self._layer_sync:
                self.model = self._layer_sync.revert(self.model)
        self._teardown_in_place()


class FullyShardedStrategy(OwnStrategy):
    """`FullyShardedDataParallel`: each device stores 1/N of the training state.

    >>> import lightning, torch
    >>> from manyhands.integrations.lightning import FullyShardedStrategy
    >>> strategy = FullyShardedStrategy(policy={torch.nn.TransformerEncoderLayer})
    >>> trainer = lightning.Trainer(
    ...     accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False
    ... )

    The strategy wraps the model before `configure_optimizers`, which uses `self.parameters()` as
    usual. Modules that `configure_model` has wrapped in `mh.FSDP` remain wrapped.

    After `fit` the parameters remain sharded. `trainer.strategy.model.state_dict()` (on every rank)
    and `trainer.save_checkpoint` gather them.

    Args:
        policy: inner modules to wrap: classes, or a policy of `auto_wrap`.
        options: options of `FullyShardedDataParallel` and Lightning's `DDPStrategy`.
    """

    def __init__(self, policy: Policy | Classes | None = None, **options: Any) -> None:
        self._policy = policy
        self._of_wrapper = _take(options, FullyShardedDataParallel)
        _check_options_known(options, type(self).__name__, "FullyShardedDataParallel")
        if options.get("start_method", "popen") != "popen":
            raise ValueError(
                "start_method= must be 'popen': other methods return the trained model to this "
                "process, but each rank has only a shard. Omit it, or use ShardedDDPStrategy."
            )
        self._root: FullyShardedDataParallel | None = None
        super().__init__(**options)

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            if not trainer.lightning_module.automatic_optimization:
                raise ValueError(
                    "manual optimization calls backward() in training_step, inside the forward of "
                    "the sharded model, which is not supported. Use ShardedDDPStrategy."
                )
            check_no_averages(trainer, "each device has shards. Use ShardedDDPStrategy.")
            if self._layer_sync:
                self.model = self._layer_sync.apply(self.model)
        Strategy.setup(self, trainer)
        use_sharded_scaler(self.precision_plugin)
        replace_clipping(self.precision_plugin)

    def model_to_device(self) -> None:
        """Move modules without parameters. Parameters move after sharding."""
        if self.world_size == 1:
            super().model_to_device()
            return
        for module in self.model.modules():
            if next(module.parameters(), None) is None:  # such as a metric
                module.to(self.root_device)

    def _setup_model(self, model: nn.Module) -> FullyShardedDataParallel:  # type: ignore[override]
        """Return the wrapped model. Lightning calls this for each stage."""
        if self._root is None or self._root.module is not model:
            options = {"state_dict_device": "cpu", **self._of_wrapper}
            if self.root_device.type != "cpu":
                options.setdefault("compute_device", self.root_device)
            with enable_wrap(wrapper_cls=FullyShardedDataParallel, **options):
                wrapped = model if self._policy is None else auto_wrap(model, self._policy)
            if not isinstance(wrapped, FullyShardedDataParallel):
                wrapped = FullyShardedDataParallel(wrapped, **options)
            self._root = wrapped
        return self._root

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Average gradients in every pass, because full gradients may not fit on a device."""
        yield

    def lightning_module_state_dict(self) -> StateDict:
        state: StateDict = self.model.state_dict()
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._root is None or self._root.module is not self.lightning_module:
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._root.load_state_dict(checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: Optimizer) -> StateDict:
        """Return the plain optimizer's state on rank 0. Called on every rank."""
        layers = OptimizerLayers.of(optimizer)
        state: StateDict = self.model.gather_full_optim_state_dict(layers.inner) or {}
        if layers.rule is not None:
            state[KEY] = layers.rule.scaling_state_dict()
        return state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # There are no states if `Scaling` loads the checkpoint of a bare optimizer.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            plain = {key: value for key, value in state.items() if key != KEY}
            shard = self.model.get_shard_from_optim_state_dict(plain)
            if KEY in state:
                shard = {**shard, KEY: state[KEY]}
            optimizer.load_state_dict(shard)

    def teardown(self) -> None:
        self._teardown_in_place()


MakeBlocks = Callable[..., Blocks]


class BlocksStrategy(OwnStrategy):
    """Blocks: devices step independently, and synchronize once per block.

    >>> import lightning, manyhands as mh
    >>> from manyhands.integrations.lightning import BlocksStrategy
    >>> trainer = lightning.Trainer(
    ...     accelerator="cpu", strategy=BlocksStrategy(mh.DiLoCo, every=64), logger=False,
    ...     enable_checkpointing=False
    ... )

    `configure_optimizers` returns the plain optimizer, or blocks.

    A sync round precedes each validation and each checkpoint, and follows the last step, unless one
    has just ended. So validation, checkpoints and further training use the same parameters. If
    `val_check_interval` and `every_n_train_steps` are multiples of `every`, no rounds are added.

    Args:
        blocks: `DiLoCo`, `BMUF`, `SlowMo`, `LocalSGD`, or a function of the optimizer and the
            options.
        options: options of the blocks and of Lightning's `DDPStrategy`.
    """

    def __init__(self, blocks: MakeBlocks = DiLoCo, **options: Any) -> None:
        if options.get("crew") is not None:
            raise ValueError(
                "BlocksStrategy does not support crew=. Start a separate Trainer (devices=1) for "
                "each worker, and return mh.DiLoCo(optimizer, crew=mh.Crew()) from "
                "configure_optimizers."
            )
        of_strategy = _take(options, DDPStrategy)
        self._make = blocks
        self._options = options
        super().__init__(**of_strategy)

    def setup(self, trainer: Trainer) -> None:
        check_no_averages(trainer, "in blocks, parameters differ between devices.")
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Omit DDP, because gradients are not averaged."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Wrap the optimizer in the rule of a `Scaling`, and then in blocks."""
        super().setup_optimizers(trainer)
        name = type(self).__name__
        optimizer = only_optimizer(self.optimizers, name)
        if find_layer(optimizer, Blocks) is not None:
            if self._options:
                raise ValueError(
                    f"configure_optimizers returned blocks, so {name} takes no options, got "
                    f"{', '.join(self._options)}."
                )
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set, but not declared
            if isinstance(callback, Scaling):
                # world_size=1, because in blocks each device has a separate batch.
                optimizer = callback.make_rule(trainer, optimizer, world_size=1)
        self.optimizers = [self._make(optimizer, **self._options)]

    def lightning_module_state_dict(self) -> StateDict:
        self._synchronize()
        return super().lightning_module_state_dict()

    def _synchronize(self) -> None:
        for optimizer in self.optimizers:
            blocks = find_layer(optimizer, Blocks)
            if blocks is not None:
                blocks.synchronize()

    on_validation_start = _synchronize
    on_train_end = _synchronize


# -- helpers ---------------------------------------------------------------------------------------


def as_oss(optimizer: Optimizer, options: Mapping[str, Any]) -> Optimizer:
    """Return an OSS with this optimizer's class, arguments and parameter groups."""
    if find_layer(optimizer, OSS) is not None:
        if options:
            raise ValueError(
                f"configure_optimizers returned an OSS. Pass {', '.join(options)} to that OSS "
                "instead of the strategy."
            )
        return optimizer
    kind = type(optimizer)
    if optimizer.state:
        raise ValueError(
            f"this {kind.__name__} has state, which is lost in an OSS. Return a new optimizer from "
            "configure_optimizers."
        )
    arguments, unknown = constructor_arguments(optimizer)
    # The OSS uses the existing dicts of groups, in which schedulers set the learning rate.
    oss = OSS(optimizer.param_groups, optim=kind, **options, **arguments)
    if unknown or oss.optim.defaults != optimizer.defaults:
        raise ValueError(
            f"some arguments of {kind.__name__} are not in its defaults. Return an OSS from "
            f"configure_optimizers: mh.OSS(self.parameters(), optim={kind.__name__}, lr=...)."
        )
    # Prevents a warning of torch's schedulers: the OSS steps instead of the plain optimizer.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return oss


def use_sharded_scaler(plugin: object) -> None:
    """Use a scaler that skips a step on all ranks after an overflow on any rank."""
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


def _take(options: dict[str, Any], of: type) -> dict[str, Any]:
    names = set(inspect.signature(of).parameters) - {"params", "module", "optim", "optimizer"}
    return {name: options.pop(name) for name in sorted(names & options.keys())}


def _check_options_known(options: Mapping[str, object], name: str, wrapper: str) -> None:
    # DDPStrategy would pass unknown options to DistributedDataParallel.
    unknown = sorted(options.keys() - inspect.signature(DDPStrategy).parameters.keys())
    if unknown:
        raise TypeError(
            f"{name} got unknown options: {', '.join(unknown)}. It takes the options of {wrapper} "
            "and DDPStrategy."
        )

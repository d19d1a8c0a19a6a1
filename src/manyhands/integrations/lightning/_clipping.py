"""`Trainer(gradient_clip_val=...)` where Lightning's own clipping cannot work.

    loss scale   With "16-mixed" Lightning refuses to clip for an optimizer that unscales its
                 gradients itself, as rules and blocks do. Here gradients are unscaled before.
    sharded      torch's clip_grad_norm_ would take the norm of this rank's shard. Under
                 ShardedDataParallel the OSS knows the norm of the whole.

A LightningModule clips through `clip_gradients` of the Trainer's precision plugin. That is replaced
on the instance while the Trainer fits.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from manyhands._core.wrappers import find_layer, supports_amp
from manyhands.sharding.zero._oss import OSS


def replace_clipping(plugin: Precision) -> None:
    """Let a precision plugin clip gradients that are sharded, or multiplied by the loss scale."""

    # typed loosely: Lightning passes an enum or a string
    def clip_gradients(
        optimizer: Optimizer, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        if clip_val is None or clip_val <= 0:
            return
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None and supports_amp(optimizer):
            scaler.unscale_(optimizer)
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value":
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.clamp_(-clip_val, clip_val)
        elif (oss := find_layer(optimizer, OSS)) is not None and oss._reducer is not None:
            oss.clip_grad_norm(float(clip_val))
        else:
            plugin.clip_grad_by_norm(optimizer, clip_val)

    vars(plugin)["clip_gradients"] = clip_gradients


def restore_clipping(plugin: Precision) -> None:
    """Give the plugin its own method back."""
    vars(plugin).pop("clip_gradients", None)

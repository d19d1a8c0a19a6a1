"""Errors for torch's `Join` and `DistributedDataParallel.join`.

Inside `Join`, a rank without data repeats the other ranks' collectives. Our collectives depend on
decisions in each step (accumulation, clipping, a gradient scaler) that such a rank does not know.
"""

from __future__ import annotations

EVEN_INPUTS = (
    "Give every rank the same number of batches, as manyhands.Cursor does. With "
    "ShardedDataParallel, a rank without data may call optimizer.step() without a backward pass. "
    "With DistributedDataParallel, ddp.join(throw_on_early_termination=True) ends the loop on all "
    "ranks."
)


def refuse_join(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} does not support torch's Join: a rank without data would not take part in its "
        f"collectives, and the other ranks would wait. {EVEN_INPUTS}"
    )

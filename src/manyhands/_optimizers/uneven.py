"""Refuse torch's `Join` and `DistributedDataParallel.join`, which are for uneven batches.

Inside `Join`, a rank without data repeats the collectives of the other ranks' steps. Ours cannot be
repeated there: accumulation, clipping and a gradient scaler decide in each step which of them take
place, and a rank without data does not see that decision.
"""

from __future__ import annotations

EVEN_INPUTS = (
    "Give every rank the same number of batches, as manyhands.Cursor does. With "
    "ShardedDataParallel, a rank without data may call optimizer.step() without a backward pass. "
    "With DistributedDataParallel, ddp.join(throw_on_early_termination=True) ends the loop on all "
    "ranks."
)


def refuse_join(name: str) -> RuntimeError:
    """Return the error for an object of ours that is used inside `Join`."""
    return RuntimeError(
        f"{name} does not support torch's Join: a rank without data would not take part in its "
        f"collectives, and the other ranks would wait. {EVEN_INPUTS}"
    )

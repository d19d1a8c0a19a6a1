"""Use this library inside other libraries' training loops. Each is imported only by its name.

accelerate.py    Accelerate: `prepare`, `RuleState`
lightning/       Lightning: callbacks for rules and `Ramp`, strategies for sharding and blocks
ray.py           Ray: `CrewStore`, `SaveBeforeResize`
transformers.py  the Hugging Face Trainer: `attach`
_whole_state.py  the state of an optimizer whose parameters are sharded

Or by `_optimizers/foreign.py`, when it meets an object of a library in `PREPARES`.
"""

PREPARES = ("accelerate",)  # libraries that put wrappers around optimizers

ADVICE = {  # added to an error message if a library is in use
    "no DDP": {
        "accelerate": "(With Accelerate, manyhands.integrations.accelerate.prepare(accelerator, "
        "model, optimizer) leaves DistributedDataParallel out.)",
    },
    "replaced parameters": {
        "accelerate": "With Accelerate: mh.AdaScale(accelerator.prepare(optimizer)).",
    },
}

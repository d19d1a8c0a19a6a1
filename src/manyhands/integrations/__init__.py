"""Integrations with the training loops of other libraries.

accelerate.py    Accelerate: `prepare`, `RuleState`
lightning/       Lightning: callbacks for rules and `Ramp`, strategies for sharding and blocks
ray.py           Ray: `CrewStore`
transformers.py  the Hugging Face Trainer: `attach`, `use_cursor`
_trainer_cursor.py  the Trainer's data: `use_cursor`

Importing `manyhands` imports no integration. `_optimizers/foreign.py` imports the integration of a
library in `PREPARES` when it finds an object of that library.
"""

PREPARES = ("accelerate",)  # libraries with optimizer wrappers

ADVICE = {  # appended to an error message if the library is in use
    "no DDP": {
        "accelerate": "(With Accelerate, manyhands.integrations.accelerate.prepare(accelerator, "
        "model, optimizer) leaves DistributedDataParallel out.)",
    },
    "replaced parameters": {
        "accelerate": "With Accelerate: mh.AdaScale(accelerator.prepare(optimizer)).",
    },
}

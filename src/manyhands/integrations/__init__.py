"""Other libraries' training loops, with this library inside. Each is imported only by its name.

_step_passes.py          steps of changing length, for trainers that count batches
accelerate.py            Accelerate: `prepare`, `RuleState`
lightning/               Lightning: rules and `Ramp` as callbacks, sharding and blocks as strategies
_transformers_checks.py  the Hugging Face Trainer: settings that a rule cannot work with
transformers.py          the Hugging Face Trainer: `attach`
"""

"""Other libraries' training loops, with this library inside. Each is imported only by its name.

_step_passes.py  steps of changing length, for trainers that count batches
accelerate.py    Accelerate: `prepare`, `RuleState`
lightning/       Lightning: callbacks for rules and `Ramp`, strategies for sharding and blocks
ray.py           Ray: `CrewStore`, `SaveBeforeResize`
transformers/    the Hugging Face Trainer: `attach`
"""

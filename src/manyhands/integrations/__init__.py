"""Other libraries' training loops, with this library inside. Each is imported only by its name.

accelerate.py    Accelerate: `prepare`, `RuleState`
lightning/       Lightning: callbacks for rules and `Ramp`, strategies for sharding and blocks
ray.py           Ray: `CrewStore`, `SaveBeforeResize`
transformers.py  the Hugging Face Trainer: `attach`
"""

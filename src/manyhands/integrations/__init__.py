"""Other libraries' training loops, with this library inside. Each is imported only by its name.

lightning/       Lightning: callbacks for rules and `Ramp`, strategies for sharding and blocks
transformers.py  the Hugging Face Trainer: `attach`
"""

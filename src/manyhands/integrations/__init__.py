"""This library inside of other libraries' training loops. A file is imported only by its name.

transformers.py  the Hugging Face Trainer: `attach`
"""

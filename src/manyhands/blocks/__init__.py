"""When to talk: workers take steps of their own, and agree on a common point once in a block."""

"""What the benchmarks of sharding share: a model, contenders, how they are measured."""

"""A stand-in for a process group, which knows its rank and size and can send nothing."""


class DummyProcessGroup:
    """Stands in for a process group where only its rank and size are needed.

    >>> import manyhands as mh
    >>> group = mh.DummyProcessGroup(rank=0, size=1)
    >>> group.rank(), group.size()
    (0, 1)

    Use it in tests and experiments with one rank, without a launcher or `init_process_group`.
    Nothing can be sent through it, so with a larger size only code that sends nothing works.
    """

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(
                f"rank must be from 0 to size - 1, got rank {rank} and size {size}. "
                "For one rank use DummyProcessGroup(rank=0, size=1)."
            )
        self._rank = rank
        self._size = size

    # Methods, not attributes, as on torch's ProcessGroup.

    def rank(self) -> int:
        """Return the rank given to the constructor."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks given to the constructor."""
        return self._size

    def __repr__(self) -> str:
        return f"DummyProcessGroup(rank={self._rank}, size={self._size})"

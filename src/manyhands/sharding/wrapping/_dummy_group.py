"""A process group that has members on paper only."""


class DummyProcessGroup:
    """Stands in for a process group where only a rank and a size are asked for.

    >>> import manyhands as mh
    >>> group = mh.DummyProcessGroup(rank=0, size=1)
    >>> group.rank(), group.size()
    (0, 1)

    It is for tests, and for trying things out, in a world of one: no launcher, no
    `init_process_group`. Nothing can be sent through it, so with a larger size only code that
    sends nothing works.
    """

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(
                f"rank must be from 0 to size - 1, got rank {rank} and size {size}. "
                "A world of one is DummyProcessGroup(rank=0, size=1)."
            )
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        """The rank it was made with."""
        return self._rank

    def size(self) -> int:
        """The number of ranks it was made with."""
        return self._size

    def __repr__(self) -> str:
        return f"DummyProcessGroup(rank={self._rank}, size={self._size})"

"""What the tensors of a checkpoint are called, so that no two have one name.

    model/NAME                     a parameter or buffer
    optimizer.0/ENTRY/NAME         an entry of a parameter's state
    optimizer.0/options.1.lr       of the options of its second parameter group
    optimizer.0/rule.x.y           of the scaling rule's state; likewise `other`
    optimizer.0/blocks.anchor/NAME, optimizer.0/replica.1/...   see `_blocks.py`, `_replicas.py`
    scheduler.0.x                  of a scheduler's state
    value/NAME.x.0.y               of the user's own value: value["x"][0]["y"]
    value/NAME/PARAMETER           of a module among them
    random/RANK/GENERATOR          of each worker

Where a key of a dict becomes part of a name, a point, a slash or a percent sign in it is written as
in a web address. So {"a": {"b": t}} is `a.b`, and {"a.b": t} is `a%2Eb`.
"""

from __future__ import annotations

from typing import Any

_ESCAPES = str.maketrans({"%": "%25", ".": "%2E", "/": "%2F"})


def escaped(key: str) -> str:
    """A key of a dict, or an entry's name, as part of a tensor's name."""
    return key.translate(_ESCAPES)


def below(path: str, key: object) -> str:
    """The name of what a container called `path` has under a key or at a place."""
    return f"{path}.{escaped(str(key))}"


def state_key(prefix: str, entry: str, name: str) -> str:
    """An entry of a parameter's state."""
    return f"{prefix}/{escaped(entry)}/{name}"


def put_new(tensors: dict[str, Any], key: str, tensor: Any) -> None:
    """Add a tensor; one that would take another's place is an error."""
    if key in tensors:
        raise ValueError(
            f"two tensors of this checkpoint would be called {key!r}, and one of them be lost. "
            "Rename one of them, or leave it out."
        )
    tensors[key] = tensor

"""The options of blocks as they are saved, under which names users give them, and what may change.

A state dict keeps the options by the engine's names, which all methods have in common ("every",
"outer.momentum"), so that a run may go on under another name of the same method. Users see and
give those of the class that they use: for `BMUF` these two are `global_sync_iter` and
`block_momentum`. `names` below leads from the engine's to the class's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any

from manyhands.blocks._outer import Outer

Names = Mapping[str, str]


def settings_of(outer: Outer) -> dict[str, Any]:
    """An outer step by its kind and settings; by what it says of itself, if it does so."""
    if type(outer).__repr__ is not Outer.__repr__ and not is_dataclass(outer):
        return {"outer": repr(outer)}
    plain = {
        name: value if isinstance(value, bool | int | float | str | None) else repr(value)
        for name, value in sorted(vars(outer).items())
    }
    return {"outer": type(outer).__name__, **{f"outer.{name}": v for name, v in plain.items()}}


def as_named(options: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Options by the names of the class."""
    return {names.get(name, name): value for name, value in options.items()}


def sorted_out(
    who: str,
    overrides: Mapping[str, Any],
    options: Mapping[str, Any],
    names: Names,
    groups: Iterable[Mapping[str, Any]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Which overrides are of the blocks, by the engine's names, and which of parameter groups.

    `groups` are those that are here and those that were saved: what no group has is a mistake.
    """
    ours = {name: name for name in options} | {names.get(name, name): name for name in options}
    known = {name for group in groups for name in group} - {"params", "param_names"}
    for_blocks, for_groups = {}, {}
    for name, value in overrides.items():
        if name in ours:
            for_blocks[ours[name]] = value
        elif name in known:
            for_groups[name] = value
        else:
            raise ValueError(
                f"optimizer_overrides has {name}={value!r}, which is an option neither of the "
                f"parameter groups ({', '.join(sorted(known))}) nor of {who} "
                f"({', '.join(as_named(options, names))})."
            )
    return for_blocks, for_groups


def check_options(
    saved: Mapping[str, Any], options: Mapping[str, Any], changed: Mapping[str, Any], names: Names
) -> None:
    """Raise where the saved run had other options, unless they were `changed` on purpose."""
    meant = set(changed)
    for name, value in changed.items():
        here = options[name]
        if name == "outer" and isinstance(value, Outer):  # all of its settings are meant
            value, here = settings_of(value), _outer_in(options)
            meant |= here.keys()
        if value != here and str(value) != str(here):
            raise ValueError(
                f"optimizer_overrides has {names.get(name, name)}={changed[name]!r}, and the "
                f"optimizer was made with {here}. Make it with what you want to change to."
            )
    differ = [n for n in options if n not in meant and saved.get(n) != options[n]]
    if differ:
        called = {name: names.get(name, name) for name in differ}
        listed = "; ".join(f"{called[n]}: saved {saved.get(n)}, now {options[n]}" for n in differ)
        overrides = {called[name]: options[name] for name in differ}
        raise ValueError(
            f"this state dict is of a run with other options: {listed}. Make the optimizer with "
            "the options it was saved with, or say that the change is meant: "
            f"load_state_dict(state, optimizer_overrides={overrides})."
        )


def _outer_in(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in options.items() if name.partition(".")[0] == "outer"}

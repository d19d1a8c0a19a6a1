"""Pick the modules of a model that get a wrapper, as a policy decides. Changes nothing.

Three walks over the model:

    down     the policy decides which modules to look into; modules inside all others are left alone
    paths    count the paths to each module and parameter
    up       the policy decides which modules to wrap; parameters that no wrapper has taken count
             for the module around

A model need not be a tree: a module may be at two places, and two modules may hold one parameter.
A module's wrapper may take such a parameter only if all of its places are inside that module, that
is, if

    paths(root, parameter) = paths(root, module) * paths(module, parameter)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from torch import nn

from manyhands.sharding.wrapping._policies import POLICY_KEYWORDS, Policy


def pick_modules(root: nn.Module, policy: Policy, wrappers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules to wrap, inner ones first. `wrappers` are wrapped already."""
    wrappers = set(wrappers)
    # A parameter that is in a wrapper counts nowhere else, even if it is tied to one outside.
    wrapped_params = {param for wrapper in wrappers for param in wrapper.parameters()}

    def ask(module: nn.Module, recurse: bool, params: set[nn.Parameter]) -> bool:
        number = sum(param.numel() for param in params - wrapped_params)
        arguments = (module, recurse, number, module is root)
        return policy(**dict(zip(POLICY_KEYWORDS, arguments, strict=True)))

    paths = _PathCounts()
    entered = _find_entered(root, lambda m: m not in wrappers and ask(m, True, {*m.parameters()}))
    to_wrap = []
    # The parameters in each module that no wrapper inside it has taken. Filled bottom up, once for
    # each module, however many paths lead to it.
    rest: dict[nn.Module, set[nn.Parameter]] = {wrapper: set() for wrapper in wrappers}

    def rest_of(module: nn.Module) -> set[nn.Parameter]:
        if module not in rest:
            params = set(_own(module)).union(*(rest_of(child) for _, child in children(module)))
            wanted = module in entered and ask(module, False, params)
            if wanted and all(paths.all_lead_through(module, param, root) for param in params):
                to_wrap.append(module)
                params = set()
            rest[module] = params
        return rest[module]

    rest_of(root)
    return to_wrap


def children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all children by name. `named_children` would leave out a child's second name."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module._parameters.values() if param is not None]


def _find_entered(root: nn.Module, enters: Callable[[nn.Module], bool]) -> set[nn.Module]:
    """Return the modules that the policy looks into."""
    entered: dict[nn.Module, bool] = {}
    # Modules inside one that is not entered. They are left alone even if they are elsewhere, too:
    # attention reads the weights of a module inside it without calling that module.
    sealed: set[nn.Module] = set()

    def walk(module: nn.Module) -> None:
        if module in entered:
            return
        entered[module] = enters(module)
        if entered[module]:
            for _, child in children(module):
                walk(child)
        else:
            sealed.update(inner for inner in module.modules() if inner is not module)

    walk(root)
    return {module for module, yes in entered.items() if yes} - sealed


class _PathCounts:
    """Counts the paths from a module down to each module and parameter in it."""

    def __init__(self) -> None:
        self._known: dict[nn.Module, Counter[nn.Module | nn.Parameter]] = {}

    def below(self, module: nn.Module) -> Counter[nn.Module | nn.Parameter]:
        if module not in self._known:
            # One path from the module to itself and to each of its own parameters.
            counts: Counter[nn.Module | nn.Parameter] = Counter([module, *_own(module)])
            for _, child in children(module):
                counts.update(self.below(child))
            self._known[module] = counts
        return self._known[module]

    def all_lead_through(self, module: nn.Module, param: nn.Parameter, root: nn.Module) -> bool:
        """Return whether every path from the root to the parameter passes through the module."""
        from_root = self.below(root)
        return from_root[param] == from_root[module] * self.below(module)[param]

"""Switch dropout off, and draw equal random numbers for all samples.

Random numbers must not depend on the division of samples among ranks. Between the batches of a
loader and inside modules, each draw is therefore equal for all samples and on all ranks. Loaders
draw unchanged numbers.
"""

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F

from manyhands.tools.check._machine import wrap

DRAWS = ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like")
FILLS = (
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_",
)  # fmt: skip
GIVEN = {"poisson": 1, "_standard_gamma": 1, "_sample_dirichlet": 2}  # dimensions with samples
NORMAL = Tensor.normal_  # before it is replaced


class FrozenNoise:
    """Replaces random numbers of this process while they are frozen."""

    def __init__(self, exchange: Callable[[Tensor], Tensor]) -> None:
        self.exchange = exchange  # of random numbers from a generator of the script
        self.frozen = False
        self.step = 0  # of the optimizer
        self.used: set[str] = set()  # kinds of replaced numbers
        # The script's states of `random` and numpy.
        self.python: tuple[Any, Any] | None = None

    def patch(self) -> None:
        for name in dir(F):
            if "dropout" in name:
                wrap(F, name, self._no_dropout)
        wrap(F, "scaled_dot_product_attention", self._attention)
        for name in DRAWS:
            wrap(torch, name, self._draw)
        for name in FILLS:
            wrap(Tensor, name, self._draw)
        wrap(torch, "bernoulli", self._bernoulli)
        wrap(torch, "normal", self._normal)
        wrap(torch, "multinomial", self._multinomial)
        for name in GIVEN:
            wrap(torch, name, self._draw_rows)

    def freeze(self) -> None:
        """Draw equal numbers, also with `random` and numpy."""
        self.frozen = True
        if self.python is None:
            self.python = (random.getstate(), numpy.random.get_state())
        random.seed(self.step)
        numpy.random.seed(self.step)

    def thaw(self) -> None:
        self.frozen = False
        if self.python is not None:
            random.setstate(self.python[0])
            numpy.random.set_state(self.python[1])
            self.python = None

    def _no_dropout(
        self, _: Any, input: Tensor, p: float = 0.5, training: bool = True, *__: Any, **___: Any
    ) -> Tensor:
        if p and training:
            self.used.add("dropout")
        return input

    def _attention(
        self, attention: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None,
        dropout_p: float = 0.0, *args: Any, **named: Any,
    ) -> Tensor:  # fmt: skip
        if dropout_p:
            self.used.add("dropout")
        return attention(query, key, value, attn_mask, 0.0, *args, **named)

    def _replaces(self, named: dict[str, Any]) -> bool:
        """Return whether to replace a draw."""
        if not self.frozen or named.get("generator") is not None:
            return False
        self.used.add("noise")
        return True

    @contextmanager
    def _seeded(self, *key: Any) -> Iterator[None]:
        """Seed torch's generator temporarily with the step and `key`."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(zlib.crc32(repr((self.step, *key)).encode()))
            yield

    # Each method makes the original draw first, to advance the random state.

    def _draw(self, draw: Any, *args: Any, **named: Any) -> Any:
        out = draw(*args, **named)
        if self.frozen and named.get("generator") is not None and not out.requires_grad:
            return out.copy_(self.exchange(out))
        if out.requires_grad or not self._replaces(named):
            return out
        name = draw.__name__
        if name == "randperm":
            return torch.arange(len(out), dtype=out.dtype)
        row = out[:1] if out.dim() else out
        with torch.no_grad(), self._seeded(name, *row.shape):
            if name in ("randn", "randn_like"):  # values depend on the number of rows
                row = NORMAL(torch.empty_like(row))
            elif name in FILLS:
                row = draw(torch.empty_like(row), *args[1:], **named)
            else:
                row = draw(*args, **named)
            if out.dim():
                row = row[:1]
            return out.copy_(row.expand_as(out))

    def _bernoulli(self, _: Any, p: Tensor, **__: Any) -> Tensor:
        return (torch.rand_like(p) < p).to(p.dtype)

    def _normal(self, draw: Any, mean: Any, std: Any = 1.0, *args: Any, **named: Any) -> Tensor:
        out = draw(mean, std, *args, **named)
        if self.frozen and named.get("generator") is not None:
            return self.exchange(out)
        if self._replaces(named):
            with torch.no_grad():
                out.copy_(mean + std * torch.randn_like(out))
        return out

    def _multinomial(
        self, draw: Any, input: Tensor, num_samples: int, replacement: bool = False, **named: Any
    ) -> Tensor:
        out = draw(input, num_samples, replacement, **named)
        if self._replaces(named):
            most_probable = input.topk(1 if replacement else num_samples).indices
            out.copy_(most_probable.expand_as(out))
        return out

    def _draw_rows(self, draw: Any, given: Tensor, **named: Any) -> Tensor:
        """Draw from the distribution of each sample, or from a common distribution."""
        out = draw(given, **named)
        if not self._replaces(named):
            return out
        if given.dim() < GIVEN[draw.__name__]:
            given = given.unsqueeze(0)
        rows = []
        for row in given:
            with self._seeded(draw.__name__):
                rows.append(draw(row))
        return torch.stack(rows).reshape(out.shape)

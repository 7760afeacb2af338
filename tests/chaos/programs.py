"""What the fuzzer runs: a program is compiled once, and tried with many sets of values."""

import abc
import functools
from collections.abc import Callable
from typing import Any

import helpers
import jax
import numpy as np
from helpers import Rng

from jax_ep import Group, Implementation


class Program(abc.ABC):
    """One compiled program of one op, its shapes and options drawn at random.

    Attributes:
      options: what was drawn, to be shown where it fails.
      by: the arguments of the op that say where it runs.
      given: options that are not drawn.
    """

    def __init__(self, rng: Rng, group: Group, implementation: Implementation, **given: Any):
        self.group, self.given = group, given
        self.implementation: Implementation = implementation
        self.by: dict[str, Any] = {"group": group, "implementation": implementation}
        self.options: dict[str, Any] = {}
        self.run = compiled(self.prepare(rng), group)

    @abc.abstractmethod
    def prepare(self, rng: Rng) -> Callable[..., Any]:
        """Draws shapes and options; returns the function of one rank."""

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{type(self).__name__} on {self.group.size} ranks by {self.implementation}: {options}"

    @abc.abstractmethod
    def check(self, rng: Rng) -> bool:
        """Runs it with random values and compares all results with numpy.

        Returns:
          Whether the values were to be refused, and were.

        Raises:
          AssertionError: a value is wrong, or there was no error where there should have been one.
        """


def compiled(function: Callable[..., Any], group: Group) -> Callable[..., Any]:
    """As `helpers.per_rank`, but arrays without elements are cut out of others inside.

    jaxlib 0.10 and 0.11 may fail, or crash, when they compile a shard_map with empty operands.
    """

    @functools.cache
    def program(shapes: tuple[tuple[int, ...], ...]) -> Callable[..., Any]:
        def body(*fuller: jax.Array) -> Any:
            return function(*(x[tuple(map(slice, shape))] for x, shape in zip(fuller, shapes, strict=True)))

        return helpers.per_rank(body, group.mesh)

    def fill(x: np.ndarray) -> np.ndarray:
        return x if x.size else np.zeros([max(1, n) for n in x.shape], x.dtype)

    return lambda *operands: program(tuple(x.shape[1:] for x in operands))(*map(fill, operands))

"""Comparisons that know NaN and infinity, and random values that hold some."""

from typing import Any

import helpers
import jax.numpy as jnp
import numpy as np

STRANGE = (np.nan, np.inf, -np.inf)


def assert_near(
    actual: Any, exact: np.ndarray, magnitude: np.ndarray, roundings: float, what: str, floor: float | np.ndarray = 0.0
) -> None:
    """`exact` in float64; NaN and infinities are where it has them, else it is so many roundings or `floor` off."""
    if actual.dtype.kind in "biu":
        assert_same(actual, exact, what)
        return
    found, info = helpers.wide(actual).astype(np.float64), jnp.finfo(actual.dtype)
    assert found.shape == exact.shape, f"{what}: {found.shape} is not {exact.shape}"
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(found[~finite], exact[~finite], what)
    allowed = (roundings * float(info.eps) + 64 * 2.0**-23) * magnitude[finite] + float(info.smallest_subnormal)
    allowed += np.broadcast_to(floor, exact.shape)[finite]
    error = np.abs(found[finite] - exact[finite])
    bad = ~(error <= allowed)
    if bad.any():
        worst = int(np.argmax(error - allowed))
        values = f"{found[finite][worst]!r} instead of {exact[finite][worst]!r}, {allowed[worst]:g} off is allowed"
        raise AssertionError(f"{what}: {bad.sum()} of {bad.size} values differ: {values}")


def assert_same(actual: Any, wanted: Any, what: str) -> None:
    np.testing.assert_array_equal(helpers.wide(actual), helpers.wide(wanted), what)


def draw_floats(rng: helpers.Rng, shape: tuple[int, ...], dtype: Any, strange: bool = False) -> np.ndarray:
    """Normal values, sometimes with zeros; `strange` puts NaN or infinity into a few places."""
    values = rng.standard_normal(shape)
    if rng.random() < 0.2:
        values *= rng.random(shape) < 0.5
    if strange and values.size:
        values.reshape(-1)[rng.integers(0, values.size, rng.integers(1, 4))] = rng.choice(STRANGE)
    return values.astype(dtype)


def pick(rng: helpers.Rng, *choices: Any) -> Any:
    return choices[rng.integers(len(choices))]

"""A few seconds of each of the chaos scripts; CI runs them for longer, and each is a command (tests/chaos)."""

import helpers
import jax
import numpy as np
import pytest
from chaos.compare import assert_near

# Of the fuzzer hundreds of routings and of sums of sparse rows, in two rounds of its programs.
LIMITS = {"fuzz": ("--configurations=1440", "--values=60", "--seconds=20")}


@pytest.mark.parametrize("script", ["fuzz", "faults", "lifecycle"])
def test_nothing_is_wrong_or_lost(script: str, native: None) -> None:
    if script == "faults" and jax.default_backend() != "cpu" and len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    limits = LIMITS.get(script, ("--configurations=100", "--seconds=5"))
    output = helpers.run_python("-m", f"tests.chaos.{script}", f"--seed={helpers.SEED}", *limits)
    names, values = (line.split("|") for line in output.splitlines()[-2:])
    table = {name.strip(): value.strip() for name, value in zip(names, values, strict=True)}
    assert table["script"] == script
    assert int(table["configurations"]) > 0
    assert int(table["phases struck"]) > 0 or script != "faults"
    assert table["wrong values"] == table["lost"] == "0"


@pytest.mark.parametrize(
    "found", [1.1, np.nan, np.inf], ids=["another value", "NaN for a number", "infinity for a number"]
)
def test_a_wrong_value_is_seen(found: float) -> None:
    exact = np.array([1.0, np.nan, -np.inf])
    assert_near(exact.astype(np.float32), exact, np.abs(exact), 1, "right")
    with pytest.raises(AssertionError, match="wrong"):
        assert_near(np.array([found, np.nan, -np.inf], np.float32), exact, np.abs(exact), 1, "wrong")
    with pytest.raises(AssertionError, match="wrong"):
        assert_near(np.array([1, 1, -np.inf], np.float32), exact, np.abs(exact), 1, "wrong")

"""Random programs of dispatch, combine and moe_mlp, with their gradients."""

import abc
from collections.abc import Callable
from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
from helpers import BIG, Case, Rng

from jax_ep import CapacityError, float8
from jax_ep.float8 import Float8Rows

from .compare import assert_near, assert_same, draw_floats, pick
from .programs import Program

CHUNK_EDGES = (511, 512, 513, 1023, 1024, 1025, 1100)  # tokens, where ways to travel change


def draw_shape(rng: Rng, size: int) -> dict[str, int]:
    kind = rng.random()
    tokens = int(rng.integers(1, 17) if kind < 0.65 else rng.integers(17, 80) if kind < 0.92 else 0)
    top_k = int(pick(rng, 1, 1, 2, 2, 3, 4, 6, 8))
    if kind > 0.96:
        tokens, top_k = pick(rng, *CHUNK_EDGES), min(top_k, 4)
    return {"tokens": tokens, "top_k": top_k, "num_experts": size * int(pick(rng, 1, 1, 2, 2, 3, 5, 16, 40))}


def draw_ids(rng: Rng, shape: tuple[int, ...], experts: int) -> np.ndarray:
    """Uniform, crowded on few experts or one, or nothing at all; some skipped, some outside of the experts."""
    kind = rng.integers(5)
    if kind == 0:
        hot = rng.integers(0, experts, rng.integers(1, 4))
        ids = rng.choice(hot, shape)
    elif kind == 1:
        ids = np.minimum(rng.zipf(1.5, shape) - 1, experts - 1)
    else:
        ids = rng.integers(0, experts, shape)
    if rng.random() < 0.4:
        ids = np.where(rng.random(shape) < rng.random(), -1, ids)
    if rng.random() < 0.3:
        strange = rng.choice(np.array([-2, experts, experts + 1, BIG, -BIG - 1]), shape)
        ids = np.where(rng.random(shape) < 0.2, strange, ids)
    return ids.astype(np.int32)


class Routed(Program):
    """A program with a dispatch in it: draws its options, and what it is tried with.

    Options are the arguments of `dispatch`, and `tokens`, `top_k`, `hidden` and `dtype`.
    """

    strange_tokens = strange_weights = True
    wires: tuple[str, ...] = ("float8",)

    def prepare(self, rng: Rng) -> Callable[..., Any]:
        self.options = self.draw_options(rng) | self.given
        self.dtype, self.in_float8 = self.options["dtype"], self.options["wire"] is not None
        shape = ("tokens", "top_k", "hidden", "dtype")
        self.keywords: dict[str, Any] = {name: x for name, x in self.options.items() if name not in shape}
        return self.function()

    @abc.abstractmethod
    def function(self) -> Callable[..., Any]:
        """Of tokens, ids, weights, and what `more` draws."""

    def more(self, rng: Rng, case: Case) -> tuple[np.ndarray, ...]:
        return ()

    @abc.abstractmethod
    def assert_right(self, results: Any, case: Case, more: Any, expected: oracle.Expected) -> None: ...

    def check(self, rng: Rng) -> bool:
        case = self.draw(rng)
        more, expected, capacity = self.more(rng, case), self.expected(case), self.capacity()
        if self.options["on_overflow"] == "drop" or not (expected.needed > capacity).any():
            self.assert_right(helpers.fetch(self.run(*case, *more)), case, more, expected)
            return False
        rank = int(np.argmax(expected.needed > capacity))
        match = f"rank {rank} needs {expected.needed[rank]} rows but capacity is {capacity}"
        with helpers.expect_failure(self.group, CapacityError, match, self.implementation):
            self.assert_nothing(helpers.fetch(self.run(*case, *more)))
        return True

    def assert_nothing(self, results: Any) -> None:
        """What a GPU delivers where rows find no room."""

    def draw_options(self, rng: Rng) -> dict[str, Any]:
        shape, wire = draw_shape(rng, self.group.size), pick(rng, *self.wires) if rng.random() < 0.3 else None
        alignment = int(pick(rng, 1, 1, 1, 2, 8, 16))
        most = self.group.size * shape["tokens"] * shape["top_k"]
        rows = int(rng.integers(1, max(2, pick(rng, most, most // self.group.size))))
        return shape | {
            "hidden": int(pick(rng, 128, 256, 384) if wire else pick(rng, 1, 3, 8, 17, 64, 130, 256)),
            "dtype": pick(rng, *helpers.DTYPES),
            "alignment": alignment,
            "on_overflow": "drop" if rng.random() < 0.4 else "raise",
            "wire": wire,
            "expand": bool(rng.random() < 0.5),
            "capacity": -(-rows // alignment) * alignment if rng.random() < 0.5 else None,
        }

    def draw(self, rng: Rng) -> Case:
        shape = (self.group.size, self.options["tokens"], self.options["top_k"])
        weights = draw_floats(rng, shape, np.float32, strange=self.strange_weights and rng.random() < 0.05)
        strange = self.strange_tokens and rng.random() < 0.2
        tokens = draw_floats(rng, (*shape[:2], self.options["hidden"]), self.dtype, strange)
        if self.in_float8:
            tokens[:, 1:2, :128] = 0  # a block without a largest value
        return Case(tokens, draw_ids(rng, shape, self.options["num_experts"]), weights)

    def expected(self, case: Case) -> oracle.Expected:
        options = {name: self.options[name] for name in ("num_experts", "alignment")}
        fp8 = self.in_float8 and bool(np.isfinite(helpers.wide(case.tokens)).all())
        with np.errstate(all="ignore"):
            return oracle.dispatch(*case, **options, capacity=self.capacity(), fp8=fp8)

    def capacity(self) -> int:
        if self.options["capacity"] is not None:
            return self.options["capacity"]
        experts, alignment = self.options["num_experts"] // self.group.size, self.options["alignment"]
        rows = self.group.size * self.options["tokens"] * min(self.options["top_k"], experts)
        return (rows + min(experts, rows) * (alignment - 1)) // alignment * alignment

    def assert_tokens(self, actual: np.ndarray, case: Case, expected: oracle.Expected) -> None:
        """Bit for bit; blocks of float8 that hold NaN or infinity may be NaN."""
        found, wanted = helpers.wide(actual), helpers.wide(expected.rows)
        if not self.in_float8:
            np.testing.assert_array_equal(found, wanted, "rows")
            return
        blocks = (*found.shape[:2], found.shape[2] // oracle.FP8_BLOCK, oracle.FP8_BLOCK)
        found, wanted = found.reshape(blocks), wanted.reshape(blocks)
        strange = ~np.isfinite(wanted)
        assert not np.isfinite(found[strange]).any(), "NaN or infinity came out as a number"
        clean = ~strange.any(axis=3)
        allowed = np.zeros_like(wanted)
        if not np.isfinite(helpers.wide(case.tokens)).all():  # `expected` is not rounded
            with np.errstate(invalid="ignore"):
                largest = np.abs(wanted).max(axis=3, keepdims=True)
                allowed = 1.01 * np.maximum(np.abs(wanted) / 8, largest * 2.0**-9 / 448)
                allowed += float(jnp.finfo(self.dtype).eps) * np.abs(wanted)
        error = np.abs(found[clean] - wanted[clean])
        assert (error <= allowed[clean]).all(), f"float8 tokens differ by {error.max()}"


class RoundTrip(Routed):
    """dispatch, what its routing says of rows, and combine of the very rows that arrived, perhaps in float8."""

    wires = ("float8", "float8", "float8_rows")

    def function(self) -> Callable[..., Any]:
        def experts(rows: Any) -> jax.Array:
            return float8.dequantize(rows, self.dtype) if isinstance(rows, Float8Rows) else rows

        both = helpers.round_trip(**self.by, **self.keywords, experts=experts)

        def with_rows(*operands: jax.Array) -> Any:
            out, sums = both(*operands)
            return out, sums, (out.routing.expert_of_row(), out.routing.weight_of_row(), out.routing.row_mask())

        return with_rows

    def assert_nothing(self, results: Any) -> None:
        if not isinstance(results[0].rows, Float8Rows):
            helpers.assert_nothing_delivered(results[0], self.implementation)

    def assert_right(self, results: Any, case: Case, more: Any, expected: oracle.Expected) -> None:
        (rows, sizes, _), combined, by_row = results
        assert_same(sizes, expected.group_sizes, "group_sizes")
        helpers.assert_routing(results[0], expected)
        rank, source, token, k = np.nonzero(expected.row_of >= 0)
        at = rank, expected.row_of[rank, source, token, k]

        def of_rows(values: np.ndarray) -> np.ndarray:
            found = np.zeros((len(sizes), self.capacity(), *values.shape[1:]), values.dtype)
            found[at] = values
            return found

        each = [[*given, self.capacity() - given.sum()] for given in sizes]
        expert = np.array([np.repeat(range(len(given)), given) for given in each])
        weight, real = of_rows(case.weights[source, token, k]), of_rows(np.ones(len(rank), bool))
        for name, mine, right in zip(("expert", "weight", "mask"), by_row, (expert, weight, real), strict=True):
            assert_same(mine, right, f"{name} of rows")
        if isinstance(rows, Float8Rows):
            scales = np.asarray(rows.scales)
            if np.isfinite(helpers.wide(case.tokens)).all():
                _, wanted = oracle.through_fp8(helpers.wide(case.tokens))
                assert_same(scales, of_rows(wanted[source, token, :: oracle.FP8_BLOCK]), "scales")
            with np.errstate(invalid="ignore"):
                wide = helpers.wide(rows.values) * np.repeat(scales, oracle.FP8_BLOCK, axis=2)
            rows = wide.astype(self.dtype)
        self.assert_tokens(rows, case, expected)
        with np.errstate(invalid="ignore", over="ignore"):
            exact = oracle.combine(rows, expected.targets, case.weights)
            magnitude = oracle.combine(np.abs(rows), expected.targets, np.abs(case.weights))
        assert_near(combined, exact, magnitude, 1, "combine")


class Gradients(Routed):
    """Gradients of tokens and weights, through dispatch, an elementwise expert and combine."""

    def function(self) -> Callable[..., Any]:
        def experts(rows: jax.Array) -> jax.Array:
            return 3 * rows if self.in_float8 else rows * rows

        both = helpers.round_trip(**self.by, **self.keywords, experts=experts)

        def layer(tokens: jax.Array, weights: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
            out, sums = both(tokens, ids, weights)
            return sums, out.routing.targets

        def pulled(tokens: jax.Array, ids: jax.Array, weights: jax.Array, above: jax.Array) -> Any:
            _, pull, targets = jax.vjp(lambda t, w: layer(t, w, ids), tokens, weights, has_aux=True)
            return *pull(above), targets

        return pulled

    def more(self, rng: Rng, case: Case) -> tuple[np.ndarray, ...]:
        return (draw_floats(rng, case.tokens.shape, self.dtype),)

    def assert_right(self, results: Any, case: Case, more: Any, expected: oracle.Expected) -> None:
        d_tokens, d_weights, targets = results
        assert_same(targets, expected.targets, "targets")
        arrived = targets >= 0
        tokens, cotangent = case.tokens.astype(np.float64), more[0].astype(np.float64)
        weights = np.where(arrived, case.weights.astype(np.float64), 0)
        info = jnp.finfo(self.dtype)
        with np.errstate(invalid="ignore"):
            slope = cotangent * (3 if self.in_float8 else 2 * tokens)
            terms = np.where(arrived[..., None], weights[..., None] * slope[:, :, None], 0)  # [R, T, K, H]
            steps = 4 * max(1, self.options["top_k"]) * (1 + np.nanmax(np.abs(slope), initial=0))
            magnitude, underflow = np.abs(terms).sum(axis=2), steps * float(info.smallest_subnormal)
            assert_near(d_tokens, terms.sum(axis=2), magnitude, 4, "gradient of the tokens", floor=underflow)
            if self.in_float8:  # their outputs are the rounded tokens
                return
            products = np.abs(tokens**2 * cotangent).sum(axis=2, keepdims=True)
            exact = np.where(arrived, (tokens**2 * cotangent).sum(axis=2, keepdims=True), 0)
        unit = float(info.eps) / float(jnp.finfo(np.float32).eps)
        # Where squares underflow.
        lost = float(info.smallest_normal) * self.options["hidden"] * np.abs(cotangent).max(initial=0)
        assert_near(d_weights, exact, np.where(arrived, products, 0), 2 * unit, "gradient of the weights", floor=lost)


class MoeMlp(Routed):
    """A mixture of gated MLPs, against every product in float64; NaN of a token stays in that token."""

    strange_weights = False  # infinity times a sum that is about 0 has the sign of its rounding

    def draw_options(self, rng: Rng) -> dict[str, Any]:
        options = super().draw_options(rng) | {"num_experts": self.group.size * int(pick(rng, 1, 2, 3)), "alignment": 1}
        self.strange_tokens, self.width = options["wire"] is None, int(pick(rng, 1, 8, 20))
        return options | ({"hidden": int(pick(rng, 4, 8, 24))} if self.strange_tokens else {})

    def function(self) -> Callable[..., Any]:
        own = {name: x for name, x in self.keywords.items() if name not in ("alignment", "num_experts", "expand")}
        return partial(helpers.moe_sums, **self.by, **own)

    def more(self, rng: Rng, case: helpers.Case) -> tuple[np.ndarray, ...]:
        return moe_oracle.draw_layer(rng, case.tokens, case.weights, self.options["num_experts"], self.width)[2:]

    def assert_right(self, results: Any, case: helpers.Case, more: Any, expected: oracle.Expected) -> None:
        gate, up, down = (x.reshape(-1, *x.shape[2:]).astype(np.float64) for x in more)
        # The sums, how large their terms may be, |x| |gate| |x| |up| |down|, and the steps of subnormals that tiny
        # values may lose: x gate and x up are off by one each, which is multiplied by the other, their product by one
        # more, and what leaves the expert by another.
        exact, magnitude, steps = (np.zeros(case.tokens.shape) for _ in range(3))
        rows = expected.rows.reshape(-1, case.tokens.shape[2]).astype(np.float64)
        for at in zip(*np.nonzero(expected.targets >= 0), strict=True):
            x, weight, expert = rows[expected.targets[at]], case.weights[at], case.ids[at]
            with np.errstate(all="ignore"):
                gated = x @ gate[expert]
                exact[at[:2]] += weight * ((gated / (1 + np.exp(-gated)) * (x @ up[expert])) @ down[expert])
                by_gate, by_up = (np.abs(x) @ np.abs(each[expert]) for each in (gate, up))
                magnitude[at[:2]] += np.abs(weight) * ((by_gate * by_up) @ np.abs(down[expert]))
                steps[at[:2]] += np.abs(weight) * ((1 + by_gate + by_up) @ np.abs(down[expert]) + 1)
        magnitude, steps = (np.where(np.isfinite(x), x, 1) for x in (magnitude, steps))
        floor = steps * float(jnp.finfo(self.dtype).smallest_subnormal)
        assert_near(results, exact, magnitude, 8, "moe_mlp", floor)

"""Sums of rows by id beside XLA's gather and segment_sum: `python -m jax_ep bench sums`."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import SparseRows, coalesce
from jax_ep.lax import ragged_dot

from .in_jit_loop import Loop, check_alike
from .runner import Bench, Row, Run
from .sparse import KINDS, SEED, Shape, draw_ids

Ways = tuple[Callable[..., Any], Callable[..., Any], tuple[jax.Array, ...]]  # ours, XLA's, their operands


@dataclasses.dataclass(frozen=True)
class Coalesced:
    """`coalesce` of rows with ids of one kind."""

    kind: str
    shape: Shape
    quick: bool = True

    def __str__(self) -> str:
        return f"coalesce {self.shape.entries:,} x {self.shape.width} float32, {self.kind} ids"

    def ways(self) -> Ways:
        ids = jnp.asarray(draw_ids(self.kind, self.shape, 1)[0])
        values = jax.random.normal(jax.random.key(SEED), (self.shape.entries, self.shape.width))
        return partial(coalesced, self.shape.num_rows), partial(segment_sum, self.shape.num_rows), (ids, values)


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The gradient of gathered rows of a product: each of `tokens` rows goes to `top` experts."""

    tokens: int
    hidden: int
    width: int
    experts: int
    top: int
    quick: bool = True

    def __str__(self) -> str:
        return f"gradient of gathered rows [{self.tokens:,}, {self.hidden}], top-{self.top} of {self.experts}, bfloat16"

    def ways(self) -> Ways:
        """Of indices, group sizes, matrices, the cotangent and the rows."""
        chosen = np.argsort(np.random.default_rng(SEED).random((self.tokens, self.experts)), axis=1)[:, : self.top]
        indices = (np.argsort(chosen.reshape(-1), kind="stable") // self.top).astype(np.int32)
        sizes = np.bincount(chosen.reshape(-1), minlength=self.experts).astype(np.int32)
        shapes = (self.experts, self.hidden, self.width), (len(indices), self.width), (self.tokens, self.hidden)
        keys = jax.random.split(jax.random.key(SEED), len(shapes))
        arrays = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
        operands = jnp.asarray(indices), jnp.asarray(sizes), *arrays
        return partial(by_rows, gathering_product), partial(by_rows, product_of_gathered), operands


def coalesced(num_rows: int, ids: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums, and the ids that they are of."""
    out = coalesce(SparseRows.from_entries(ids, values, num_rows=num_rows))
    return out.values, out.indices


def segment_sum(num_rows: int, ids: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    order = jnp.argsort(ids, stable=True)
    ids = ids[order]
    places = jnp.cumsum(jnp.diff(ids, prepend=-1) > 0) - 1
    sums = jax.ops.segment_sum(values[order], places, ids.shape[0], indices_are_sorted=True)
    return sums, jnp.full_like(ids, num_rows).at[places].set(ids)


def by_rows(product: Any, indices: jax.Array, sizes: jax.Array, rhs: jax.Array, d_out: Any, rows: Any) -> jax.Array:
    return jax.vjp(lambda x: product(indices, sizes, rhs, x), rows)[1](d_out)[0]


def gathering_product(indices: jax.Array, sizes: jax.Array, rhs: jax.Array, rows: jax.Array) -> jax.Array:
    return ragged_dot(rows, rhs, sizes, lhs_indices=indices)


def product_of_gathered(indices: jax.Array, sizes: jax.Array, rhs: jax.Array, rows: jax.Array) -> jax.Array:
    """As before, but XLA gathers the rows, and its scatter-add sums their gradient."""
    return ragged_dot(rows[indices], rhs, sizes)


CPU_CASES = [Coalesced("Zipf", Shape(10_000, 16, 2_000)), Gathered(32, 16, 16, 4, 2)]
GPU_CASES = [
    *(Coalesced(kind, Shape(5_000_000, 2048, 50_000)) for kind in KINDS),
    *(Coalesced(kind, Shape(10_000_000, 128, 524_288), quick=False) for kind in KINDS),
    *(Coalesced(kind, Shape(10_000_000, 64, 1_048_576)) for kind in KINDS),
    Gathered(32_768, 2048, 768, 128, 8),
]


def rows(case: Coalesced | Gathered, run: Run) -> Iterator[Row]:
    """Checks both against each other, and times them in turns."""
    ours, others, operands = case.ways()
    mine, wanted = (jax.tree.leaves(jax.jit(one)(*operands))[0] for one in (ours, others))
    check_alike(str(case), mine, wanted, 2.0**-6 if mine.dtype == jnp.bfloat16 else 1e-5)
    calls = 3 if run.on_cpu else 20
    loops = {name: Loop(one, operands[:-1], operands[-1], calls) for name, one in (("jax_ep", ours), ("XLA", others))}
    times = run.time(loops, hot=True)
    yield {
        "sums": case,
        **{f"{name}, us": f"{time:,.0f}" for name, time in times.items()},
        "of XLA": f"{times['jax_ep'] / times['XLA']:.2f}",
    }


BENCH = Bench(
    __doc__,
    lambda run: CPU_CASES if run.on_cpu else GPU_CASES,
    rows,
    quick="fewer shapes",
    products=True,
    open=lambda _: None,
)

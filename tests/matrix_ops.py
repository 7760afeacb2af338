"""Forms of matrix products with and without a collective, of sparse_all_reduce and of ragged_all_to_all, and what
numbers they must give.

As in matrix_forms.py, a function of [T, H] gives [T, H], so that a scan can apply it again.
"""

from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
from chaos.ragged import slices_of
from matmul_cases import OPS
from matrix_forms import BY_XLA, DTYPE, HIDDEN, TOKENS, Form, Function, Operands
from moe_oracle import through_float8

from jax_ep import Group, NodeOptions, SparseRows, float8, sparse_all_reduce
from jax_ep.lax import ragged_all_to_all, ragged_dot

SPARSE, RAGGED, LOCAL = "sparse_all_reduce", "ragged_all_to_all", "ragged_dot"
GROUPS = 3  # of rows
# By name: the op; of sparse sums how they are reduced, whether they are sharded, and their capacity; of ragged_dot
# whether it gathers rows, and "float8", or "quantized" if the matrices were quantized before.
FORMS: dict[str, Form] = {
    **{op: {"op": (op,)} for op in (*OPS, RAGGED)},
    **{LOCAL: {"op": (LOCAL, False, "")}, f"{LOCAL}, gathered": {"op": (LOCAL, True, "")}},
    **{f"{LOCAL}, {what}": {"op": (LOCAL, False, what), "precision": "float8"} for what in ("float8", "quantized")},
    "sparse sum": {"op": (SPARSE, "sum", False, TOKENS)},
    "sparse mean, sharded": {"op": (SPARSE, "mean", True, TOKENS)},
    "sparse mean_by_count, drop": {"op": (SPARSE, "mean_by_count", False, 3)},
    "sparse mean_by_count over nodes": {"op": (SPARSE, "mean_by_count", True, 2), "nodes": NodeOptions()},
}
FORMS |= {f"{name} by xla": FORMS[name] | BY_XLA for name in ("sparse mean, sharded", RAGGED, *OPS)}


def draw(form: Form, size: int, rng: helpers.Rng) -> Operands:
    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((size, *shape)).astype(DTYPE)

    floats: dict[str, Any] = {"tokens": normal(TOKENS, HIDDEN)}
    known: dict[str, Any] = {"ids": rng.integers(-1, TOKENS + (form["op"][0] == SPARSE), (size, TOKENS), np.int32)}
    exact = known
    if form["op"][0] in OPS:
        floats |= {
            "matrix": (normal(HIDDEN, HIDDEN) / HIDDEN**0.5).astype(DTYPE),
            "bias": np.repeat(normal(HIDDEN)[:1], size, axis=0),
        }
    if form["op"][0] == LOCAL:
        floats["matrices"] = (normal(GROUPS, HIDDEN, HIDDEN) / HIDDEN**0.5).astype(DTYPE)
        known["sizes"] = rng.multinomial(TOKENS - 1, [0.5, 0, 0.5], size).astype(np.int32)
        if form["op"][2] == "quantized":
            matrices: Any = np.repeat(floats.pop("matrices")[:1], size, axis=0)  # the same on all ranks
            known["matrices"] = jax.vmap(float8.quantize_weights)(matrices)
            exact = known | {"matrices": jax.vmap(lambda x: float8.dequantize(x, np.float32))(known["matrices"]) / size}
    if form["op"] == (RAGGED,):
        floats["output"] = normal(TOKENS, HIDDEN)
        known["slices"] = slices = slices_of(rng, rng.integers(0, 2, (size, size, 4 // size)), TOKENS, TOKENS)
        slices.input_offsets[0] = 0  # rank 0 sends a row several times, whose gradient is the sum of all cotangents
    return Operands(floats, *helpers.fetch((known, exact)))


def weighed(rows: jax.Array, size: int) -> jax.Array:
    """[R, T, H] times 1 to R, so that it matters whose rows are where."""
    return rows.reshape(-1, TOKENS, HIDDEN) * jnp.arange(1, size + 1, dtype=rows.dtype)[:, None, None]


def body(form: Form, group: Group) -> Function:
    by: dict[str, Any] = {"group": group, "implementation": form.get("implementation", "auto")}
    op, *settings = form["op"]

    def result(floats: Any, known: Any) -> jax.Array:
        x = floats["tokens"]
        if op == RAGGED:
            return ragged_all_to_all(x, floats["output"], *known["slices"], axis_name=group.axis_name, **by)
        if op == SPARSE:
            how = dict(zip(("op", "sharded", "capacity"), settings, strict=True))
            rows = SparseRows.from_entries(known["ids"], x, num_rows=TOKENS)
            return sparse_all_reduce(rows, on_overflow="drop", **how, **by).todense()
        if op == LOCAL:
            if settings[1] == "quantized":
                return float8.ragged_dot(x, known["matrices"], known["sizes"])
            matrices = jax.lax.psum(floats["matrices"], group.axis_name)  # the same on all ranks
            if settings[1]:
                return float8.ragged_dot(x, matrices, known["sizes"])
            return ragged_dot(x, matrices, known["sizes"], lhs_indices=known["ids"] if settings[0] else None)
        multiply = partial(OPS[op], rhs=floats["matrix"], bias=floats["bias"], **by)
        if op == "matmul_reduce_scatter":
            return multiply(weighed(jnp.stack([x] * group.size), group.size).reshape(-1, HIDDEN))
        return weighed(multiply(x), group.size).sum(axis=0) if op == "all_gather_matmul" else multiply(x)

    # Zeros that vary over ranks make the result vary; the sine gives it second derivatives.
    return lambda floats, known: jnp.sin(result(floats, known).astype(DTYPE) + 0 * floats["tokens"])


def exact(form: Form) -> Function:
    """On all ranks, in float64."""
    op, *settings = form["op"]
    product = partial(jnp.einsum, "rth,rtg,ghn->rtn")

    def result(floats: Any, known: Any) -> jax.Array:
        x, size = floats["tokens"], len(floats["tokens"])
        if op == RAGGED:
            return exchanged(x, floats["output"], known["slices"])
        if op == SPARSE:
            return reduced(x, known["ids"], *settings)
        if op == LOCAL:
            taken = jnp.take_along_axis(x, known["ids"][..., None], axis=1) * (known["ids"] >= 0)[..., None]
            ends = jnp.cumsum(known["sizes"], axis=1)
            groups = jax.nn.one_hot((jnp.arange(TOKENS)[:, None] >= ends[:, None]).sum(axis=2), GROUPS)
            operands = taken if settings[0] else x, groups, (floats | known)["matrices"].sum(axis=0)
            if not settings[1]:
                return product(*operands)
            rounded = through_float8(x, 128), groups, through_float8(operands[2], 128, 128)
            return product(*operands) + jax.lax.stop_gradient(product(*rounded) - product(*operands))
        matrix, bias = floats["matrix"], floats["bias"][:, None]
        if op == "all_gather_matmul":
            each = jnp.einsum("sth,rhn->rstn", x, matrix) + bias[:, None]
            return jnp.stack([weighed(rows, size).sum(axis=0) for rows in each])
        total = jnp.broadcast_to(jnp.einsum("rth,rhn->tn", x, matrix), x.shape)
        return bias + (weighed(total, size) if op == "matmul_reduce_scatter" else total)

    return lambda floats, known: jnp.sin(result(floats, known))


def reduced(x: jax.Array, ids: jax.Array, how: str, sharded: bool, capacity: int) -> jax.Array:
    """The table of which rank r of R has the r-th part, if it is sharded; the rows that are named first find room."""
    size = len(x)
    named = jax.nn.one_hot(ids, TOKENS)
    count = named.sum(axis=(0, 1))
    divisor = {"sum": 1, "mean": size, "mean_by_count": jnp.maximum(count, 1)[:, None]}[how]
    table = jnp.einsum("rtn,rth->nh", named, x) / divisor
    owner = jnp.arange(TOKENS) // (-(-TOKENS // size))
    here = (owner == jnp.arange(size)[:, None]) | (not sharded)
    kept = here & (jnp.cumsum(here & (count > 0), axis=1) <= capacity)
    return jnp.where(kept[..., None], table, 0)


def exchanged(x: jax.Array, output: jax.Array, slices: Any) -> jax.Array:
    results = list(output)
    for source, i in np.ndindex(slices.send_sizes.shape):
        rank = i // (slices.send_sizes.shape[1] // len(x))
        at = jnp.arange(TOKENS) - slices.output_offsets[source, i]
        rows = x[source][jnp.clip(at + slices.input_offsets[source, i], 0, TOKENS - 1)]
        inside = (at >= 0) & (at < slices.send_sizes[source, i])
        results[rank] = jnp.where(inside[:, None], rows, results[rank])
    return jnp.stack(results)

"""`bench moe --sweep`: the ops of a layer by the number of tokens, from one to many."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import jax_ep

from .in_jit_loop import Loop, compile_loops, median_microseconds
from .moe_cases import SEED
from .moe_formulations import AXIS
from .tables import heading, row

TOKENS = (1, 8, 64, 128, 256, 512, 513, 1024, 2048, 8192, 32768)
HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
CPU_TOKENS, CPU_HIDDEN, CPU_INNER, CPU_EXPERTS = (1, 8, 64, 128, 512, 513), 128, 64, 16
CALLS, FEW_CALLS, MANY_TOKENS = 50, 10, 2048

Op = Callable[..., Any]


def ops(group: jax_ep.Group, implementation: jax_ep.Implementation, experts: int) -> dict[str, Op]:
    """Each of tokens, expert ids, weights and a rank's own experts."""

    def layer(tokens: jax.Array, ids: jax.Array, weights: jax.Array, own: jax_ep.Experts) -> jax.Array:
        return jax_ep.moe_mlp(tokens, ids, weights, own, group=group, implementation=implementation)[0]

    def shared(tokens: jax.Array, ids: jax.Array, weights: jax.Array, own: jax_ep.Experts) -> jax.Array:
        # As if all ranks had these tokens: each computes other sums, in the same time.
        options: Any = {"group": group, "implementation": implementation, "shared_tokens": True}
        return jax_ep.moe_mlp(tokens, ids, weights, own, **options)[0]

    def step(tokens: jax.Array, ids: jax.Array, weights: jax.Array, own: jax_ep.Experts) -> Any:
        out, pull = jax.vjp(lambda t, w, e: layer(t, ids, w, e), tokens, weights, own)
        return out, pull(tokens)

    def dispatch(tokens: jax.Array, ids: jax.Array, weights: jax.Array, _: Any) -> Any:
        return jax_ep.dispatch(tokens, ids, weights, group=group, num_experts=experts, implementation=implementation)

    def exchange(tokens: jax.Array, ids: jax.Array, weights: jax.Array, own: Any) -> jax.Array:
        rows, _, routing = dispatch(tokens, ids, weights, own)
        return jax_ep.combine(rows, routing, group=group, implementation=implementation)

    def both_gradients(tokens: jax.Array, ids: jax.Array, weights: jax.Array, own: Any) -> Any:
        return jax.vjp(lambda t, w: exchange(t, ids, w, own), tokens, weights)[1](tokens)

    return {
        "dispatch": dispatch,
        "dispatch, combine": exchange,
        "and their gradients": both_gradients,
        "layer": layer,
        "layer, shared tokens": shared,
        "training step": step,
    }


def run(group: jax_ep.Group, implementation: jax_ep.Implementation, repeats: int) -> Iterator[str]:
    """A line for each number of tokens a rank: microseconds."""
    on_cpu = group.platform == "cpu"
    hidden, inner, experts = (CPU_HIDDEN, CPU_INNER, CPU_EXPERTS) if on_cpu else (HIDDEN, INNER, EXPERTS)
    each = ops(group, implementation, experts)
    names = " | ".join(f"{name}, us" for name in each)
    yield heading(f"tokens a rank, H={hidden}, F={inner}, E={experts}, top-{TOP_K} | {names}")
    rng = np.random.default_rng(SEED)
    sharding = NamedSharding(group.mesh, P(AXIS))
    make = jax.jit(
        lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1, out_shardings=sharding
    )
    shapes = ((experts, hidden, inner), (experts, hidden, inner), (experts, inner, hidden))
    own = jax_ep.Experts(*(make(jax.random.key(i), shape) for i, shape in enumerate(shapes)))
    for tokens in CPU_TOKENS if on_cpu else TOKENS:
        count = tokens * group.size
        ids = np.argsort(rng.random((count, experts)), axis=1)[:, :TOP_K].astype(np.int32)
        operands = (
            make(jax.random.key(9), (count, hidden)),
            jax.device_put(ids, sharding),
            jax.device_put(rng.random((count, TOP_K), np.float32), sharding),
        )
        calls = FEW_CALLS if on_cpu or tokens > MANY_TOKENS else CALLS
        loops = [Loop(op, operands, own, calls) for op in each.values()]
        times = median_microseconds(loops, compile_loops(loops, group.mesh), repeats)
        yield row(f"{tokens:,}", *(f"{time:,.1f}" for time in times))
    group.check()

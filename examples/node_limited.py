"""A mixture of experts whose tokens visit few nodes: `python -m jax_ep demo-nodes`.

The experts of a node are one group of the router, which chooses experts of the best groups alone (DeepSeek-V3,
2024). So a token crosses to at most `top_nodes` nodes, and each node needs room for top_nodes / nodes of a device's
tokens, and a quarter more as no router is quite even. A bias of the choice, nudged after every step, keeps experts
even, and with them nodes.

`layer` runs inside `jax.shard_map`: T tokens of this device [T, H], E experts of which E / R are its own. The group has
the room for tokens on the way to each node (`jax_ep.NodeOptions`).
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_ep

AXES = ("node", "ep")
SEED = 0
SLACK = 1.25


@dataclasses.dataclass(frozen=True)
class Config:
    tokens: int = 64  # of a device
    hidden: int = 32
    width: int = 64
    experts: int = 32
    top_k: int = 4
    top_nodes: int = 2

    def node_capacity(self, nodes: int) -> int:
        """Tokens of a device that have room on the way to each node."""
        return min(self.tokens, math.ceil(SLACK * self.tokens * self.top_nodes / nodes))


class Params(NamedTuple):
    router: jax.Array  # [H, E]
    gate: jax.Array  # [E, H, F], spread over the devices
    up: jax.Array  # [E, H, F]
    down: jax.Array  # [E, F, H]


class Counts(NamedTuple):
    """What a step measures, over all devices."""

    load: jax.Array  # [E] assignments
    dropped: jax.Array  # [] share of the assignments that found no room on the way
    nodes: jax.Array  # [] nodes that a token visits, on average


SPECS = Params(*[P(), P(AXES), P(AXES), P(AXES)])  # pyright: ignore[reportArgumentType]


def layer(
    params: Params, bias: jax.Array, tokens: jax.Array, config: Config, group: jax_ep.Group
) -> tuple[jax.Array, Counts]:
    """What the experts make of the tokens [T, H], and what was counted."""
    logits = tokens @ params.router
    most = min(config.top_nodes, group.nodes)
    ids, weights = jax_ep.nn.sigmoid_top_k(logits, config.top_k, bias=bias, groups=group.nodes, top_groups=most)
    out, stats = jax_ep.moe_mlp(
        tokens,
        ids,
        weights,
        jax_ep.Experts(gate=params.gate, up=params.up, down=params.down),
        group=group,
        on_overflow="drop",
    )
    visited = (ids[..., None] // (config.experts // group.nodes) == jnp.arange(group.nodes)).any(axis=1).sum(axis=1)
    return out, Counts(
        load=jax_ep.nn.expert_load(ids, config.experts, axis_name=AXES),
        dropped=jax.lax.pmean(stats.dropped[0] / ids.size, AXES),
        nodes=jax.lax.pmean(visited.mean(), AXES),
    )


def init_params(config: Config, group: jax_ep.Group) -> Params:
    h, f, e = config.hidden, config.width, config.experts
    keys = jax.random.split(jax.random.key(SEED), 4)
    shapes = (h, e), (e, h, f), (e, h, f), (e, f, h)

    def draw(key: jax.Array, shape: tuple[int, ...], spec: Any) -> jax.Array:
        place = NamedSharding(group.mesh, spec)
        return jax.jit(lambda: jax.random.normal(key, shape) / shape[-2] ** 0.5, out_shardings=place)()

    return Params(*(draw(*each) for each in zip(keys, shapes, SPECS, strict=True)))


def train(config: Config, group: jax_ep.Group, steps: int) -> Iterator[tuple[float, Counts]]:
    """The loss and the counts of each step of learning a fixed nonlinear map of random tokens."""
    import optax  # here, so that --help needs no extras

    params, bias = init_params(config, group), jnp.zeros(config.experts)
    optimizer = optax.adam(1e-2)
    state = jax.jit(optimizer.init)(params)
    target = np.random.default_rng(SEED).standard_normal((config.hidden, config.hidden)) / config.hidden**0.5

    def loss(params: Params, bias: jax.Array, tokens: jax.Array) -> tuple[jax.Array, Counts]:
        out, counts = layer(params, bias, tokens, config, group)
        return jax.lax.pmean(jnp.mean((out - jnp.tanh(tokens @ target)) ** 2), AXES), counts

    mapped = jax.shard_map(loss, mesh=group.mesh, in_specs=(SPECS, P(), P(AXES)), out_specs=P())

    @jax.jit
    def step(params: Params, state: Any, bias: jax.Array, key: jax.Array):
        tokens = jax.random.normal(key, (group.size * config.tokens, config.hidden))
        (value, counts), gradient = jax.value_and_grad(mapped, has_aux=True)(params, bias, tokens)
        updates, state = optimizer.update(gradient, state, params)
        bias = jax_ep.nn.balanced_bias(bias, counts.load, rate=3e-3)
        return optax.apply_updates(params, updates), state, bias, value, counts

    for key in jax.random.split(jax.random.key(SEED + 1), steps):
        params, state, bias, value, counts = step(params, state, bias, key)
        yield float(value), jax.device_get(counts)
        group.check()


def main(arguments: list[str]) -> int:
    """Returns 0 if the loss fell."""
    parser = argparse.ArgumentParser(prog="python -m jax_ep demo-nodes", description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--nodes", type=int, default=4, help="into which the devices are split; default: %(default)s")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    config = Config()
    devices = np.array(sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))
    show: Callable[[str], None] = partial(print, flush=True) if jax.process_index() == 0 else lambda _: None
    if options.nodes < 1 or devices.size % options.nodes or config.experts % devices.size:
        parser.error(f"--nodes must divide the {devices.size} devices, and these the {config.experts} experts")
    mesh, room = Mesh(devices.reshape(options.nodes, -1), AXES), config.node_capacity(options.nodes)
    with jax_ep.Group(mesh, AXES, across_nodes=True, nodes=jax_ep.NodeOptions(room)) as group:
        show(
            f"top-{config.top_k} of {config.experts} experts on at most {config.top_nodes} of {group.nodes} nodes; "
            f"each device has {config.tokens} tokens, and room for {room} of them on the way to each node",
        )
        losses = []
        for step, (loss, counts) in enumerate(train(config, group, options.steps)):
            losses.append(loss)
            if step % 20 == 0 or step == options.steps - 1:
                show(
                    f"step {step}: loss {loss:.3f}, {counts.nodes:.2f} nodes a token, {counts.dropped:.1%} dropped, "
                    f"busiest expert {counts.load.max() / counts.load.mean():.2f}x the mean",
                )
    return 0 if losses[-1] < 0.7 * losses[0] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""One step of training: float32 master weights, working copies of them in 16 bits, micro-batches, and an optimizer.

The working copies are made once a step, outside the scan over layers. XLA passes a slice of a stacked array to the
experts' products without a copy, but it copies a slice that must be converted first.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from .checkpoint import Parameter
from .layers import Aux, Run
from .losses import next_token_loss
from .model import Model, cast, init


class TrainState(NamedTuple):
    step: jax.Array  # [] int32, the number of steps taken
    params: Any  # float32
    optimizer: Any


class Metrics(NamedTuple):
    """The metrics of one step."""

    loss: jax.Array  # [] float32, nats per token
    load: jax.Array  # [L, E] float32, the share of each layer's assignments
    dropped: jax.Array  # [] float32, the share of all assignments


PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}  # of dense bfloat16 products, by a word of the device's kind


def peak_flops(device: Any) -> float | None:
    return next((flops for word, flops in PEAK_FLOPS.items() if word in device.device_kind), None)


def flops_per_token(config: Any, length: int) -> float:
    """The floating point operations per token of a training step without rematerialization. Each array that a token
    meets, including the head, counts three products; norms and biases are too small to matter. Attention counts as
    causal over `length` tokens, also in layers with a window."""
    matrices: list[Parameter] = [one for one in jax.tree.leaves(config.layout()) if len(one.shape) > 1]
    met = sum(
        math.prod(one.shape) * (config.num_experts_per_tok / one.shape[1] if one.experts else 1)
        for one in matrices
        if "embed" not in one.name
    )
    if hasattr(config, "head_dim"):
        head = config.head_dim
    else:  # keys and values differ in width
        head = (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
    return 6 * (met + config.num_hidden_layers * length * config.num_attention_heads * head)


TrainStep = Callable[[TrainState, jax.Array], tuple[TrainState, Metrics]]


def state_of(params: Any, optimizer: optax.GradientTransformation, run: Run) -> TrainState:
    """The state before the first step. The optimizer's arrays lie where their parameters are.

    Raises:
      TypeError: a parameter is not in float32. In 16 bits small updates are lost.
    """
    everywhere = NamedSharding(run.group.mesh, P())
    known = dict(jax.tree.leaves_with_path(params))
    for path, param in known.items():
        if param.dtype != jnp.float32:
            raise TypeError(f"state_of: params{jax.tree_util.keystr(path)} must be float32, got {param.dtype}")

    def place(path: Any, x: Any) -> Any:
        """Optimizers keep arrays under the paths of their parameters, but not always of their shapes (Adafactor)."""
        param = next((known[path[i:]] for i in range(len(path)) if path[i:] in known), None)
        return everywhere if param is None or param.shape != x.shape else param.sharding

    placement = jax.tree.map_with_path(place, jax.eval_shape(optimizer.init, params))
    optimizer_state = jax.jit(optimizer.init, out_shardings=placement)(params)
    return TrainState(jax.device_put(jnp.int32(0), everywhere), params, optimizer_state)


def first_state(key: jax.Array, config: Model, optimizer: optax.GradientTransformation, run: Run) -> TrainState:
    """The state of random parameters, in their shards."""
    return state_of(init(key, config, run.group), optimizer, run)


def loss_of(
    working: Any, batch: jax.Array, config: Model, run: Run, *, balance: float, z: float, weight: Any = 1
) -> tuple[jax.Array, tuple[jax.Array, Aux]]:
    """Returns the loss that is differentiated, and a pair of the cross entropy and the routers' statistics.

    Args:
      working: parameters in `run.dtype`.
      batch: [B, S + 1] tokens; negative ones are not predicted.
      balance, z: the factors of the routers' losses.
      weight: the factor of the cross entropy.
    """
    hidden, _, aux = config.hidden(working, batch[:, :-1], run)
    targets = batch[:, 1:]
    spec = run.rows(*targets.shape)
    axes = run.group.mesh.axis_names if spec else ()
    loss: Any = jax.shard_map(
        lambda x, head, targets, weight: next_token_loss(x, head, targets, axes=axes, weight=weight),
        mesh=run.group.mesh,
        in_specs=(spec, P(), spec, P()),
        out_specs=P(),
    )(hidden, working["head"], targets, jnp.float32(weight))
    total = loss
    if balance:
        total += balance * aux.balance_loss.mean()
    if z:
        total += z * aux.z_loss.mean()
    return total, (loss, aux)


def make_train_step(
    config: Model,
    optimizer: optax.GradientTransformation,
    run: Run,
    state: TrainState,
    *,
    balance: float = 1e-3,
    z: float = 0.0,
) -> TrainStep:
    """A jitted step on [M, B, S + 1] tokens of M micro-batches, whose gradients are added up in float32.

    The cross entropy is the mean over the predicted tokens of all micro-batches. Gradients of one micro-batch are in
    `run.dtype`. The step donates its state. `state` tells it where arrays lie.
    """

    def of_micro_batch(working: Any, batch: jax.Array, weight: jax.Array) -> tuple[Any, Metrics]:
        def scalar(working: Any) -> Any:
            return loss_of(working, batch, config, run, balance=balance, z=z, weight=weight)

        gradients, (loss, aux) = jax.grad(scalar, has_aux=True)(working)
        assignments = aux.load[0].sum()
        return gradients, Metrics(loss, aux.load / assignments, aux.dropped.mean() / assignments)

    @jax.named_scope("optimizer")
    def update(state: TrainState, gradients: Any, micro_batches: int) -> TrainState:
        mean = jax.tree.map(lambda x, like: x.astype(like.dtype) / micro_batches, gradients, state.params)
        updates, optimizer_state = optimizer.update(mean, state.optimizer, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), optimizer_state)

    def train_step(state: TrainState, batches: jax.Array) -> tuple[TrainState, Metrics]:
        if batches.ndim != 3 or 0 in batches.shape or batches.shape[2] == 1:
            raise ValueError(
                f"train_step: batches must have shape [M, B, S + 1] with M, B and S at least 1, got {batches.shape}"
            )
        with jax.named_scope("working copies"):
            working = cast(state.params, config, run.dtype)
        # The weights make the mean of the micro-batches' means the mean over all predicted tokens.
        predicted = jnp.sum(batches[..., 1:] >= 0, axis=(1, 2)).astype(jnp.float32)
        weights = predicted / jnp.maximum(predicted.mean(), 1 / batches.shape[0])
        gradients, metrics = of_micro_batch(working, batches[0], weights[0])
        if batches.shape[0] > 1:

            def add(total: Any, batch: Any) -> tuple[Any, None]:
                more = of_micro_batch(working, *batch)
                with jax.named_scope("accumulation"):
                    return jax.tree.map(lambda all_, x: all_ + x.astype(all_.dtype), total, more), None

            # The last micro-batch is outside the scan, so XLA adds it in the optimizer's pass over the gradients.
            total = jax.tree.map(lambda x: x.astype(jnp.float32), (gradients, metrics))
            total, _ = jax.lax.scan(add, total, (batches[1:-1], weights[1:-1]))
            gradients, metrics = add(total, (batches[-1], weights[-1]))[0]
            metrics = jax.tree.map(lambda x: x / batches.shape[0], metrics)
        return update(state, gradients, batches.shape[0]), metrics

    placement = jax.tree.map(lambda x: x.sharding, state)
    everywhere = NamedSharding(run.group.mesh, P())
    return jax.jit(train_step, donate_argnums=0, out_shardings=(placement, everywhere))

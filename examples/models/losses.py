"""The loss of a language model's head, without an array of all logits.

The forward pass computes the loss and, chunk by chunk, its gradients. The backward pass multiplies these by one scalar.
Each chunk takes three matrix products, where rematerialization would take four (Liger Kernel: Hsu et al., 2024).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def next_token_loss(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    chunk: int = 1024,
    axes: Sequence[str] = (),
    weight: jax.Array | float = 1,
) -> jax.Array:
    """The mean cross entropy of the tokens that follow, float32 [], in nats. Logits are rounded to the dtype of `x`.

    Args:
      x: [B, S, H] bfloat16 or float32, the hidden states.
      head: [H, V] in the dtype of `x`.
      targets: [B, S] integers in [0, V). Negative targets are ignored.
      chunk: the positions of each sequence whose logits exist at one time.
      axes: inside `jax.shard_map` with check_vma, the mesh axes over which `x` and `targets` are sharded. `head` is the
        same on all devices. The mean is over the targets of all devices. Their gradients of `head` are rounded to its
        dtype and summed once.
      weight: a factor of the loss, the same on all devices. It has no gradient.

    Raises:
      TypeError: `x` is float16, in which these gradients underflow before a loss could be scaled.
    """
    if x.dtype == jnp.float16:
        raise TypeError("next_token_loss: x must be bfloat16 or float32, got float16")
    count = jnp.sum(targets >= 0)
    if not axes:
        return _loss(x, head, targets, weight / jnp.maximum(count, 1), chunk)
    share = weight / jnp.maximum(jax.lax.psum(count, axes), 1)
    return jax.lax.psum(_loss(x, jax.lax.pcast(head, axes, to="varying"), targets, share, chunk), axes)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loss(x: jax.Array, head: jax.Array, targets: jax.Array, share: jax.Array, chunk: int) -> jax.Array:
    """`share`: the weight of each token."""
    return _forward(x, head, targets, share, chunk)[0]


def _forward(
    x: jax.Array, head: jax.Array, targets: jax.Array, share: jax.Array, chunk: int
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def of_chunk(x: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits = x @ head
        top = jnp.max(logits, axis=-1, keepdims=True).astype(jnp.float32)
        log_sum = top + jnp.log(jnp.sum(jnp.exp(logits.astype(jnp.float32) - top), axis=-1, keepdims=True))
        found = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)
        weight = jnp.where(targets >= 0, share, 0)[..., None]
        hit = jnp.arange(head.shape[1]) == targets[..., None]
        slope = ((jnp.exp(logits.astype(jnp.float32) - log_sum) - hit) * weight).astype(x.dtype)
        d_head = jnp.einsum("bsh,bsv->hv", x, slope, preferred_element_type=jnp.float32)
        return jnp.sum((log_sum - found.astype(jnp.float32)) * weight), slope @ head.T, d_head

    loss, d_x = jnp.zeros(()), []
    d_head: Any = None
    for start in range(0, x.shape[1], chunk):  # chunks cut each sequence, so no device needs tokens of another
        part = slice(start, start + chunk)
        # A chunk waits for the one before. Otherwise XLA may hold the logits of several.
        of_part, d_head, d_x = jax.lax.optimization_barrier((x[:, part], d_head, d_x))
        summed, d_part, d_head_part = of_chunk(of_part, targets[:, part])
        loss, d_head = loss + summed, d_head_part if d_head is None else d_head + d_head_part
        d_x.append(d_part)
    return loss, (jnp.concatenate(d_x, axis=1), d_head.astype(head.dtype))


def _backward(chunk: int, gradients: tuple[jax.Array, ...], d_loss: jax.Array) -> tuple[Any, ...]:
    d_x, d_head = ((each * d_loss).astype(each.dtype) for each in gradients)
    return d_x, d_head, None, None


_loss.defvjp(_forward, _backward)

"""What the models of this folder share: attention, positions, norms, the mixture of experts, the scan over layers.

Arrays are global: a batch [B, S, H] is sharded over all axes of the mesh, the experts over the axis of the group, and
XLA gathers each layer's other weights before it runs, unless they are whole (`model.for_generation`). Only the mixture
of experts runs inside `jax.shard_map`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jax.typing import DTypeLike

import jax_ep

# `Run(remat=KEEP_EXCHANGES)` keeps the results of the experts' products and of the exchange for the backward pass.
KEEP_EXCHANGES = jax.checkpoint_policies.save_only_these_names("jax_ep_products", "jax_ep_dispatch")


def keep_attention(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Keeps also what dense products and cuDNN's attention return."""
    products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *operands, **params)
    attends = primitive.name == "dot_product_attention_fwd_wrapper"
    return bool(products) or attends or KEEP_EXCHANGES(primitive, *operands, **params)


# Policies for `Run(remat=)`, from the one that takes most memory. Each but the first and the last is named after what
# it keeps for the backward pass, besides what those behind it keep.
REMAT = {
    "none": None,  # recomputes nothing
    "attention": keep_attention,  # keeps dense products and cuDNN's attention; XLA's attention is recomputed
    "exchanges": KEEP_EXCHANGES,
    "products": jax.checkpoint_policies.save_only_these_names("jax_ep_products"),  # of the experts
    "layers": jax.checkpoint_policies.nothing_saveable,  # recomputes whole layers
}


@dataclasses.dataclass(frozen=True)
class Run:
    """How a model is computed, which its config.json does not say.

    Attributes:
      group: the open group of the devices that share the experts.
      dtype: of activations, and of the parameters where they are multiplied.
      attention: "cudnn" or "xla" of `jax.nn.dot_product_attention`. "auto" is "cudnn" on GPUs for operands of 16 bits,
        in layers without sinks and without a window.
      remat: a policy of `jax.checkpoint` for each layer, such as those of `REMAT`; None keeps everything.
      unroll: turns through the kinds of layers in one iteration of the scan over layers. A larger number copies less
        into stacked arrays for the backward pass, and takes longer to compile.
      moe_mlp: the layer of experts.
      moe: more arguments of it, such as `capacity_factor` and `precision`.
    """

    group: jax_ep.Group
    dtype: DTypeLike = jnp.bfloat16
    attention: Literal["auto", "cudnn", "xla"] = "auto"
    remat: Callable[..., Any] | None = None
    moe: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    moe_mlp: Callable[..., Any] = jax_ep.moe_mlp
    unroll: int = 1

    def rows(self, batch: int, length: int) -> P:
        """How activations [batch, length, ...] are sharded: by sequences, or by tokens; a few tokens are not."""
        mesh = self.group.mesh
        if batch % mesh.size == 0:
            return P(mesh.axis_names)
        return P(None, mesh.axis_names) if length % mesh.size == 0 else P()

    def heads(self, batch: int, groups: int) -> P:
        """How queries, keys and values [batch, S, heads, D] are sharded: by sequences, or by heads of `groups`."""
        mesh = self.group.mesh
        if batch % mesh.size == 0:
            return P(mesh.axis_names)
        return P(None, None, mesh.axis_names) if groups % mesh.size == 0 else P()

    def constrain(self, x: Any, spec: P) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.group.mesh, spec))


class LayerCache(NamedTuple):
    """What a layer's attention keeps of earlier tokens.

    Attributes:
      kept: arrays [B, ..., S, D] for S tokens, such as keys and values of each head. One token's queries read them in
        this order.
      position: [] int32, the number of tokens so far.
    """

    kept: tuple[jax.Array, ...]
    position: jax.Array


class Cache(NamedTuple):
    """What all layers keep. Each layer has arrays of its own, because attention would copy its slice of stacked ones.

    A cache that has tokens takes exactly one more at a time. This is not checked.
    """

    kept: tuple[tuple[jax.Array, ...], ...]  # by layer, as of `LayerCache`
    position: jax.Array


class Aux(NamedTuple):
    """What the routers of L layers did, with a leading axis [L]."""

    expert_ids: jax.Array  # [L, B, S, K]
    load: jax.Array  # [L, E] assignments of each expert
    balance_loss: jax.Array  # [L] 1 when tokens are spread evenly
    z_loss: jax.Array  # [L] grows with the router's logits
    dropped: jax.Array  # [L] assignments that found no room


Hidden = tuple[jax.Array, Cache | None, Aux]  # of a model: states [B, S, H], the new cache, what the routers did
OfLayer = tuple[jax.Array, LayerCache | None, Any]  # the same of one layer


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: RoFormer (2021), or YaRN (2023) by `rope_type`. Fields are those of config.json."""

    rope_theta: float
    rope_type: Literal["default", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        if self.rope_type not in ("default", "yarn"):
            raise ValueError(f"config.json: rope_type must be 'default' or 'yarn', got {self.rope_type!r}")
        if self.rope_type == "default" and self.factor != 1:
            raise ValueError(f"config.json: factor must be 1 with rope_type 'default', got {self.factor}")

    def magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def frequencies(self, dim: int) -> np.ndarray:
        """[dim / 2] float32, radians per token."""
        plain = self.rope_theta ** -(np.arange(0, dim, 2, dtype=np.float32) / dim)
        if self.rope_type == "default":
            return plain

        def pair_that_turns(times: float) -> float:
            return (
                dim
                * math.log(self.original_max_position_embeddings / (times * 2 * math.pi))
                / (2 * math.log(self.rope_theta))
            )

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        slow = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
        return plain * (1 - slow) + plain / self.factor * slow

    def angles(self, positions: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
        """The cosine and the sine of each position [S], times YaRN's magnitude: [S, 1, dim / 2] float32."""
        scale = self.attention_factor
        if scale is None and self.rope_type == "yarn":
            scale = self.magnitude(1.0)
            if self.mscale and self.mscale_all_dim:
                scale = self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        angle = positions.astype(jnp.float32)[:, None, None] * self.frequencies(dim)
        return jnp.cos(angle) * (scale or 1.0), jnp.sin(angle) * (scale or 1.0)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array], *, interleaved: bool = False) -> jax.Array:
    """[B, S, heads, D], rotated in pairs of dimensions (i, i + D / 2), or (2 i, 2 i + 1) where they are interleaved.
    The result has the members of a pair at i and i + D / 2."""
    cosine, sine = angles
    wide = x.astype(jnp.float32)
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1).astype(x.dtype)


def dot(x: jax.Array, weight: jax.Array, run: Run, dtype: DTypeLike | None = None) -> jax.Array:
    """[..., M] @ [M, N], in `dtype` if it is given.

    Rows are multiplied twice if there are no more of them than devices, because a device may then have one row alone.
    XLA would write the products of one row to memory, rounded to the dtype of `x`, before it adds them up: a decoding
    step at batch 1 took 1.5 times as long (H200, jax 0.11.2).
    """
    if math.prod(x.shape[:-1]) > run.group.mesh.size:
        return jnp.dot(x, weight, preferred_element_type=dtype)
    twice = jnp.stack([x, x], axis=-2)
    return jnp.dot(twice, weight, preferred_element_type=dtype)[..., 0, :]


@partial(jax.checkpoint, prevent_cse=False, static_argnums=2)  # pyright: ignore[reportPrivateImportUsage]
def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Keeps `x` for the backward pass, not its float32 copies."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)).astype(x.dtype) * scale


def remember(cache: LayerCache | None, *new: jax.Array) -> tuple[tuple[jax.Array, ...], LayerCache | None]:
    """Writes `new` [B, T, ..., D] behind the tokens of this layer.

    Returns what the T tokens attend to: `new` itself if it begins the sequence, which all but single tokens do; else
    the layer's whole [B, ..., S, D].
    """
    if cache is None:
        return new, None
    kept = []
    for old, x in zip(cache.kept, new, strict=True):
        at = (*[0] * (x.ndim - 2), cache.position, 0)
        kept.append(jax.lax.dynamic_update_slice(old, jnp.moveaxis(x, 1, -2).astype(old.dtype), at))
    cache = cache._replace(kept=tuple(kept))
    return (new if new[0].shape[1] > 1 else cache.kept), cache


def advance(cache: Cache | None, length: int) -> Cache | None:
    """The cache after all layers have seen `length` tokens more."""
    return cache and cache._replace(position=cache.position + length)


def positions(cache: Cache | None, length: int) -> jax.Array:
    """[length] int32, of tokens that follow those of the cache."""
    return jnp.arange(length) + (0 if cache is None else cache.position)


def whole_sequences(h: jax.Array, run: Run) -> jax.Array:
    """Gathers [B, S, H] if it is sharded by tokens. One gather replaces three, of queries, keys and values."""
    return run.constrain(h, run.rows(h.shape[0], 1))  # as single tokens are, which are never sharded by tokens


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    run: Run,
    cache: LayerCache | None = None,
    *,
    scale: float,
    window: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention, [B, T, N, D] -> [B, T, N, D of v].

    Args:
      q, k, v: [B, T, N, D], and [B, T, G, D] with N a multiple of G. If T = 1 and there is a cache, k and v are the
        layer's part of it, [B, G, S, D].
      window: a token attends to so many tokens, its own among them.
      sinks: [N], logits that take part in each softmax and have no value.

    A sink is a key whose value is zero. Its logit lies in a further column of q, so its gradient flows through q in any
    implementation.
    """
    width, length = v.shape[-1], q.shape[1]
    if cache is not None and length == 1:
        return _of_one_token(q, k, v, cache.position, scale=scale, window=window, sinks=sinks)
    if length > 1:
        q, k, v = (run.constrain(x, run.heads(q.shape[0], k.shape[2])) for x in (q, k, v))
    v = jnp.pad(v, ((0, 0),) * 3 + ((0, k.shape[-1] - width),))
    if sinks is not None:
        column = jnp.broadcast_to((sinks / scale)[:, None], (*q.shape[:3], 1)).astype(q.dtype)
        ones, zeros = jnp.ones_like(column), jnp.zeros((*q.shape[:3], 6), q.dtype)  # cuDNN has multiples of 8
        q = jnp.concatenate([q, column, ones, zeros], axis=-1)
        k, v = (jnp.pad(x, ((0, 0),) * 3 + ((0, 8),)) for x in (k, v))

    def dot_product(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> jax.Array:
        implementation = run.attention
        if implementation == "auto":
            fits = q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and sinks is None
            implementation = "cudnn" if run.group.platform == "cuda" and fits and mask is None else "xla"
        if sinks is not None:
            dim = q.shape[-1] - 8
            # cuDNN has even lengths, so a key that no token sees stands in front of the sink.
            ahead = np.zeros((2, 1, q.shape[-1]), k.dtype)
            ahead[0, :, dim + 1], ahead[1, :, dim] = -1e4 / scale, 1
            ahead = jnp.broadcast_to(ahead, (k.shape[0], 2, *k.shape[2:]))
            if mask is None:  # as many queries keep the diagonal where it is
                q = jnp.pad(q, ((0, 0), (2, 0), (0, 0), (0, 0)))
            else:
                mask = jnp.pad(mask, ((0, 0),) * 3 + ((2, 0),), constant_values=True)
            k = jnp.concatenate([ahead, k], axis=1)
            v = jnp.pad(v, ((0, 0), (2, 0), (0, 0), (0, 0)))
        options: dict[str, Any] = {"mask": mask} if mask is not None else {"is_causal": True}
        out = jax.nn.dot_product_attention(q, k, v, scale=scale, implementation=implementation, **options)
        return out[:, -length:] if mask is None else out

    if window is not None and window < length:
        out = _in_windows(dot_product, q, k, v, window)
    else:
        out = dot_product(q, k, v, None)
    return out[..., :width]


def _of_one_token(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    position: jax.Array,
    *,
    scale: float,
    window: int | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """[B, 1, N, D] of the token at `position`, [B, G, S, D] -> [B, 1, N, D of v]."""
    batch, groups, length, _ = k.shape
    keys = jnp.arange(length)
    if window is not None and window < length:  # no other keys are read
        keys, k, v = (
            jax.lax.dynamic_slice_in_dim(x, jnp.maximum(position + 1 - window, 0), window, axis)
            for x, axis in ((keys, 0), (k, 2), (v, 2))
        )
    q = q.reshape(batch, groups, -1, q.shape[-1])
    logits = jnp.einsum("bgmd,bgsd->bgms", q, k, preferred_element_type=jnp.float32) * scale
    logits = jnp.where(keys <= position, logits, -jnp.inf)
    top = logits.max(-1, keepdims=True)
    sink = None if sinks is None else sinks.astype(jnp.float32).reshape(groups, -1, 1)
    if sink is not None:
        top = jnp.maximum(top, sink)
    shares = jnp.exp(logits - top)
    shares /= shares.sum(-1, keepdims=True) + (0 if sink is None else jnp.exp(sink - top))
    out = jnp.einsum("bgms,bgsd->bgmd", shares.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(batch, 1, -1, v.shape[-1])


def _in_windows(dot_product: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, window: int) -> Any:
    """Blocks of `window` queries, each with the keys of its own block and of the one before."""
    batch, length = q.shape[:2]
    blocks = -(-length // window)

    def in_blocks(x: jax.Array, before: int) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (before, blocks * window - length), (0, 0), (0, 0)))
        return x.reshape(batch, -1, window, *x.shape[2:])

    def of_two(x: jax.Array) -> jax.Array:
        x = in_blocks(x, window)
        both = jnp.concatenate([x[:, :-1], x[:, 1:]], axis=2)
        return both.reshape(-1, *both.shape[2:])

    block, query, key = jnp.ogrid[:blocks, :window, : 2 * window]
    seen = (key > query) & (key <= query + window) & ((block > 0) | (key >= window))
    mask = jnp.broadcast_to(seen, (batch, *seen.shape)).reshape(-1, 1, *seen.shape[1:])
    queries = in_blocks(q, 0)
    out = dot_product(queries.reshape(-1, *queries.shape[2:]), of_two(k), of_two(v), mask)
    return out.reshape(batch, -1, *out.shape[2:])[:, :length]


Router = Callable[[Any, jax.Array], tuple[jax.Array, jax_ep.nn.Routed]]


def mixture(
    x: jax.Array,
    route: Router,
    router: Any,
    experts: jax_ep.Experts,
    run: Run,
    *,
    shared_experts: jax_ep.Experts | None = None,
    score: Literal["softmax", "sigmoid"] = "softmax",
) -> tuple[jax.Array, Aux]:
    """The mixture of experts: [B, S, H] -> [B, S, H], and what the router did.

    Args:
      route: (router, tokens [T, H]) -> logits [T, E], and what was chosen by them.
      router, shared_experts: the same on all devices.
      experts: with the experts of all ranks; this is the only place that uses them.
    """
    spec = run.rows(*x.shape[:2])
    axes = run.group.mesh.axis_names if spec else None
    shared_tokens = not spec

    def body(x: jax.Array, router: Any, experts: Any, shared: Any) -> tuple[jax.Array, Aux]:
        tokens = x.reshape(-1, x.shape[-1])
        logits, (ids, weights) = route(router, tokens)
        options = {"shared_experts": shared, "shared_tokens": shared_tokens, **run.moe}
        out, stats = run.moe_mlp(tokens, ids, weights, experts, group=run.group, **options)
        aux = Aux(
            expert_ids=ids.reshape(*x.shape[:2], -1),
            load=jax_ep.nn.expert_load(ids, logits.shape[1], axis_name=axes),
            balance_loss=jax_ep.nn.balance_loss(logits, ids, score=score, axis_name=axes),
            z_loss=jax_ep.nn.z_loss(logits, axis_name=axes),
            dropped=jax.lax.psum(stats.dropped[0], axes or run.group.axis_name),
        )
        return out.reshape(x.shape), aux

    return jax.shard_map(
        body,
        mesh=run.group.mesh,
        in_specs=(spec, P(), P(run.group.axis_name), P()),
        out_specs=(spec, Aux(spec, P(), P(), P(), P())),  # pyright: ignore[reportArgumentType]
    )(x, router, experts, shared_experts)


Block = Callable[..., OfLayer]


def scan_layers(
    block: Block,
    x: jax.Array,
    layers: Any,
    cache: Cache | None,
    run: Run,
    kinds: Sequence[Any] = (None,),
    first: int = 0,
) -> tuple[jax.Array, Cache | None, Any]:
    """Runs `block(x, layer, cache of the layer, kind)` over the layers, whose arrays are stacked [L, ...].

    Single tokens with a cache go through an unrolled loop, all others through `jax.lax.scan`.

    Args:
      layers: a dict. All but its "experts" is gathered from the devices that hold parts of it.
      kinds: such as two kinds of attention. They repeat over the layers, and their number divides L.
      first: the cache's index of the first layer.

    Returns the last x, the cache, and the blocks' third results, stacked.
    """
    count = jax.tree.leaves(layers)[0].shape[0]
    turns = jax.tree.map(lambda a: a.reshape(-1, len(kinds), *a.shape[1:]), layers)

    def one(x: jax.Array, layer: Any, cache: LayerCache | None, kind: Any) -> Any:
        whole = {name: part if name == "experts" else run.constrain(part, P()) for name, part in layer.items()}
        x, cache, aux = block(x, whole, cache, kind)
        return run.constrain(x, run.rows(*x.shape[:2])), cache and cache.kept, aux

    if run.remat is not None:
        # Without a loop between them, XLA would take what the forward pass computed instead of computing it again. It
        # also removes a loop of one turn.
        unrolled = run.unroll > 1 or count == len(kinds)
        one = jax.checkpoint(one, policy=run.remat, static_argnums=3, prevent_cse=unrolled)  # pyright: ignore[reportPrivateImportUsage]

    if cache is not None and x.shape[1] == 1:
        kept, found = list(cache.kept), []
        for i in range(count):
            layer, own = jax.tree.map(lambda a, i=i: a[i], layers), LayerCache(kept[first + i], cache.position)
            x, kept[first + i], aux = one(x, layer, own, kinds[i % len(kinds)])
            found.append(aux)
        aux = jax.tree.map(lambda *each: jnp.stack(each), *found) if found else None
        return x, cache._replace(kept=tuple(kept)), aux

    # A cache is empty here, so that of any layer serves all.
    empty = cache and LayerCache(cache.kept[min(first, len(cache.kept) - 1)], cache.position)

    def turn(x: jax.Array, layer: Any) -> Any:
        found = []
        for i, kind in enumerate(kinds):
            x, *results = one(x, jax.tree.map(lambda a, i=i: a[i], layer), empty, kind)
            found.append(results)
        return x, jax.tree.map(lambda *each: jnp.stack(each), *found)

    x, results = jax.lax.scan(turn, x, turns, unroll=run.unroll)
    new, aux = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), results)
    if cache is not None:
        new = jax.tree.map(lambda a: run.constrain(a, P(None, *run.rows(a.shape[1], 1))), new)  # of all layers at once
        kept = [jax.tree.map(lambda a, i=i: a[i], new) for i in range(count)]
        cache = cache._replace(kept=(*cache.kept[:first], *kept, *cache.kept[first + count :]))
    return x, cache, aux


def embed(table: jax.Array, ids: jax.Array, run: Run) -> jax.Array:
    """[B, S] -> [B, S, H] in the dtype of `table`.

    Each device adds up a token's gradients in float32, because 16 bits lose those of a frequent token. The sums are
    rounded to the dtype of `table`, then added up over the devices.
    """
    spec = run.rows(*ids.shape)

    def of_device(table: jax.Array, ids: jax.Array) -> jax.Array:
        mine = jax.lax.pcast(table, run.group.mesh.axis_names, to="varying") if spec else table
        return mine.astype(jnp.float32)[ids].astype(table.dtype)

    return jax.shard_map(of_device, mesh=run.group.mesh, in_specs=(P(), spec), out_specs=spec)(table, ids)

"""What the MoE benchmarks measure: shapes, routings, what their ids ask of the ranks and the wire, and operands."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from .in_jit_loop import draw

SEED = 0


@dataclasses.dataclass(frozen=True)
class Shape:
    tokens: int  # per rank
    hidden: int
    top_k: int
    experts: int
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"T={self.tokens}, H={self.hidden}, top-{self.top_k} of {self.experts}, {self.dtype}"


@dataclasses.dataclass(frozen=True)
class Model:
    """Experts of a gate and an up [hidden, width] and a down [width, hidden]."""

    name: str
    shape: Shape
    width: int

    def __str__(self) -> str:
        shape = self.shape
        return f"{self.name}, T={shape.tokens}, H={shape.hidden}, F={self.width}, top-{shape.top_k} of {shape.experts}"

    @property
    def flops_per_row(self) -> float:
        return 6.0 * self.shape.hidden * self.width

    @property
    def halved(self) -> "Model":
        """With as many experts as one rank of two has."""
        return dataclasses.replace(self, shape=dataclasses.replace(self.shape, experts=self.shape.experts // 2))


@dataclasses.dataclass(frozen=True)
class Case:
    shape: Shape
    routing: str = "uniform"  # or "Zipf"; "all-to-one": all tokens go to experts of rank 0
    quick: bool = False
    few_sms: tuple[int, ...] = ()  # also time ours on so many SMs
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name}{self.shape}, {self.routing}"


@dataclasses.dataclass(frozen=True)
class Load:
    """What the ids of all ranks ask for, in rows."""

    rows: int  # most that one rank receives
    pair_rows: int  # most from one rank to one rank
    remote_rows: int  # most that one rank sends to, or receives from, the others; a token counts once per rank


Inputs = tuple[jax.Array, jax.Array, jax.Array]  # tokens, ids and weights of all ranks
Matrices = tuple[jax.Array, jax.Array, jax.Array]  # gate, up, down of all experts

MODELS = {
    model.name: model
    for model in (
        Model("V3", Shape(4096, 7168, 8, 256), 2048),
        Model("Qwen3-30B", Shape(8192, 2048, 8, 128), 768),
        Model("Qwen3-Next", Shape(8192, 2048, 10, 512), 512),
        Model("Mixtral", Shape(8192, 4096, 2, 8), 14336),
        Model("GPT-OSS", Shape(8192, 2880, 4, 128), 2880),
    )
}

_LARGE = MODELS["V3"].shape
_SMALL = (16, 32, 64, 128, 256, 512, 1024)
_OTHERS = ((8, 2, 6144), (64, 6, 2048), (128, 4, 2880), (128, 8, 4096))
_TINY = Shape(64, 256, 2, 16)

CASES = [
    *(Case(dataclasses.replace(_LARGE, tokens=tokens), quick=tokens == 128) for tokens in _SMALL),
    Case(_LARGE, quick=True, few_sms=(16, 24)),
    *(Case(Shape(tokens, 2048, 8, 128), few_sms=(24,)) for tokens in (8192, 32_768)),
    Case(dataclasses.replace(_LARGE, tokens=8192)),
    *(Case(Shape(4096, hidden, top_k, experts)) for experts, top_k, hidden in _OTHERS),
    Case(_LARGE, "Zipf"),
    Case(_LARGE, "all-to-one"),
]
# On two ranks: as many rows an expert as on eight, and nearly as many rows a token and rank.
AS_ON_EIGHT = [
    Case(Shape(tokens, hidden, 2, experts), few_sms=(32, 24, 16), name=f"as on 8, {name}: ")
    for name, tokens, hidden, experts in (
        ("Qwen3-30B", 32_768, 2048, 32),
        ("Qwen3-Next", 40_960, 2048, 128),
        ("V3", 16_384, 7168, 64),
    )
]
# These take every path at a size that virtual devices of a CPU can bear.
CPU_CASES = [
    Case(_TINY, few_sms=(24,)),
    Case(dataclasses.replace(_TINY, tokens=128, hidden=192), quick=True),
    Case(_TINY, "Zipf"),
    Case(_TINY, "all-to-one"),
]


def make_ids(case: Case, ranks: int) -> np.ndarray:
    """Distinct experts per token, [ranks * T, K]: the first K arrivals, each expert as often as it is popular."""
    shape, rng = case.shape, np.random.default_rng(SEED)
    if case.routing == "uniform":
        popularity = np.ones(shape.experts)
    elif case.routing == "Zipf":
        popularity = 1 / rng.permutation(np.arange(1, shape.experts + 1))
    else:
        popularity = (np.arange(shape.experts) < shape.experts // ranks).astype(float)
    return draw_ids(rng, ranks * shape.tokens, shape.top_k, popularity)


def draw_ids(rng: np.random.Generator, tokens: int, top_k: int, popularity: np.ndarray) -> np.ndarray:
    """Distinct experts of each token [tokens, K], each as often as it is popular."""
    with np.errstate(divide="ignore"):
        arrivals = rng.standard_exponential((tokens, len(popularity))) / popularity
    return np.argpartition(arrivals, top_k - 1, axis=1)[:, :top_k].astype(np.int32)


def load(ids: np.ndarray, experts: int, ranks: int) -> Load:
    owners = (ids // (experts // ranks)).reshape(ranks, -1, ids.shape[1])
    assignments = (owners[..., None] == np.arange(ranks)).sum(axis=2)  # [source, token, destination]
    pairs = assignments.sum(axis=1)
    remote = np.count_nonzero(assignments, axis=1) * (1 - np.eye(ranks, dtype=int))
    return Load(
        rows=int(pairs.sum(axis=0).max()),
        pair_rows=int(pairs.max()),
        remote_rows=int(max(remote.sum(axis=0).max(), remote.sum(axis=1).max())),
    )


def capacity(case: Case, needed: Load) -> int:
    """1.25 times the mean for uniform routing, otherwise what is needed, rounded up to 128."""
    if case.routing == "uniform":
        return max(math.ceil(1.25 * case.shape.tokens * case.shape.top_k), needed.rows)
    return -(-needed.rows // 128) * 128


def make_inputs(shape: Shape, ids: np.ndarray, mesh: Mesh) -> Inputs:
    """The tokens are drawn where they stay."""
    place = NamedSharding(mesh, P(mesh.axis_names))
    tokens = draw(mesh, SEED, len(ids), shape.hidden, dtype=jnp.dtype(shape.dtype))
    weights = np.random.default_rng(SEED).random(ids.shape, np.float32)
    of_ids = jax.make_array_from_callback(ids.shape, place, lambda index: ids[index])
    return tokens, of_ids, jax.make_array_from_callback(weights.shape, place, lambda index: weights[index])


def draw_matrices(model: Model, mesh: Mesh) -> Matrices:
    """Such that rows keep their scale."""
    shape = model.shape
    sides = ((shape.hidden, model.width), (shape.hidden, model.width), (model.width, shape.hidden))
    gate, up, down = (
        draw(mesh, SEED + i, shape.experts, *side, dtype=jnp.dtype(shape.dtype), scale=side[0] ** -0.5)
        for i, side in enumerate(sides)
    )
    return gate, up, down


def make_operands(model: Model, ids: np.ndarray, mesh: Mesh) -> tuple[jax.Array, ...]:
    """ids, weights, gate, up, down and tokens of all ranks."""
    tokens, *routed = make_inputs(model.shape, ids, mesh)
    return *routed, *draw_matrices(model, mesh), tokens

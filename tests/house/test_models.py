"""examples/models beside transformers, from the same checkpoints (tests/models): logits, generation, attention."""

import dataclasses
import itertools
import re
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OpenGroup
from helpers import Rng
from model_cases import FIXTURES, assert_near, config_of, layers, loaded, model, of_each_family, run_of
from safetensors.numpy import load_file

from jax_ep.__main__ import load as load_module

pytestmark = pytest.mark.usefixtures("native")
generate = load_module("examples", "generate")
BATCH, HEADS, GROUPS, DIM = 2, 4, 2, 16  # of attention
COLLECTIVES = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|reduce-scatter)(?:-start)?\("
)


@of_each_family
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.matrix(1)
def test_what_transformers_computes(family: str, size: int, open_group: OpenGroup) -> None:
    """Two sequences do not fill eight devices, which then share sequences by tokens, and single tokens as copies."""
    wanted, config, group = load_file(FIXTURES / family / "expected.safetensors"), config_of(family), open_group(size)
    params, run = loaded(family, group), run_of(group)
    logits, aux = jax.jit(lambda params, ids: model.logits(params, ids, config, run))(params, wanted["ids"])
    assert_near(logits, wanted["logits"])
    np.testing.assert_array_equal(np.sort(aux.expert_ids, axis=-1), wanted["expert_ids"])
    tokens = wanted["greedy"].shape[1]
    np.testing.assert_array_equal(model.generate(params, wanted["ids"], tokens, config, run), wanted["greedy"])


@of_each_family
def test_a_step_moves_no_weights(family: str, open_group: OpenGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA has no collectives at all if the devices divide the sequences, and else one sum for each mixture. The tokens
    are those of transformers."""
    monkeypatch.setenv("JAX_EP_DEBUG_CHECKS", "0")  # they compare ranks by collectives
    known, config, size = load_file(FIXTURES / family / "expected.safetensors"), config_of(family), 2
    group = open_group(size)
    run, sharded, key = run_of(group), loaded(family, group), jax.random.key(0)
    whole = model.for_generation(sharded, config, run)
    narrow = model.for_generation(sharded, config, dataclasses.replace(run, dtype=jnp.bfloat16))
    wanted = jax.tree.map(lambda one: jnp.dtype(one.fixed or jnp.bfloat16), config.layout())
    assert jax.tree.map(lambda x: x.dtype, narrow) == wanted
    mixtures = config.num_hidden_layers - getattr(config, "first_k_dense_replace", 0)
    prefill, step = model.decoder(config, run, known["ids"].shape[1] + 1)

    for batch, wanted, all_params in ((1, ["all-reduce"] * mixtures, (whole, sharded)), (2 * size, [], (whole,))):
        ids, greedy = (np.tile(known[name], (2, 1))[:batch] for name in ("ids", "greedy"))
        token, cache = prefill(whole, ids, key)
        np.testing.assert_array_equal(token, greedy[:, 0])
        for params in all_params:
            compiled = step.lower(params, token, cache, key).compile()
            found = COLLECTIVES.findall(compiled.as_text())
            assert "all-gather" in found if params is sharded else found == wanted
            after, _ = compiled(params, token, jax.tree.map(jnp.copy, cache), key)  # a step overwrites it
            np.testing.assert_array_equal(after, greedy[:, 1])


def test_a_prefill_gathers_a_layer_once(open_group: OpenGroup) -> None:
    """One sequence: its tokens before attention, and their heads after it."""
    config, run = config_of("qwen3_moe"), run_of(open_group(2))
    params = model.for_generation(loaded("qwen3_moe", run.group), config, run)
    prefill, _ = model.decoder(config, run, 32)
    text = prefill.lower(params, jnp.zeros((1, 32), jnp.int32), jax.random.key(0)).compile().as_text()
    in_layers = [line for line in text.splitlines() if "while/body" in line and COLLECTIVES.search(line)]
    assert sorted(COLLECTIVES.findall("\n".join(in_layers))) == ["all-gather", "all-to-all"]


def test_sequences_that_outgrow_their_cache(open_group: OpenGroup) -> None:
    family, group = "qwen3_moe", open_group(1)
    params, key = loaded(family, group), jax.random.key(0)
    prefill, step = model.decoder(config_of(family), run_of(group), 6)
    token, cache = prefill(params, np.ones((2, 5), np.int32), key)
    for fits in (True, False, False):
        token, cache = step(params, token, cache, key)
        assert (np.asarray(token) >= 0).all() if fits else (np.asarray(token) == -1).all()
    with pytest.raises(ValueError, match="ids must have at most length = 6 tokens, got 7"):
        prefill(params, np.ones((2, 7), np.int32), key)


@pytest.mark.parametrize(
    ("ids", "options", "match"),
    [
        ([[]], {}, r"decoder: ids must be \[B, T\] with at least one token, got \(1, 0\)"),
        ([1, 2], {}, r"decoder: ids must be \[B, T\] with at least one token, got \(2,\)"),
        ([[1, 128]], {}, r"generate: ids must be in \[0, 128\), got 1 to 128"),
        ([[-1, 2]], {}, r"generate: ids must be in \[0, 128\), got -1 to 2"),
        ([[1, 2]], {"tokens": 0}, "generate: tokens must be at least 1, got 0"),
        ([[1, 2]], {"temperature": -0.5}, "decoder: temperature must be at least 0, got -0.5"),
        ([[1, 2]], {"temperature": float("nan")}, "decoder: temperature must be at least 0, got nan"),
    ],
)
def test_what_generate_refuses(ids: Any, options: dict[str, Any], match: str, open_group: OpenGroup) -> None:
    config, run = config_of("qwen3_moe"), run_of(open_group(1))
    params = model.init(jax.random.key(0), config, run.group)
    with pytest.raises(ValueError, match=match):
        model.generate(params, jnp.asarray(ids, jnp.int32), config=config, run=run, **{"tokens": 2, **options})


@pytest.mark.parametrize("shape", [(2,), (8,), (4, 1)])
def test_tokens_of_other_sequences_than_the_cache(shape: tuple[int, ...], open_group: OpenGroup) -> None:
    """Two tokens would attend to heads of the first sequences as if these were theirs."""
    config, group, key = config_of("qwen3_moe"), open_group(1), jax.random.key(0)
    params = loaded("qwen3_moe", group)
    prefill, step = model.decoder(config, run_of(group), 6)
    _, cache = prefill(params, np.ones((4, 5), np.int32), key)
    with pytest.raises(ValueError, match=r"tokens must have shape \[B\] = \(4,\), as the cache has, got "):
        step(params, np.zeros(shape, np.int32), cache, key)


def plain(q: Any, k: Any, v: Any, sinks: Any, window: int | None) -> jax.Array:
    """Causal attention: the softmax of a row has one more column for the sink."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("btnd,bsnd->bnts", q, k) * DIM**-0.5
    query, key = np.ogrid[: q.shape[1], : k.shape[1]]
    seen = (key <= query) & (key > query - (window or key.size))
    logits = jnp.where(seen, logits, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, column], axis=-1)
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(logits, axis=-1)[..., : key.size], v)


def draw(rng: Rng, length: int) -> list[np.ndarray]:
    """q, k, v and sinks."""
    shapes = (HEADS, DIM), (GROUPS, DIM), (GROUPS, DIM)
    drawn = [rng.standard_normal((BATCH, length, *shape), np.float32) for shape in shapes]
    return [*drawn, rng.standard_normal(HEADS, np.float32)]


def with_gradients(function: Any, operands: list[Any], cotangent: np.ndarray) -> Any:
    def both(operands: list[Any], cotangent: Any) -> Any:
        out, pull = jax.vjp(function, *operands)
        return out, *pull(cotangent.astype(out.dtype))

    return helpers.fetch(jax.jit(both)(operands, cotangent))


CUDNN = pytest.mark.skipif(jax.default_backend() == "cpu", reason="cuDNN runs on GPUs")
HALF = [("cudnn", None), ("xla", None), ("xla", 128)]


@pytest.mark.parametrize(
    ("implementation", "window", "sinks", "length"),
    [
        *itertools.product([""], [None, 8], [False, True], [8, 21]),
        *(pytest.param(*each, True, 512, marks=CUDNN) for each in HALF),
    ],
)
def test_values_and_gradients_of_attention(
    implementation: str, window: int | None, sinks: bool, length: int, open_group: OpenGroup, rng: Rng
) -> None:
    """In float32; by an implementation in bfloat16, near what float32 gives for the same rounded operands."""
    operands: list[Any] = draw(rng, length)[: 3 + sinks]
    if implementation:
        operands = [jnp.asarray(x, jnp.bfloat16) for x in operands]
    how: Any = {"attention": implementation} if implementation else {"dtype": jnp.float32}
    run = layers.Run(open_group(1), **how)
    cotangent = rng.standard_normal(operands[0].shape, np.float32)

    def attend(q: Any, k: Any, v: Any, sinks: Any = None) -> jax.Array:
        return layers.attention(q, k, v, run, scale=DIM**-0.5, window=window, sinks=sinks)

    def exact(q: Any, k: Any, v: Any, sinks: Any = None) -> jax.Array:
        return plain(q, k, v, sinks, window)

    found = with_gradients(attend, operands, cotangent)
    wanted = with_gradients(exact, [x.astype(jnp.float32) for x in operands], cotangent)
    for name, one, other in zip(("out", "q", "k", "v", "sinks"), found, wanted, strict=False):
        if implementation:
            assert helpers.relative(one, np.asarray(other)) < 0.02, name
        else:
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_the_command_that_generates(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = load_file(FIXTURES / "qwen3_moe" / "expected.safetensors")
    prompt, greedy = wanted["ids"][0], wanted["greedy"][0]
    options = ["--tokens", str(greedy.size), "--dtype", "float32"]
    assert generate.main([str(FIXTURES / "qwen3_moe"), " ".join(map(str, prompt)), *options]) == 0
    assert capsys.readouterr().out.split() == [str(token) for token in greedy]

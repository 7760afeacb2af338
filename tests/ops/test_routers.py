"""Routers, losses, loads and the bias that balances, against numpy; over devices, against the whole batch."""

from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OpenGroup
from helpers import Rng
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from test_pallas_kernels import INTERPRET, lowered_for_h200

import jax_ep
from jax_ep import Implementation, MoeStats, nn
from jax_ep.nn.balance import Score
from jax_ep.pallas_kernels import Groups, RouterTiling, best_groups, route

SIZE, TOKENS, EXPERTS, K = 4, 20, 16, 4
zeros: Any = np.zeros

pytestmark = pytest.mark.usefixtures("strict")


def log_scores(logits: np.ndarray, score: str) -> np.ndarray:
    wide = logits.astype(np.float64)
    if score == "sigmoid":
        return -np.logaddexp(0, -wide)
    shifted = wide - wide.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def weights_of(logits: np.ndarray, ids: np.ndarray, score: str, renormalize: bool = True) -> np.ndarray:
    valid = (ids >= 0) & (ids < logits.shape[1])
    weights = np.exp(np.take_along_axis(log_scores(logits, score), np.where(valid, ids, 0), axis=1)) * valid
    total = weights.sum(axis=1, keepdims=True)
    return weights / np.where(total == 0, 1, total) if renormalize else weights


def in_order(scores: np.ndarray) -> np.ndarray:
    """Where the greatest of the last axis are, in the order of `jax.lax.top_k`: of equal ones the first."""
    bits = np.where(np.isnan(scores), np.float32(np.nan), scores).astype(np.float32).view(np.int32).astype(np.int64)
    return np.argsort(-np.where(bits < 0, bits ^ 0x7FFFFFFF, bits), axis=-1, kind="stable")


def within(scores: np.ndarray, groups: Groups) -> np.ndarray:
    """The scores, minus infinity outside the best groups."""
    by_group = scores.reshape(len(scores), groups.total, -1)
    best = np.take_along_axis(by_group, in_order(by_group)[..., : groups.best], axis=2)
    kept = in_order(best.sum(axis=2))[:, : groups.kept]
    inside = (kept[:, None, :] == np.arange(groups.total)[:, None]).any(axis=2)
    return np.where(inside[:, :, None], by_group, -np.inf).reshape(scores.shape)


def router(score: str, groups: Groups | None, **options: Any) -> Any:
    if groups:
        options |= {"groups": groups.total, "top_groups": groups.kept, "best_of_group": groups.best}
    return jax.jit(partial(getattr(nn, f"{score}_top_k"), top_k=K, **options))


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize(
    ("score", "experts", "groups", "renormalize", "scale"),
    [
        ("softmax", 12, None, True, 1.0),
        ("softmax", 16, None, False, 1.0),
        ("softmax", 16, Groups(4, 2, 1), False, 2.0**31),  # as DeepSeek-V2 routes
        *(("softmax", 12, groups, True, 1.0) for groups in (Groups(4, 2, 2), Groups(3, 2, 1))),
        *(("sigmoid", 16, groups, True, 2.5) for groups in (Groups(4, 2, 2), Groups(4, 1, 1), Groups(8, 3, 2))),
        *(("sigmoid", 12, groups, True, 2.5) for groups in (None, Groups(4, 2, 2), Groups(3, 2, 1))),
    ],
    ids=str,
)
def test_choices(score: Score, experts: int, groups: Any, renormalize: bool, scale: float, rng: Rng) -> None:
    """Of ties, and of what is not finite, ids are those of a stable sort. Scores that are all NaN are ordered by their
    signs, which platforms choose."""
    logits = rng.choice([-0.0, 0, 1, 1, 2, 200, -200, -300], (220, experts)).astype(np.float32)
    for value, tokens in ((np.nan, slice(0, 60)), (np.inf, slice(40, 80)), (-np.inf, slice(70, 120))):
        logits[tokens] = np.where(rng.random(logits[tokens].shape) < 0.1, value, logits[tokens])
    logits[120:130], logits[130:140], logits[200:] = -np.inf, 0, rng.standard_normal((20, experts))
    bias = rng.choice([-0.0, 0, 0.5, -0.7, 0.3], experts).astype(np.float32) * (score == "sigmoid")
    if score == "sigmoid" and (groups is None or groups.kept > 1):  # one of the groups is the same for all tokens
        bias[rng.integers(experts)] = np.nan if experts == 12 else np.inf
    options: dict[str, Any] = {"renormalize": renormalize} | ({"bias": bias} if score == "sigmoid" else {})
    choose = jax.jit(lambda x, scale: router(score, groups, scale=scale, **options)(x))
    routed = helpers.fetch(choose(logits, jnp.bfloat16(scale)))
    with np.errstate(all="ignore"):
        scores = np.exp(log_scores(logits, score)).astype(np.float32)
        bad = np.isnan(scores).any(axis=1) & (score == "softmax")
        scores += bias
        if groups:
            found = jax.jit(lambda x: nn.within_top_groups(x, K, *groups))(scores)
            scores = within(scores, groups)
            np.testing.assert_array_equal(found, scores)
        chosen = in_order(scores)[:, :K]
        wanted = scale * weights_of(logits, chosen, score, renormalize)
    np.testing.assert_array_equal(routed.expert_ids[~bad], chosen[~bad])
    np.testing.assert_allclose(routed.weights, wanted, rtol=1e-5, atol=1e-37 * scale)
    assert bad.any() == (score == "softmax")
    assert all(len({*ids}) == K for ids in routed.expert_ids.tolist())


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("replayed", [True, False])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_some_tokens_and_given_ids(score: Score, replayed: bool, renormalize: bool, rng: Rng) -> None:
    """Gradients are those of the batch without the masked tokens, which hold anything. The bias has none."""
    logits = rng.standard_normal((TOKENS, EXPERTS)).astype(np.float32)
    ids = np.argsort(-logits, axis=1)[:, :K]
    if replayed:
        ids = rng.integers(-1, EXPERTS + 1, ids.shape)
        ids[2], ids[3] = -1, (5, 5, 7, -1)
        logits[4, ids[4] % EXPERTS] = -60  # softmax rounds them to 1e-27
    if score == "sigmoid":
        logits[6] -= 60
    mask, by = rng.random(TOKENS) < 0.7, rng.standard_normal(ids.shape).astype(np.float32)
    mask[:8] = np.arange(8) != 1
    given = logits.copy()
    given[~mask] = rng.choice([np.nan, np.inf, -np.inf, 1], given[~mask].shape)
    given[1] = np.nan
    options: Any = {"ids": ids.astype(np.int8) if replayed else None, "mask": mask, "renormalize": renormalize}

    def total(logits: jax.Array, bias: jax.Array) -> tuple[jax.Array, nn.Routed]:
        its_bias = {"bias": bias} if score == "sigmoid" else {}
        routed = router(score, None, **options, **its_bias)(logits)
        return jnp.sum(routed.weights * by), routed

    gradients, routed = helpers.fetch(jax.jit(jax.grad(total, (0, 1), has_aux=True))(given, jnp.zeros(EXPERTS)))
    ids[~mask] = -1
    exact = partial(weights_of, ids=ids, score=score, renormalize=renormalize)
    np.testing.assert_array_equal(routed.expert_ids, ids)
    np.testing.assert_allclose(routed.weights, exact(logits.astype(np.float64)), rtol=1e-5)
    wanted = finite_differences(lambda x: float(np.sum(exact(x) * by)), logits.astype(np.float64))
    np.testing.assert_allclose(gradients[0], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    assert not gradients[1].any()


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_no_tokens(score: Score) -> None:
    """Also of groups of experts, and derivatives."""
    logits = jnp.zeros((0, EXPERTS))
    for groups in (None, Groups(4, 2, 2)):
        weights, pull = jax.vjp(lambda x, groups=groups: router(score, groups)(x).weights, logits)
        assert (weights.shape, pull(weights)[0].shape) == ((0, K), logits.shape)
    assert nn.within_top_groups(logits, K, 4, 2).shape == logits.shape


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("router", [nn.softmax_top_k, partial(nn.sigmoid_top_k, groups=4, top_groups=2)])
def test_derivatives_twice_in_a_batch(router: Any, rng: Rng) -> None:
    """Forward and reverse, of logits far enough apart that the choice stays."""
    logits = rng.permuted(np.broadcast_to(np.linspace(-1, 1, EXPERTS), (2, 3, EXPERTS)), axis=2).astype(np.float32)
    by, mask = rng.standard_normal((2, 3, K)).astype(np.float32), np.array([True, False, True])

    def total(logits: jax.Array) -> jax.Array:
        routed = jax.vmap(lambda x: router(x, K, mask=mask, renormalize=False))(logits)
        return jnp.sum(routed.weights * by)

    check_grads(total, (logits,), order=2, modes=("fwd", "rev"), rtol=2e-2, atol=2e-3, eps=1e-2)


@pytest.mark.parametrize(("experts", "groups"), [(256, Groups(8, 4, 2)), (160, Groups(8, 3)), (7, None), (8192, None)])
def test_routers_lower_for_gpus_inside_shard_map(experts: int, groups: Groups | None) -> None:
    def body(logits: jax.Array, bias: jax.Array, ids: jax.Array, mask: jax.Array) -> Any:
        chosen = route(logits, 5, score="sigmoid", bias=bias, groups=groups, mask=mask)
        return chosen, route(logits, 5, score="softmax", ids=ids), best_groups(logits, groups or Groups())

    shapes = ((400, experts), jnp.bfloat16), ((experts,), np.float32), ((400, 5), np.int64), ((400,), np.bool_)
    with jax.enable_x64(True):
        text = lowered_for_h200(body, starmap(jax.ShapeDtypeStruct, shapes), (P("ep"), P(), P("ep"), P("ep")))
    assert text.count("xla.gpu.triton") == 3


@pytest.mark.skipif(INTERPRET, reason="needs a GPU")
def test_logits_of_more_than_2_31_values() -> None:
    tokens, experts = 8_500_000, 256
    shape = tokens, experts
    token, expert = (partial(jax.lax.broadcasted_iota, np.int32, shape, axis) for axis in (0, 1))
    logits = jax.jit(lambda: ((token() * 7 + expert() * 31) % 97).astype(jnp.bfloat16))()  # all are exact
    for tiling in (None, RouterTiling(1, 1), RouterTiling(32, 8)):
        call = jax.jit(partial(route, top_k=8, score="softmax", tiling=tiling))
        ids, weights = call(logits)
        for part in (slice(0, 1000), slice(tokens - 1000, tokens)):
            rows = np.asarray(logits[part]).astype(np.float32)
            wanted = np.argsort(-rows, axis=1, kind="stable")[:, :8]
            np.testing.assert_array_equal(ids[part], wanted)
            exact = np.exp(np.take_along_axis(rows, wanted, axis=1) - rows.max(axis=1, keepdims=True))
            np.testing.assert_allclose(weights[part], exact / exact.sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-9)


def rounded(ids: np.ndarray, weights: np.ndarray, multiple: int) -> np.ndarray:
    """Which assignments are left, expert by expert. The first K columns are chosen; the greatest weights go first."""
    left = np.zeros(ids.shape, bool)
    for expert in range(EXPERTS):
        places = sorted(map(tuple, np.argwhere(ids == expert)), key=lambda at: (at[1] >= K, -weights[at], at))
        count = sum(at[1] < K for at in places)
        down = count // multiple * multiple
        goes_up = 2 * (count - down) >= multiple and len(places) >= down + multiple
        for at in places[: down + multiple if goes_up else down]:
            left[at] = True
    return left


@pytest.mark.parametrize(
    ("devices", "multiple", "more", "renormalize"),
    [(None, 8, 2, True), (4, 8, 1, False), (4, 3, EXPERTS - K, True), (None, 64, 2, False)],
)
def test_round_tokens(devices: int | None, multiple: int, more: int, renormalize: bool, rng: Rng) -> None:
    """Counts are multiples over all devices; the least weights move. Ids that are no experts stay without weights."""
    x = (rng.standard_normal((160, EXPERTS)) + np.linspace(0, 1, EXPERTS)).astype(np.float32)
    by = rng.standard_normal((160, K + more)).astype(np.float32)
    no_expert = rng.random(by.shape) < 0.03
    routed = helpers.fetch(nn.softmax_top_k(x, K + more, renormalize=renormalize))
    ids = np.where(no_expert, rng.choice([-1, EXPERTS, helpers.BIG], by.shape), routed.expert_ids)
    axis = "ep" if devices else None

    def sums(x: jax.Array, by: jax.Array, ids: jax.Array) -> tuple[jax.Array, nn.Routed]:
        weights = nn.softmax_top_k(x, K + more, renormalize=renormalize).weights
        out = nn.round_tokens(
            nn.Routed(ids, weights), K, EXPERTS, multiple=multiple, renormalize=renormalize, axis_name=axis
        )
        return (out.weights * by).sum(axis=1), out

    body = helpers.sharded(helpers.mesh_of(ep=devices), sums, P("ep"), P("ep")) if devices else jax.jit(sums)
    _, pull, found = jax.vjp(lambda x: body(x, by, ids), x, has_aux=True)
    found = helpers.fetch(found)

    valid = (ids >= 0) & (ids < EXPERTS)
    there = rounded(ids, routed.weights, multiple)
    np.testing.assert_array_equal(found.expert_ids, np.where(there | ~valid, ids, -1))
    before, after = (np.asarray(nn.expert_load(each, EXPERTS)) for each in (ids[:, :K], found.expert_ids))
    assert not (after % multiple).any()
    assert (np.abs(after - before) < multiple).all()
    assert (after < before).any()
    assert (after > before).any() or multiple == 64

    def dense(x: jax.Array) -> jax.Array:
        """The same weights, out of the probabilities of all experts."""
        of_chosen = jnp.take_along_axis(jax.nn.softmax(x), routed.expert_ids, axis=1)
        left = jnp.where(there, of_chosen, 0)
        if not renormalize:
            return left
        before = jnp.where(valid, of_chosen, 0).sum(axis=1) / of_chosen.sum(axis=1)
        return left * (before / jnp.where(there.any(axis=1), left.sum(axis=1), 1))[:, None]

    with jax.enable_x64():
        exact, d_exact = jax.vjp(dense, x.astype(np.float64))
        wanted = d_exact(jnp.asarray(by.astype(np.float64)))[0]
    np.testing.assert_allclose(found.weights, exact, rtol=1e-5, atol=1e-7)
    gradient = pull(np.ones(len(x), np.float32))[0]
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-6)
    none = nn.round_tokens(nn.Routed(jnp.asarray(ids[:0]), routed.weights[:0]), K, EXPERTS, multiple=multiple)
    assert none.expert_ids.shape == none.weights.shape == (0, K + more)


def test_loads() -> None:
    """Of ids of any integer dtype."""
    ids = np.array([[0, 1], [0, -1], [0, 7], [9, 2]], np.int32)  # -1 skips, 9 is no expert
    load = nn.expert_load(ids, 8)
    np.testing.assert_array_equal(load, [3, 1, 1, 0, 0, 0, 0, 1])
    stats = nn.load_stats(load)
    np.testing.assert_allclose(
        stats, [3 / (6 / 8), 0.5, -(0.5 * np.log(0.5) + 0.5 * np.log(1 / 6)) / np.log(8)], rtol=1e-5
    )
    moved = [-0.25, -0.25, -0.25, 0.25, 0.25, 0.25, 0.25, -0.25]  # up for experts below the mean of 6 / 8
    np.testing.assert_allclose(nn.balanced_bias(jnp.ones(8), load, rate=0.25), np.add(1, moved))
    np.testing.assert_allclose(nn.load_stats(load, ranks=2)[:2], [5 / 3, 0], rtol=1e-6)
    np.testing.assert_allclose(nn.load_stats(jnp.full(4, 7)), [1, 0, 1], rtol=1e-6)
    np.testing.assert_allclose(nn.load_stats(jnp.zeros(4)), [0, 1, 0], atol=1e-6)
    for dtype in (np.int8, np.uint8, np.uint64):
        ids = np.array([[0, 7], [7, -1 if dtype is np.int8 else 255]]).astype(dtype)
        np.testing.assert_array_equal(nn.expert_load(ids, 200), np.bincount([0, 7, 7], minlength=200))
        np.testing.assert_allclose(nn.balance_loss(zeros((2, 200)), ids), 1, rtol=1e-5)


def test_scalars() -> None:
    counts = jnp.array([3, 1, 1, 0, 0, 0, 0, 1], jnp.int32)
    stats = MoeStats(counts, jnp.array([1, 2], jnp.int32), jnp.array([0, 4], jnp.int32))
    found = {name: float(x) for name, x in jax.jit(partial(nn.scalars, ranks=2))(stats).items()}
    wanted = {"assignments": 6, "dropped": 3, "invalid": 4, "expert_load/max_over_mean": 4, "expert_load/idle": 0.5}
    wanted |= {"rank_load/max_over_mean": 5 / 3, "rank_load/idle": 0}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    assert found.keys() - wanted.keys() == {"expert_load/entropy", "rank_load/entropy"}
    assert not any("rank" in name for name in nn.scalars(stats))


def test_replay_through_layers(implementation: Implementation, open_group: OpenGroup, rng: Rng) -> None:
    """The ids that two layers chose on 2 ranks are replayed on 4 by routers that have changed."""
    layers, hidden, tokens = 2, 8, SIZE * 6
    x = rng.standard_normal((tokens, hidden))
    shapes = ((hidden, EXPERTS), (hidden, EXPERTS), (EXPERTS, hidden, 12), (EXPERTS, 12, hidden))
    old, new, up, down = (rng.standard_normal((layers, *shape)) / shape[-2] ** 0.5 for shape in shapes)
    by = rng.standard_normal(x.shape)

    def exact(routers: np.ndarray, ids: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        out, chosen = x, []
        for i, router in enumerate(routers):
            logits = out @ router
            chosen.append(np.argsort(-logits, axis=1)[:, :K] if ids is None else ids[i])
            inner = np.einsum("th,ehf->tef", out, up[i])
            answers = np.einsum("tef,efh->teh", inner / (1 + np.exp(-inner)), down[i])
            weights = weights_of(logits, chosen[-1], "softmax")
            out = out + np.einsum("tk,tkh->th", weights, np.take_along_axis(answers, chosen[-1][:, :, None], axis=1))
        return out, np.stack(chosen)

    def program(ranks: int, ids: Any) -> Callable[..., Any]:
        group = open_group(ranks)

        def layer(x: jax.Array, of_layer: Any) -> tuple[jax.Array, jax.Array]:
            router, up, down, ids = of_layer
            routed = nn.softmax_top_k(x @ router, K, ids=ids)
            experts = jax_ep.Experts(gate=None, up=up, down=down)
            return x + jax_ep.moe_mlp(x, *routed, experts, group=group, implementation=implementation)[0], routed[0]

        over, of_layers = P("ep"), P(None, "ep")
        in_specs = over, P(), of_layers, of_layers, None if ids is None else of_layers
        scan = partial(jax.lax.scan, layer)
        body = helpers.sharded(group.mesh, lambda x, *layers: scan(x, layers), in_specs, (over, of_layers))
        given = [np.float32(each) for each in (x, up, down)]
        return lambda routers: body(given[0], jnp.float32(routers), *given[1:], ids)

    captured = np.array(program(2, None)(old)[1])
    np.testing.assert_array_equal(captured, exact(old)[1])
    captured[1, :5, 2] = -1  # not captured
    assert (captured != exact(new)[1]).any(axis=2).mean() > 0.5
    out, pull, replayed = jax.vjp(program(SIZE, captured), np.float32(new), has_aux=True)
    np.testing.assert_array_equal(replayed, captured)
    np.testing.assert_allclose(out, exact(new, captured)[0], rtol=1e-4, atol=1e-5)
    wanted = finite_differences(lambda routers: float(np.sum(exact(routers, captured)[0] * by)), new)
    np.testing.assert_allclose(pull(np.float32(by))[0], wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


def draw(rng: Rng) -> tuple[np.ndarray, np.ndarray]:
    """Logits and ids of all devices: some skip experts, one token has none, one names one expert four times."""
    ids = rng.integers(-1, EXPERTS, (SIZE * TOKENS, K)).astype(np.int32)
    ids[5], ids[6], ids[7, 0] = -1, 2, EXPERTS
    return rng.standard_normal((SIZE * TOKENS, EXPERTS)), ids


def counted(ids: np.ndarray) -> np.ndarray:
    return np.bincount(ids[(ids >= 0) & (ids < EXPERTS)], minlength=EXPERTS)


def balance(logits: np.ndarray, ids: np.ndarray, score: str) -> float:
    """Of the tokens that go anywhere."""
    scores = np.exp(log_scores(logits[((ids >= 0) & (ids < EXPERTS)).any(axis=1)], score))
    probabilities, counts = scores / scores.sum(axis=1, keepdims=True), counted(ids)
    return EXPERTS * np.sum(counts / counts.sum() * probabilities.mean(axis=0))


def over_devices(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of shards along "ep", with check_vma: its result must be the same on all of them."""
    return helpers.sharded(helpers.mesh_of(ep=SIZE), function, P("ep"), P())


def finite_differences(function: Callable[[np.ndarray], float], x: np.ndarray) -> np.ndarray:
    wanted = np.zeros(x.shape)
    for place in np.ndindex(*x.shape):
        step = np.zeros(x.shape)
        step[place] = 1e-5
        wanted[place] = (function(x + step) - function(x - step)) / 2e-5
    return wanted


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_balance_over_devices_and_of_sequences(score: Score, rng: Rng) -> None:
    logits, ids = draw(rng)
    spread = over_devices(lambda x, ids: nn.balance_loss(x, ids, score=score, axis_name="ep"))
    given = logits.astype(np.float32)
    given[5, :3] = np.nan, np.inf, -np.inf  # of the token that has no expert
    value, gradient = jax.value_and_grad(spread)(given, ids)
    np.testing.assert_allclose(value, balance(logits, ids, score), rtol=1e-5)
    wanted = finite_differences(lambda x: balance(x, ids, score), logits)
    np.testing.assert_allclose(gradient, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    load = over_devices(lambda ids: nn.expert_load(ids, EXPERTS, axis_name="ep"))(ids)
    np.testing.assert_array_equal(load, counted(ids))
    each = logits.reshape(SIZE, TOKENS, -1), ids.reshape(SIZE, TOKENS, -1)
    of_sequences = jax.vmap(partial(nn.balance_loss, score=score))(each[0].astype(np.float32), each[1])
    np.testing.assert_allclose(of_sequences, [balance(*one, score) for one in zip(*each, strict=True)], rtol=1e-5)


def test_z_loss_of_some_tokens(rng: Rng) -> None:
    logits = 3 * draw(rng)[0]
    mask = rng.uniform(size=len(logits)) < 0.5
    mask[:TOKENS] = False  # a device without tokens
    squares = np.log(np.exp(logits).sum(axis=1)) ** 2
    spread = over_devices(lambda x, mask: nn.z_loss(x, mask, axis_name="ep"))
    given = np.where(mask[:, None], logits, rng.choice([np.nan, np.inf, -np.inf], logits.shape)).astype(np.float32)
    value, gradient = jax.value_and_grad(spread)(given, mask)
    np.testing.assert_allclose(value, squares[mask].mean(), rtol=1e-5)
    slope = 2 * np.log(np.exp(logits).sum(axis=1)) * mask / mask.sum()
    np.testing.assert_allclose(gradient, slope[:, None] * np.exp(log_scores(logits, "softmax")), rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(nn.z_loss(logits.astype(np.float32)), squares.mean(), rtol=1e-5)
    assert nn.z_loss(logits.astype(np.float32), np.zeros_like(mask)) == 0


X = np.zeros((TOKENS, EXPERTS), np.float32)
ROUTED = nn.Routed(helpers.zeros((TOKENS, 4), np.int32), helpers.zeros((TOKENS, 4)))
REFUSED: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    *(
        (route, arguments, {"score": "softmax"} | options, match)
        for arguments, options, match in (
            ((X[0], 2), {}, r"logits must have shape \[T, E\], got \(16,\)"),
            ((zeros((1, 8193), np.float32), 2), {}, "logits must have at most 8192 experts in padded groups, got 8193"),
            ((X, 9), {"groups": Groups(4, 2)}, r"top_k must be in \[1, 8\], got 9"),
            ((X, 2), {"groups": Groups(3)}, r"groups.total must divide the 16 experts, got 3"),
            ((X, 2), {"groups": Groups(2, 3)}, r"groups.kept must be in \[1, 2\], got 3"),
            ((X, 2), {"groups": Groups(2, 1, 0)}, "groups.best must be at least 1, got 0"),
            ((X, 2), {"score": "tanh"}, "score must be 'softmax' or 'sigmoid', got 'tanh'"),
            ((X, 2), {"ids": zeros((TOKENS, 1), int)}, r"ids must have shape \[T, K\] = \(20, 2\), got \(20, 1\)"),
            ((X, 2), {"mask": zeros(TOKENS)}, "mask must be of dtype bool"),
        )
    ),
    (nn.softmax_top_k, (X, 17), {}, r"top_k must be in \[1, E = 16\], got 17"),
    (nn.softmax_top_k, (X, 2.0), {}, "top_k must be a Python int"),
    (nn.softmax_top_k, (X.astype(np.int32), 1), {}, "logits must be of dtype .*, got int32"),
    (nn.softmax_top_k, (X, 4), {"groups": 4, "best_of_group": 0}, "best_of_group must be at least"),
    (nn.softmax_top_k, (X, 4), {"renormalize": "no"}, "renormalize must be True or False, got"),
    (nn.sigmoid_top_k, (X, 4), {"groups": 3}, "groups must divide the 16 experts, got 3"),
    (nn.sigmoid_top_k, (X, 4), {"bias": zeros(3)}, r"bias must have shape \[E\] = \(16,\)"),
    (nn.sigmoid_top_k, (X, 4), {"bias": zeros(16, int)}, "bias must be of dtype float32"),
    (nn.sigmoid_top_k, (X, 4), {"groups": 8, "top_groups": 1}, "top_groups must be .* that they hold top_k = 4 .* 1"),
    (nn.sigmoid_top_k, (X, 4), {"scale": None}, "scale must be a number, got NoneType"),
    (nn.sigmoid_top_k, (X, 4), {"mask": zeros(4, bool)}, r"mask must have shape \[T\] = \(20,\), got \(4,\)"),
    (nn.softmax_top_k, (X, 4), {"mask": zeros(TOKENS)}, "mask must be of dtype bool, got float64"),
    (nn.softmax_top_k, (X, 4), {"ids": zeros((TOKENS, 3), int)}, r"ids must have shape \[T, K\] = \(20, 4\), got"),
    (nn.sigmoid_top_k, (X, 4), {"ids": X[:, :4]}, "ids must be of an integer dtype, got float32"),
    (nn.within_top_groups, (X, 4, 4, 5), {}, "top_groups must be at most the 4 groups, .* 5"),
    (nn.within_top_groups, (X, 0, 4, 1), {}, "top_k must be at least 1, got 0"),
    (nn.within_top_groups, (X[0], 1, 4, 1), {}, r"scores must have shape \[T, E\], got"),
    (nn.round_tokens, (ROUTED, 5, 16), {}, r"top_k must be in \[1, K = 4\], got 5"),
    (nn.round_tokens, (ROUTED._replace(weights=X[:1]), 1, 16), {}, r"routed\.weights must have shape .* = \(20, 4"),
    (nn.round_tokens, (ROUTED, 1, 16), {"multiple": 0}, "multiple must be at least 1, got 0"),
    (nn.round_tokens, (X, 1, 16), {}, "routed must be a Routed of ids and weights, got float32"),
    (nn.round_tokens, (ROUTED, 1, 2**31 - 1), {}, r"num_experts must be below 2\*\*30, got 2147483647"),
    *(
        (op, given, {"axis_name": "ep"}, "axis_name must be of the jax.shard_map around the call, got 'ep' outside")
        for op, given in ((nn.round_tokens, (ROUTED, 1, 16)), (nn.z_loss, (X,)), (nn.expert_load, (zeros(3, int), 4)))
    ),
    (nn.balance_loss, (X, zeros((2, 1), int)), {}, r"expert_ids must be of the 20 tokens of logits, got \(2, 1\)"),
    (nn.balance_loss, (X, ROUTED.expert_ids), {"score": "tanh"}, "score must be one of"),
    (nn.balance_loss, (X, X), {}, "expert_ids must be of an integer dtype, got"),
    (nn.softmax_top_k, (zeros((2, 3, 8)), 2), {}, r"logits .*, got \(2, 3, 8\): flatten .* \.reshape\(-1, E\)$"),
    (nn.z_loss, (X, zeros((2, 10), bool)), {}, r"mask must have shape \[T\] = \(20,\), got \(2, 10\)"),
    (nn.scalars, (X,), {}, r"stats must be a jax_ep\.MoeStats, got float32\[20,16\]"),
    (nn.scalars, (MoeStats._make([None] * 3),), {}, "stats.counts must be an array, got NoneType"),
    (nn.z_loss, (X[0],), {}, r"logits must have shape \[T, E\], got \(16,\)"),
    (nn.z_loss, (X, zeros(TOKENS)), {}, "mask must be of dtype bool, got float64"),
    (nn.balanced_bias, (zeros(3), zeros(4)), {}, r"load must have shape that of bias = \(3,\)"),
    (nn.balanced_bias, (zeros(3), zeros(3)), {"rate": "0.1"}, "rate must be a number, got str"),
    (nn.balanced_bias, (zeros(3, int), zeros(3)), {}, "bias must be of a float dtype, got int64"),
    (nn.expert_load, (X, 4), {}, "expert_ids must be of an integer dtype, got float32"),
    (nn.expert_load, (zeros((3, 2), int), -1), {}, "num_experts must be at least 1, got -1"),
    (nn.expert_load, (zeros((3, 2), int), 2**31), {}, r"num_experts must be below 2\*\*31, got"),
    (nn.expert_load, (zeros(3, int), 4), {"axis_name": 0}, "axis_name must be an axis of the mesh"),
    (nn.load_stats, (zeros(0),), {}, r"load must be of one expert at least, got \(0,\)"),
    (nn.load_stats, (zeros(8, complex),), {}, "load must be of an integer or float dtype, got complex"),
    (nn.load_stats, ([1, 2],), {}, "load must be an array, got list"),
    (nn.load_stats, (zeros(8),), {"ranks": 3}, "ranks must divide the 8 experts, got 3"),
]


@pytest.mark.parametrize(("op", "given", "options", "match"), REFUSED)
def test_what_is_refused(op: Any, given: Any, options: Any, match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{op.__name__}: {match}"):
        op(*given, **options)

"""The examples train; the language model alike on every platform and with every implementation."""

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from conftest import require_native
from jax.sharding import Mesh

from jax_ep import Group, Implementation, NodeOptions
from jax_ep.__main__ import _DEMOS, load, main

STEPS, EXAMPLES = 20, helpers.ROOT / "examples"
example = partial(load, "examples")  # by its name


def random_text() -> np.ndarray:
    """Words, the same with every Python, whose own sources the demo reads."""
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, rng.integers(2, 9)).astype(np.uint8)) for _ in range(100)]
    return np.frombuffer(b" ".join(words[i] for i in rng.integers(0, 100, 50_000)), np.uint8)


@pytest.mark.timeout(600)
def test_losses_are_those_of_xla_and_fall_alike_when_rounded(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts in float8, or of rounded rows, learn as fast: within 2 % of each loss. The seed chooses one of both."""
    require_native()
    demo, text = example("train_moe_lm"), random_text()
    monkeypatch.setattr(demo, "LENGTH", 32)  # of a text
    size = min(2, helpers.largest_size())

    def losses(devices: Sequence[Any], implementation: Implementation, **how: Any) -> np.ndarray:
        config = demo.moe_lm.Config(layers=1, implementation=implementation, **how)
        with Group(Mesh(np.array(devices), ("ep",)), "ep") as group:
            params = demo.moe_lm.init_params(jax.random.key(demo.SEED), config, group)
            _, metrics = demo.train(params, text, STEPS, config, group)
            group.check()
        return metrics.loss

    ours = losses(jax.devices()[:size], "kernels")
    assert f" 0/{STEPS} [00:00<?, ?step/s, compiling]" in capsys.readouterr().err
    wanted = losses(jax.devices("cpu")[:size], "xla")
    print(f"largest difference {np.abs(ours - wanted).max():.1e}")
    np.testing.assert_allclose(ours, wanted, rtol=1e-4)
    assert ours[-1] < 0.8 * ours[0]
    ways: list[dict[str, Any]] = [{"precision": "float8"}, {"multiple": 8}]
    for how in ways if pytestconfig.getoption("nightly") else ways[helpers.SEED % 2 :][:1]:
        off = np.abs(losses(jax.devices()[:size], "auto", **how) / ours - 1).max()
        print(f"{how}: {off:.4f}")
        assert 1e-5 < off < 0.02, how


@pytest.mark.parametrize("prompt", [b"", b"12345"])
def test_prompts_that_cannot_be_continued(prompt: bytes) -> None:
    """Nothing stands before the first byte of a text."""
    demo = example("train_moe_lm")
    config = demo.moe_lm.Config(layers=1)
    with Group(helpers.mesh_of(ep=1), "ep") as group:
        params = demo.moe_lm.init_params(jax.random.key(0), config, group)
        with pytest.raises(ValueError, match=f"prompt must have from 1 to length = 4 bytes, got {len(prompt)}"):
            demo.moe_lm.generate(params, prompt, 4, 0, config, group)


@pytest.mark.parametrize("wrong", [0, 3, 16])
def test_nodes_that_do_not_divide_the_devices(wrong: int) -> None:
    helpers.mesh_of(ep=8)
    demo = example("train_moe_lm")
    with pytest.raises(SystemExit, match=f"must divide the 8 devices, and the 8 that are used, got {wrong}"):
        demo.open_group(wrong, demo.moe_lm.Config(layers=1))


def test_a_picture_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder, or in a folder that is missing or read-only, which os.access says because root may write anywhere."""
    demo, writable = example("train_moe_lm"), os.access
    monkeypatch.setattr(demo, "load_bytes", lambda: pytest.fail("the demo begins"))
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and writable(path, mode))
    for out in (EXAMPLES, tmp_path / "none" / "x.png", tmp_path / "x.png"):
        with pytest.raises(SystemExit):
            demo.main([f"--out={out}"])
        assert f"file that can be written, got {out}" in capsys.readouterr().err


@pytest.mark.usefixtures("native")
def test_experts_of_few_nodes_train() -> None:
    demo = example("node_limited")
    config = demo.Config(tokens=32, top_nodes=2)
    assert config.node_capacity(4) == 20
    mesh, nodes = helpers.mesh_of(node=4, ep=2), NodeOptions(20)
    with Group(mesh, demo.AXES, across_nodes=True, nodes=nodes, timeout=30) as group:
        history = list(demo.train(config, group, 25))
    losses = [loss for loss, _ in history]
    assert losses[-1] < 0.7 * losses[0]
    for _, counts in history:
        assert 1 <= counts.nodes <= config.top_nodes
        assert 0 <= counts.dropped < 0.2
        assert counts.load.sum() == 8 * 32 * config.top_k


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("name", "steps"), [("tensor_parallel_mlp", "10"), ("sparse_embedding", "100")])
def test_an_example_trains(name: str, steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert example(name).main(["--steps", steps]) == 0, capsys.readouterr().out


@pytest.mark.usefixtures("native")
def test_adapters_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert example("expert_products").main() == 0, capsys.readouterr().out
    differs = re.search(r"int8: differs by (\S+)", capsys.readouterr().out)
    assert differs
    assert float(differs[1]) < 0.02


def test_an_example_runs_as_a_file(tmp_path: Path) -> None:
    output = helpers.run_python(str(EXAMPLES / "nnx_moe.py"), "--steps=2", cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert "step 0: loss " in output


def test_help_needs_no_extras(tmp_path: Path) -> None:
    script = f"""
import runpy, sys
sys.modules.update(optax=None, matplotlib=None, tqdm=None)
sys.path[0] = {str(EXAMPLES)!r}
for name in ("node_limited", "sparse_embedding", "tensor_parallel_mlp", "train_moe_lm"):
    sys.argv = [name, "--help"]
    try:
        runpy.run_path(f"{{sys.path[0]}}/{{name}}.py", run_name="__main__")
    except SystemExit:
        pass
from jax_ep.__main__ import main
main(["demo", "--help"])
"""
    output = helpers.run_python("-c", script, cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert output.count("usage: ") == 5


@pytest.mark.parametrize("command", _DEMOS)
def test_help_names_the_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: python -m jax_ep {command} ")


@pytest.mark.usefixtures("native")
def test_dlrm_trains_alike_in_two_processes(tmp_path: Path) -> None:
    """Tables spread over two devices of one process, by kernels, and over two processes, by jax.lax."""
    steps = 12
    with Group(Mesh(np.array(jax.devices()[:2]), ("dp",)), "dp") as group:
        losses = example("dlrm").train(group, steps)
    command = ("-m", "jax_ep.launch", "-n", "2", str(EXAMPLES / "dlrm.py"), "--steps", str(steps))
    output = helpers.run_python(*command, cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert "2 devices of 2 processes" in output
    found = re.search(r"loss (\S+) at the start, (\S+) at the end", output)
    assert found
    np.testing.assert_allclose([float(x) for x in found.groups()], [losses[0], losses[-1]], rtol=1e-3)
    assert losses[-1] < 0.8 * losses[0]

"""Trains a model of examples/models on a file of tokens: `python -m jax_ep train-model --help`.

The file has tokens of one type, one after another, as numpy writes them: `tokens.astype("uint32").tofile(path)`. It is
mapped into memory. Batches follow from the seed and the step alone, so training that resumes from a checkpoint gives
the numbers that it would have given without the pause.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tqdm import tqdm

import jax_ep

if __name__ == "__main__":  # run as a file: the package is its folder
    sys.path.append(str(Path(__file__).parents[1]))
    __package__ = "examples"

from .models import model
from .models.families import config_of
from .models.layers import REMAT, Run
from .models.training import flops_per_token, make_train_step, peak_flops, state_of

AXIS = "ep"


class Tokens:
    """Random windows of a file of tokens."""

    def __init__(self, path: Path, dtype: str, seed: int, vocabulary: int):
        if not np.issubdtype(np.dtype(dtype), np.integer):
            raise ValueError(f"--dtype must be an integer dtype, got {dtype}")
        self.path, self.tokens = path, np.memmap(path, dtype, "r")
        self.seed, self.vocabulary = seed, vocabulary

    def batch(self, step: int, micro_batches: int, sequences: int, length: int) -> np.ndarray:
        """[micro_batches, sequences, length + 1] int32: of this step, whatever came before it."""
        count = self.tokens.size - length
        if count < 1:
            raise ValueError(f"{self.path}: must have more than {length} tokens, got {self.tokens.size}")
        starts = np.random.default_rng((self.seed, step)).integers(0, count, (micro_batches, sequences))
        found = self.tokens[starts[..., None] + np.arange(length + 1)]
        if (most := found.max()) >= self.vocabulary:
            raise ValueError(f"{self.path}: tokens must be below {self.vocabulary}, got {most}; is --dtype right?")
        if (least := found.min()) < 0:
            raise ValueError(f"{self.path}: tokens must not be negative, got {least}; is --dtype right?")
        return found.astype(np.int32)


class Keeper:
    """Checkpoints of the whole state in a folder, by orbax; the three newest stay."""

    def __init__(self, folder: Path):
        import orbax.checkpoint as orbax

        self.orbax = orbax
        options = orbax.CheckpointManagerOptions(max_to_keep=3, enable_async_checkpointing=False)
        self.manager = orbax.CheckpointManager(folder.absolute(), options=options)

    def restored(self, state: Any) -> Any:
        """The newest state, in the shards of `state`; or `state` itself if there is none."""
        if (newest := self.manager.latest_step()) is None:
            return state
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        return self.manager.restore(newest, args=self.orbax.args.StandardRestore(like))

    def keep(self, state: Any) -> None:
        self.manager.save(int(state.step), args=self.orbax.args.StandardSave(state))


def train(
    state: Any, step_of: Any, tokens: Tokens, options: argparse.Namespace, group: jax_ep.Group
) -> Iterator[tuple[Any, Any, float]]:
    """Trains from the state's step to the last; yields each step's state, metrics and tokens per second."""
    rows = NamedSharding(group.mesh, P(None, AXIS))
    shape = options.micro_batches, options.sequences * group.size, options.length
    for step in range(int(state.step), options.steps):
        start = time.perf_counter()
        state, metrics = step_of(state, jax.device_put(tokens.batch(step, *shape), rows))
        metrics = jax.device_get(metrics)  # awaits the step
        yield state, metrics, float(np.prod(shape)) / (time.perf_counter() - start)


def plot(history: list[Any], path: Path) -> None:
    """Writes the loss of each step, and the largest and smallest load of an expert, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([each.loss for each in history])
    left.set(title="Training loss", xlabel="step", ylabel="nats per token")
    load = np.array([each.load * each.load.shape[-1] for each in history])  # [steps, L, E], 1 is even
    right.plot(load.max(axis=(1, 2)), label="most loaded expert")
    right.plot(load.min(axis=(1, 2)), label="least loaded expert")
    right.set(title="Balance of all layers", xlabel="step", ylabel="times the even load", yscale="symlog")
    right.legend()
    figure.savefig(path, dpi=120)


def parser() -> argparse.ArgumentParser:
    of = argparse.ArgumentParser(
        prog="python -m jax_ep train-model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    of.add_argument("model", type=Path, help="a folder with config.json; its weights are the first if it has any")
    of.add_argument("tokens", type=Path, help="a file of tokens")
    of.add_argument("--dtype", default="uint32", help="of the tokens [%(default)s]")
    of.add_argument("--steps", type=int, default=100)
    of.add_argument("--sequences", type=int, default=4, help="of a micro-batch and device [%(default)s]")
    of.add_argument("--length", type=int, default=4096, help="of a sequence [%(default)s]")
    of.add_argument("--micro-batches", type=int, default=1, help="whose gradients are added up [%(default)s]")
    of.add_argument("--learning-rate", type=float, default=1e-5)
    of.add_argument("--balance", type=float, default=1e-3, help="factor of the balance loss [%(default)s]")
    of.add_argument(
        "--remat",
        choices=REMAT,
        default="none",
        help="what each layer keeps for the backward pass, see models.layers.REMAT [%(default)s]",
    )
    of.add_argument("--out", type=Path, default=Path("trained"), help="checkpoints, plot and model [%(default)s]")
    of.add_argument("--keep-every", type=int, default=100, help="steps between checkpoints [%(default)s]")
    of.add_argument("--tensorboard", type=Path, help="also write scalars for TensorBoard into this folder")
    of.add_argument("--seed", type=int, default=0)
    return of


def writer_of(folder: Path | None) -> Callable[[int, dict[str, float]], None]:
    """Writes the scalars of a step for TensorBoard, if there is a folder for them."""
    if folder is None:
        return lambda step, scalars: None
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(folder))

    def write(step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def report(rate: float, config: Any, options: argparse.Namespace, device: Any) -> str:
    """`rate`: tokens per second and device."""
    flops, peak = rate * flops_per_token(config, options.length), peak_flops(device)
    of_peak = f" ({flops / peak:.1%} of the peak)" if peak else ""
    memory = (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30
    return f"{rate:,.0f} tokens/s a device, {flops / 1e12:,.1f} TF/s{of_peak}, at most {memory:.1f} GiB"


def main(arguments: Sequence[str] | None = None) -> int:
    of = parser()
    options = of.parse_args(arguments)
    for name in ("sequences", "length", "micro_batches", "keep_every"):
        if getattr(options, name) < 1:
            of.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    config = config_of(options.model)
    tokens = Tokens(options.tokens, options.dtype, options.seed, config.vocab_size)
    with jax_ep.Group(Mesh(np.array(jax.devices()), (AXIS,)), AXIS) as group:
        run = Run(group, remat=REMAT[options.remat])
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(options.learning_rate, b2=0.95))
        if any(options.model.glob("*.safetensors*")):  # an index without its files is an error
            params = model.load(options.model, config, group, jnp.float32)
        else:
            params = model.init(jax.random.key(options.seed), config, group)
        first = state_of(params, optimizer, run)
        keeper, write = Keeper(options.out / "checkpoints"), writer_of(options.tensorboard)
        state = first = keeper.restored(first)
        step_of = make_train_step(config, optimizer, run, first, balance=options.balance)
        history: list[Any] = []
        rates: list[float] = []
        leads = jax.process_index() == 0
        with tqdm(total=options.steps, initial=int(first.step), unit="step", disable=not leads) as bar:
            for state, metrics, rate in train(first, step_of, tokens, options, group):
                history.append(metrics)
                rates.append(rate / group.size)
                bar.update()
                bar.set_postfix_str(f"loss {metrics.loss:.3f}, {rates[-1]:,.0f} tokens/s a device", refresh=False)
                load, step = metrics.load * metrics.load.shape[-1], int(state.step)
                scalars = {"loss": metrics.loss, "tokens per second": rate, "dropped": metrics.dropped}
                write(step, scalars | {"load/most": load.max(), "load/least": load.min()})
                if step % options.keep_every == 0 or step == options.steps:
                    keeper.keep(state)
        model.save(options.out / "model", state.params, config)
        if history and leads:
            plot(history, options.out / "training.png")
            print(report(statistics.median(rates), config, options, group.mesh.devices.flat[0]))
            print(f"loss {history[-1].loss:.4f}; wrote {options.out}/training.png and {options.out}/model")
    return 0


if __name__ == "__main__":
    sys.exit(main())

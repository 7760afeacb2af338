"""`python -m jax_ep` demo, demo-mlp, demo-sparse, demo-nodes, train-model, generate, info, report, bench."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax

from jax_ep._kit import ffi
from jax_ep.backends import who_computes
from jax_ep.runtime import report as flight_report, trace_report
from jax_ep.version import __version__

_DEMOS = {  # their modules and what they do
    "demo": ("train_moe_lm", "train a small MoE language model over all devices"),
    "demo-mlp": ("tensor_parallel_mlp", "train a tensor-parallel MLP"),
    "demo-sparse": ("sparse_embedding", "train word vectors with sparse gradients"),
    "demo-nodes": ("node_limited", "train experts on several nodes, few of them a token"),
    "train-model": ("train_model", "train Qwen3-MoE, GPT-OSS or DeepSeek-V3 on a file of tokens"),
    "generate": ("generate", "continue a text with one of these models"),
}
_BENCHES = {
    "moe": "dispatch and combine",
    "model": "training steps of a whole model",
    "decode": "a whole model that generates",
    "layer": "moe_mlp beside its products alone; --float8, --biases",
    "peers": "moe_mlp beside other libraries' layers on one GPU",
    "deep_ep": "dispatch and combine beside DeepEP's",
    "ragged": "ragged_all_to_all",
    "sparse": "sparse_all_reduce",
    "sums": "sums of rows by id, on one device",
    "routers": "softmax_top_k and sigmoid_top_k, on one device",
    "embedding": "training steps of an embedding table, on one device",
    "matmul": "dense and grouped matrix products",
    "collective_matmul": "products overlapped with a collective",
    "nodes": "dispatch and combine over several nodes",
    "report": "the tables of docs/performance.md, and which results are old",
}
_EXTRAS = {"matplotlib": "demo", "optax": "demo", "tqdm": "demo"}  # by the package that is missing
_EXTRAS |= dict.fromkeys(("orbax", "safetensors", "tensorboardX", "tokenizers"), "models")
_CPU_DEVICES = 8


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_ep", description="Collectives for mixture-of-experts in JAX.")
    parser.add_argument("--version", action="version", version=f"jax_ep {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, text) in _DEMOS.items():
        commands.add_parser(name, add_help=False, help=text)
    commands.add_parser("info", help="built platforms, devices, links, versions")
    report = commands.add_parser("report", help="what the dumps in a folder, or traces of jax_ep.profile, say")
    report.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="path",
        help="JAX_EP_DUMP of the job (touch its file `request` for dumps), or the traces of all its processes",
    )
    bench = commands.add_parser("bench", help="measure the ops against XLA's own collectives; --json [FILE] keeps it")
    kinds = bench.add_subparsers(dest="what", required=True)
    for name, text in _BENCHES.items():
        kinds.add_parser(name, add_help=False, help=text)
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command in ("info", "report"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "report":
        try:
            folder, *others = options.paths
            is_folder = folder.is_dir() and not others
            text = flight_report.report(folder) if is_folder else trace_report.report(options.paths)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        encoding = sys.stdout.encoding
        print(text.encode(encoding, "backslashreplace").decode(encoding))
        return 0
    _ask_for_cpu_devices()
    if options.command == "info":
        return info()
    try:
        if options.command in _DEMOS:
            return load("examples", _DEMOS[options.command][0]).main(rest)
        what = str(options.what)
        if what == "report":
            return load("benchmarks", what).main(rest)
        bench = load("benchmarks", "peers.run" if what == "peers" else what).BENCH
        return load("benchmarks", "runner").main(what, bench, rest)
    except ModuleNotFoundError as error:
        if (extra := _EXTRAS.get(error.name or "")) is None:
            raise
        sys.exit(f'{error.name} is missing: run python -m pip install "jax_ep[{extra}]"')


def info() -> int:
    devices = jax.devices()
    print("versions")
    print(f"  jax_ep {__version__}, python {platform.python_version()}")
    print("  " + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "numpy")))
    print("platforms")
    for name in ffi.PLATFORMS:
        print(f"  {name}: {'built' if ffi.is_built(name) else 'not built'}")
    print("devices")
    for device in devices:
        where = f"({ffi.library_name(device)}), process {device.process_index}"
        print(f"  {device.id}: {device.device_kind} {where}; ops: {who_computes(device)}")
    print("links")
    print(_links(ffi.library_name(devices[0])))
    return 0


def _links(library: str) -> str:
    if library == "cpu":
        return "  shared memory"
    if library != "cuda" or shutil.which("nvidia-smi") is None:
        return "  unknown"
    topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
    return topology.stdout.rstrip() or "  unknown: nvidia-smi topo -m printed nothing"


def _ask_for_cpu_devices() -> None:
    """Splits the CPU into virtual devices, unless the user already said how many. Harmless where there are GPUs."""
    is_set = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not is_set and jax.config.values["jax_num_cpu_devices"] < 0:
        jax.config.update("jax_num_cpu_devices", _CPU_DEVICES)


def load(package: str, module: str) -> ModuleType:
    """Imports a script of `package`, which is inside an installed jax_ep, and next to it in a source tree."""
    installed = f"jax_ep.{package}"
    return importlib.import_module(f"{installed if importlib.util.find_spec(installed) else package}.{module}")


if __name__ == "__main__":
    sys.exit(main())

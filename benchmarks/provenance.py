"""When, where and with what figures were measured: everything a reader needs to repeat them."""

import datetime
import importlib.metadata
import os
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax_ep


def cpu_name() -> str:
    """The processor's own name where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def header(devices: Sequence[Any], note: str, command: Sequence[str], packages: Sequence[str] = ()) -> str:
    """`note` says how jax_ep ran, `packages` are named with their versions besides JAX's own."""
    names = ("jax", "jaxlib", "numpy", *packages)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return "\n".join(
        (
            f"- date: {datetime.date.today().isoformat()}",
            f"- hardware: {cpu_name()}, {os.cpu_count()} cores; {len(devices)} x {devices[0].device_kind} devices",
            f"- versions: jax_ep {jax_ep.__version__} ({note}), {versions}, python {platform.python_version()}",
            f"- command: `{shlex.join(['python', '-m', 'jax_ep', 'bench', *command])}`",
        )
    )

"""Text that every machine has: the sources of Python's own standard library, as bytes."""

import sysconfig
from pathlib import Path

import numpy as np

# Tests, other people's packages, and files that are tables rather than code.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}


def load_bytes(folder: Path | None = None) -> np.ndarray:
    """All *.py files below `folder` (default: the standard library), in sorted order, as one [N] uint8 array."""
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts))
    if not files:
        raise FileNotFoundError(f"no *.py files to train on below {root}")
    return np.frombuffer(b"\n".join(path.read_bytes() for path in files), np.uint8)


def sample_batch(text: np.ndarray, rng: np.random.Generator, sequences: int, length: int) -> np.ndarray:
    """Random windows of the text: [sequences, length + 1] uint8, inputs and targets shifted by one."""
    starts = rng.integers(0, text.size - length, size=sequences)
    return text[starts[:, None] + np.arange(length + 1)]

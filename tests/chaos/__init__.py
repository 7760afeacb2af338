"""Chaos: random programs, lost and stopped processes, groups that come and go; nothing of it may give other numbers.

Every script prints its seed, and the line that repeats what failed:

    python -m tests.chaos.fuzz --configurations 10000 --seed 1
    python -m tests.chaos.faults --configurations 200 --seed 1
    python -m tests.chaos.lifecycle --seed 1

They run on the GPUs of this host where JAX finds some, else on CPU devices.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the oracles are modules of tests/

import environment  # noqa: F401 - before jax

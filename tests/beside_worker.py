"""Run by `jax_ep.launch` in every process of `test_beside_collectives.py`."""

import argparse

import helpers
import jax
import mixed_cases
import numpy as np

from jax_ep import Group, group as group_module

TIMEOUT = 60.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu-devices", type=int, default=1)
    parser.add_argument("--turns", type=int, default=1000, help="executions on GPUs of which each process has its own")
    # NCCL refuses two ranks on one GPU, and processes take turns there.
    parser.add_argument("--shared", action="store_true", help="processes share a GPU: fewer executions, ours alone")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    group_module._CPU_PROCESSES_SHARE = True
    on_cpu, size = jax.default_backend() == "cpu", jax.device_count()
    turns = 4 if on_cpu else 50 if options.shared else options.turns
    operands = mixed_cases.draw(np.random.default_rng(helpers.SEED), size, 8 * size)
    mesh = helpers.mesh_of(ep=size)
    with Group(mesh, "ep", timeout=TIMEOUT) as one, Group(mesh, "ep", async_ops=True, timeout=TIMEOUT) as other:
        mixed_cases.run(
            one, other, operands, turns=turns, look=1 if on_cpu else 25, collectives=not options.shared, in_turn=on_cpu
        )
    print(f"process {jax.process_index()} of {jax.process_count()} is done", flush=True)


if __name__ == "__main__":
    main()

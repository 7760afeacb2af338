"""One process of `test_multiprocess.py`: checks the shards of its own devices against the oracle."""

import sys

import helpers
import jax
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_ep import Group, PlatformError

EXPERTS = 8


def main(address: str, processes: int, index: int) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(address, processes, index, initialization_timeout=60)
    size = jax.device_count()
    mesh = helpers.mesh_of(ep=size)
    case = helpers.draw_case(np.random.default_rng(helpers.SEED), size, 5, 3, EXPERTS, 16)
    operands = [
        jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("ep")), lambda index, x=x: x[index]) for x in case
    ]
    with Group(mesh, "ep") as group:
        assert group._resolve("dispatch", "auto", across_nodes=True) == "xla"
        with pytest.raises(PlatformError, match="implementation='xla'"):
            group._resolve("dispatch", "ffi", across_nodes=True)

        program = helpers.dispatch_combine(group, num_experts=EXPERTS, implementation="auto")
        out, combined = jax.block_until_ready(program(*operands))
        layout = oracle.dispatch(*case, num_experts=EXPERTS, capacity=out.rows.shape[1])
        exact = oracle.combine(layout.rows, layout.targets, case.weights)
        for shard in out.rows.addressable_shards:
            np.testing.assert_array_equal(shard.data, layout.rows[shard.index])
        for shard in combined.addressable_shards:
            np.testing.assert_allclose(shard.data, exact[shard.index], rtol=1e-5, atol=1e-6)
        group.check()
    jax.distributed.shutdown()
    print("checked", len(out.rows.addressable_shards), "shards")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

"""Runs what a wheel holds: imports every library, on whatever machine, and sends tokens between two CPU devices."""

import importlib

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

import jax_ep
from jax_ep._kit import ffi

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)

for platform in ffi.built_platforms():
    library = importlib.import_module(f"jax_ep._jax_ep_{platform}")
    print(f"imported {library.__file__}, of jax_ep {library.version}")

with jax_ep.Group(Mesh(jax.devices(), ("ep",)), "ep") as group:

    def there_and_back(tokens: jax.Array, ids: jax.Array) -> jax.Array:
        rows, _, routing = jax_ep.dispatch(tokens, ids, group=group, num_experts=8, implementation="kernels")
        return jax_ep.combine(rows, routing, group=group, implementation="kernels")

    tokens, ids = jnp.arange(64.0).reshape(16, 4), jnp.arange(16).reshape(16, 1) % 8
    mapped = jax.shard_map(there_and_back, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"))
    assert (jax.jit(mapped)(tokens, ids) == tokens).all()
print(f"16 tokens went to 8 experts on 2 CPU devices and came back; jax {jax.__version__}")

"""What the caller has set for JAX and XLA does not reach the tests (environment.py)."""

from typing import Any

import helpers

SCRIPT = """
import os
print(len(jax.devices("cpu")), jax.numpy.arange(1.0).dtype, jax.config.jax_compilation_cache_dir)
print([name for name in os.environ if name == "XLA_FLAGS" or name.startswith("JAX_") and name[:7] != "JAX_EP_"])
"""


def test_the_variables_of_the_caller_do_not_matter() -> None:
    variables: dict[str, Any] = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=3",
        "JAX_PLATFORMS": "tpu",
        "JAX_ENABLE_X64": "1",
        "JAX_NUM_CPU_DEVICES": "5",
        "JAX_COMPILATION_CACHE_DIR": "/nowhere",
        "JAX_EP_TEST_ENVIRONMENT": "",
    }
    assert helpers.run_python("-c", helpers.knowing("helpers", SCRIPT), **variables) == "8 float32 None\n[]\n"

"""A planted overrun of one byte, by the library that is given (overrun.cc): AddressSanitizer must end this script.

python -m tests.chaos.overrun liboverrun.so 1000
"""

import ctypes
import sys

import jax
import jax.numpy as jnp


def main() -> None:
    library, size = sys.argv[1:]
    handler = ctypes.CDLL(library).jax_ep_write_behind
    jax.ffi.register_ffi_target("jax_ep_write_behind", jax.ffi.pycapsule(handler), platform="cpu")
    call = jax.ffi.ffi_call("jax_ep_write_behind", jax.ShapeDtypeStruct((int(size),), jnp.uint8), has_side_effect=True)
    jax.block_until_ready(jax.jit(call)())
    print("nobody noticed")


if __name__ == "__main__":
    main()

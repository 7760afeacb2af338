"""Imported before jax, it removes the variables of the caller that steer JAX and XLA.

JAX_PLATFORMS=cpu stays, which leaves GPUs out. What a test sets for the processes that it starts stays, too.
"""

import os

_CLEAN = "JAX_EP_TEST_ENVIRONMENT"  # set by the first process of a run; if the caller sets it, all variables stay

if not os.environ.get(_CLEAN):
    for _name, _value in tuple(os.environ.items()):
        _steers = _name == "XLA_FLAGS" or (_name.startswith("JAX_") and not _name.startswith("JAX_EP_"))
        if _steers and (_name, _value) != ("JAX_PLATFORMS", "cpu"):
            del os.environ[_name]
    os.environ[_CLEAN] = "1"

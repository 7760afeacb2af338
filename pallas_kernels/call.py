"""Calls of kernels by Pallas' Triton backend, without its warnings.

jax has deprecated this backend since 0.11, and warns whenever a kernel is lowered. Users of these kernels cannot change
that.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.extend.pallas import register_lowering_rule
from jax.interpreters import mlir

from jax_ep.pallas_kernels.varying import result_type

triton: Any
try:
    from jax.experimental.pallas import triton
except ImportError:  # a jax that has dropped it
    triton = None
HAS_TRITON = triton is not None


def compiler_params(warps: int, stages: int | None = None) -> Any:
    """Triton's parameters, in a type by which Pallas finds the lowering rule of this file.

    Raises:
      NotImplementedError: this jax has no Triton backend.
    """
    if not HAS_TRITON:
        raise NotImplementedError(f"pallas_kernels: jax {jax.__version__} has no Triton backend of Pallas")
    return _params_type()(num_warps=warps, num_stages=stages)


@functools.cache
def _params_type() -> Any:
    class Params(triton.CompilerParams):
        pass

    def lower(ctx: Any, *operands: Any, compiler_params: Any, **params: Any) -> Any:
        plain = triton.CompilerParams(compiler_params.num_warps, compiler_params.num_stages)

        def call(*operands: Any) -> Any:
            return ctx.primitive.bind(*operands, compiler_params=plain, **params)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
            return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)

    register_lowering_rule(Params, lower, "gpu")
    return Params


def call_kernel(
    body: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    operands: Sequence[jax.Array],
    results: Sequence[Any],
    interpret: bool,
    warps: int = 4,
    stages: int | None = None,
) -> list[jax.Array]:
    """Calls `body` with references to whole arrays: the operands, then the results.

    Args:
      name: of the kernel in profiles.
      results: arrays, which are written in place; or types of arrays that vary like the first operand.
    """
    written = [i for i, x in enumerate(results) if isinstance(x, jax.Array)]

    def without_written(*refs: Any) -> None:
        body(*refs[: len(operands)], *refs[len(operands) + len(written) :])

    without_written.__name__ = name
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        without_written,
        out_shape=[result_type(x.shape, x.dtype, operands[0]) for x in results],
        grid=grid,
        in_specs=[anywhere] * (len(operands) + len(written)),
        out_specs=[anywhere] * len(results),
        input_output_aliases={len(operands) + place: i for place, i in enumerate(written)},
        compiler_params=compiler_params(warps, stages),
        interpret=interpret,
        name=name,
    )(*operands, *(results[i] for i in written))

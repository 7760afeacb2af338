"""Whether two versions compute the same bits: `python tests/bits.py FILE`, then `python tests/bits.py --compare A B`.

Values and gradients of every form of the matrix in bfloat16 and float32, on CPU devices.
"""

import sys
import zlib

import conftest  # noqa: F401, which makes the devices
import helpers
import jax
import matrix_forms
import numpy as np
from test_matrix import OPS, directions, drawn, gradient, opened


def results() -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for dtype in (helpers.DTYPES[0], helpers.DTYPES[2]):
        matrix_forms.DTYPE = dtype
        for op, (options, body, _) in OPS.items():
            for name in matrix_forms.alone(options):
                rng = np.random.default_rng(zlib.crc32(name.encode()))
                form = matrix_forms.chosen(options, name, rng)
                if form.get("capacity") == 2 or matrix_forms.refused(form):
                    continue
                with opened(form) as group:
                    operands = drawn(form, options is matrix_forms.LAYER, group.size, False, rng)
                    given = helpers.on_mesh(group.mesh, (*operands[:2], *directions(operands, rng)))
                    function = body(form, group)
                    program = helpers.per_rank(lambda *x, f=function: gradient(f, *x), group.mesh)
                    for i, x in enumerate(jax.tree.leaves(helpers.fetch(program(*given)))):
                        found[f"{op} {name}, {dtype}: {i}"] = helpers.wide(x)
                print(f"{op} {name}, {dtype}", flush=True)
    return found


def compare(first: str, second: str) -> bool:
    """Prints what differs, by how much of the largest value; True where nothing does."""
    with np.load(first) as a, np.load(second) as b:
        differing = set(a.files) ^ set(b.files)
        for name in sorted(set(a.files) & set(b.files)):
            if a[name].tobytes() != b[name].tobytes():
                differing.add(name)
                off = np.abs(a[name] - b[name]).max() if a[name].shape == b[name].shape else np.inf
                print(f"{name}: off by {off / np.abs(a[name]).max():.2e} of the largest")
        print(f"{len(differing)} of {len(set(a.files) | set(b.files))} arrays differ, or are in one file alone")
    return not differing


if __name__ == "__main__":
    if sys.argv[1] == "--compare":
        raise SystemExit(not compare(*sys.argv[2:]))
    np.savez_compressed(sys.argv[1], **results())  # pyright: ignore[reportArgumentType]

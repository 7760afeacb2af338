"""Random programs of every op, each with many sets of random values, against numpy.

    python -m tests.chaos.fuzz --configurations 10000 --seed 1
    python -m tests.chaos.fuzz --of layers

A configuration is one set of values in one program; compiling takes most of the time, so a program serves many.
"""

import faulthandler
import os
import sys
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ep import Group
from jax_ep._kit import ffi

from .collective_matmul import CollectiveMatmul
from .programs import Program
from .ragged import Ragged
from .report import Report, devices_here, parser, prepare_devices
from .routed import Gradients, MoeMlp, RoundTrip
from .sparse import AllReduce

PROGRAMS: list[type[Program]] = [RoundTrip, AllReduce, Ragged, CollectiveMatmul, Gradients, RoundTrip]
PROGRAMS += [MoeMlp, AllReduce, RoundTrip, MoeMlp, CollectiveMatmul]
OF: dict[str, Sequence[type[Program]]] = {
    "all": PROGRAMS,
    "layers": (MoeMlp,),
    "ops": [kind for kind in PROGRAMS if kind is not MoeMlp],
}
XLA_SHARE = 0.12  # of the programs are those in plain JAX
LONGEST_SECONDS = 120.0  # for one set of values, or one compilation


def try_program(report: Report, kinds: Sequence[type[Program]], index: int, values: range) -> None:
    """Builds program `index` over some of the first devices, and tries it with these sets of values."""
    rng = np.random.default_rng([report.seed, index])
    kind = kinds[index % len(kinds)]
    devices = jax.devices()[: rng.integers(1, min(8, jax.device_count()) + 1)]
    os.environ["JAX_EP_DEBUG_POISON"] = str(rng.integers(2))
    with Group(Mesh(np.array(devices), ("ep",)), "ep") as group:
        by_xla = not ffi.is_built(group.platform) or rng.random() < XLA_SHARE
        program = kind(rng, group, "xla" if by_xla else "kernels")
        report.programs += 1
        report.trying(str(program))
        for value in values:
            faulthandler.dump_traceback_later(LONGEST_SECONDS, exit=True)
            try:
                report.faults += program.check(np.random.default_rng([report.seed, index, value]))
            except Exception as error:
                report.failed(error, str(program), f"--of {report.of} --program {index} --value {value}")
                return
            finally:
                faulthandler.cancel_dump_traceback_later()
            report.configurations += 1


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, 10_000)
    options.add_argument("--verbose", action="store_true", help="name every program before it runs")
    options.add_argument("--of", choices=OF, default="all", help="which programs [%(default)s]")
    options.add_argument("--values", type=int, default=30, help="sets of values per program")
    options.add_argument("--program", type=int, help="this one alone")
    options.add_argument("--value", type=int, help="this set of values alone")
    given = options.parse_args(arguments)
    faulthandler.enable()  # a crash says where, and --verbose says in which program
    prepare_devices()
    report, kinds = Report("fuzz", given.seed, devices_here(), verbose=given.verbose, of=given.of), OF[given.of]
    values = range(given.values) if given.value is None else range(given.value, given.value + 1)
    for index in report.indices(given, given.program):
        try_program(report, kinds, index, values[: given.configurations - report.configurations])
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

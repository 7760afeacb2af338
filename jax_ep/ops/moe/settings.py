"""The settings of a dispatch: one frozen record, checked and built here from a user's arguments.

The FFI call takes the record, processes compare it, and the routing keeps it. Each library compares its names with the
spec of the op (ffi/kernels/moe/args.h) when it is loaded. Errors name the op that was called, which may be moe_mlp.
"""

import dataclasses
import logging
import math
from typing import Any, Literal, NamedTuple, Required, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._kit import checks, ffi, float8, vary
from jax_ep._kit.checks import Implementation, OnOverflow
from jax_ep._kit.logs import log_once
from jax_ep.group import Group

Wire = Literal["float8", "float8_rows"]
# "nodes": XLA between nodes, kernels or XLA inside. "xla": only jax.lax. "in place": rows stay in the tokens.
Path = Literal["nodes", "xla", "in place", "kernels"]


class Options(TypedDict, total=False):
    """Further arguments of `dispatch`, for the overloads that type its result by `wire` and `expand`."""

    group: Required[Group]
    num_experts: Required[int]
    capacity: int | None
    capacity_factor: float | None
    alignment: int
    on_overflow: OnOverflow
    implementation: Implementation


@ffi.settings_of("dispatch", "dtype", "num_tokens", "top_k", "hidden")
@dataclasses.dataclass(frozen=True)
class DispatchConfig:
    """The settings of a dispatch that its operands do not determine. `size` is the number of ranks.

    `capacity` is in rows. If `zero_unused` is false, rows after the last expert's are undefined (possibly NaN) in
    `Dispatched.rows`, in its tangent, and in the cotangent of combine's `expert_outputs`. If `expand` is false, a token
    stays in its landing slot, number `source * T + token` of R T slots, and `Unexpanded.indices` holds the slot of each
    row.
    """

    size: int = dataclasses.field(metadata=ffi.NO_SETTING)
    num_experts: int
    capacity: int
    alignment: int
    wire: Wire | None
    drop: bool
    zero_unused: bool = True
    expand: bool = True

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.size

    def always_fits(self, assignments: int) -> bool:
        """Whether no ids can overflow the capacity of one rank, even if a token names an expert twice."""
        return self.drop or self.capacity >= worst_case_capacity(1, assignments, 1, self.num_experts, self.alignment)

    def settings(self) -> dict[str, Any]:
        return ffi.settings(self) | {"wire": self.wire or "plain"}

    def check(self, op: str, name: str, *, empty: bool) -> None:
        """Raises ValueError or TypeError, naming `op` and the argument, unless a dispatch can have these settings.

        Args:
          empty: there are no assignments, so the capacity may be 0.
        """
        for field in ("size", "num_experts", "alignment"):
            checks.check_int(op, f"{name}.{field}", getattr(self, field))
        checks.check_int(op, f"{name}.capacity", self.capacity, least=0 if empty else 1)
        if self.num_experts % self.size:
            raise ValueError(
                f"{op}: {name}.num_experts must be a multiple of {self.size} ranks, got {self.num_experts}"
            )
        if self.capacity % self.alignment or self.size * self.capacity >= 2**31:
            raise ValueError(
                f"{op}: {name}.capacity must be a multiple of alignment {self.alignment}, below 2**31 / {self.size}, "
                f"got {self.capacity}"
            )


class DispatchCall(NamedTuple):
    op: str  # called by the user
    group: Group
    config: DispatchConfig  # for one group of all ranks
    node_capacity: int | None  # tokens that a rank can send to a node; None: all
    chunks: int  # of the tokens from another node
    by_kernels: bool  # otherwise jax.lax runs, also inside a node

    @property
    def intranode(self) -> Group:
        assert self.group.intranode is not None
        return self.group.intranode

    @property
    def inside(self) -> DispatchConfig:
        experts = self.config.num_experts // self.group.nodes
        return dataclasses.replace(self.config, size=self.intranode.size, num_experts=experts)

    def path(self, assignments: int) -> Path:
        if self.group.intranode is not None:
            return "nodes"
        if not self.by_kernels:
            return "xla"
        config = self.config
        moves = config.expand or config.wire is not None or not is_alone_on_gpu(self.group)
        # If ids may overflow the capacity, the kernel runs, because it reports the overflow.
        return "kernels" if moves or not config.always_fits(assignments) else "in place"

    def unexpanded(self, num_tokens: int) -> "DispatchCall":
        """The call with expand=False, unless that takes more memory or the group has several nodes."""
        slots = self.group.size * num_tokens
        expand = self.group.intranode is not None or not 0 < slots < self.config.capacity
        return self._replace(config=dataclasses.replace(self.config, expand=expand))


def is_alone_on_gpu(group: Group) -> bool:
    """Whether the group is one GPU, which exchanges nothing. On CPUs the protocol always runs."""
    return group.size == 1 and group.platform != "cpu"


def validated(
    op: str,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None,
    *,
    group: Group,
    num_experts: int,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    alignment: int = 1,
    wire: Wire | None = None,
    on_overflow: OnOverflow = "raise",
    implementation: Implementation = "auto",
    shared_tokens: bool = False,
) -> tuple[DispatchCall, tuple[jax.Array, jax.Array, jax.Array]]:
    """The call, and its operands as kernels take them: ids int32, weights float32, all varying over one set of axes.

    Call `check_group` before. Raises ValueError or TypeError, naming `op` and the wrong argument.

    Args:
      shared_tokens: all ranks have the same tokens, which do not travel.
    """
    checks.check_array(op, "tokens", tokens, "[T, H]", checks.TOKEN_DTYPES)
    order = ": the order is tokens, expert_ids, weights, but jax.lax.top_k returns weights before ids"
    checks.check_array(op, "expert_ids", expert_ids, "[T, K]", np.integer, hint=order)
    (num_tokens, hidden), top_k = tokens.shape, expert_ids.shape[1]
    checks.check_array(op, "expert_ids", expert_ids, "[T, K]", shape=(num_tokens, top_k))
    if weights is not None:
        checks.check_array(op, "weights", weights, "[T, K]", np.floating, shape=(num_tokens, top_k))
    checks.check_int(op, "num_experts", num_experts)
    checks.check_int(op, "alignment", alignment)
    checks.check_one_of(op, "on_overflow", on_overflow, OnOverflow)
    if num_experts % group.size:
        raise ValueError(f"{op}: num_experts must be a multiple of the group's size {group.size}, got {num_experts}")
    if num_experts > ffi.MAIL_NUMBERS:
        raise ValueError(f"{op}: num_experts must be at most {ffi.MAIL_NUMBERS}, got {num_experts}")
    assignments, local_experts = group.size * num_tokens * top_k, num_experts // group.size
    if assignments + local_experts * alignment >= 2**31:  # kernels count in int32
        raise ValueError(
            f"{op}: R * T * K assignments and E / R * alignment rows of padding must be fewer than 2**31, got "
            f"{group.size} * {num_tokens} * {top_k} and {local_experts} * {alignment}"
        )
    sources = 1 if shared_tokens else group.size
    max_rows = worst_case_capacity(sources, num_tokens, top_k, local_experts, alignment)
    even = -(-sources * num_tokens * top_k // group.size)
    rows = _capacity_in_rows(op, capacity, capacity_factor, even, alignment, max_rows)
    if group.size * rows >= 2**31:
        given, way_out = "capacity" if capacity_factor is None else "the capacity by capacity_factor", ""
        if capacity is None and capacity_factor is None:
            given, way_out = "the default capacity", "; pass capacity= or capacity_factor="
        raise ValueError(f"{op}: {given} must be below 2**31 / {group.size} rows, got {rows}{way_out}")
    checks.check_one_of(op, "wire", wire, Literal[None, Wire])
    if wire is not None and hidden % float8.BLOCK:
        raise ValueError(f"{op}: tokens must have a multiple of {float8.BLOCK} columns for wire={wire!r}, got {hidden}")
    node_capacity = None if shared_tokens else group.node_options.capacity
    if node_capacity == "auto":
        node_capacity = group.node_plan(num_tokens, top_k, num_experts).capacity
    by_kernels = runs_kernels(op, group, implementation, num_tokens)
    config = DispatchConfig(
        size=group.size,
        num_experts=num_experts,
        capacity=rows,
        alignment=alignment,
        wire=wire,
        drop=on_overflow == "drop",
    )
    chunks = int(group.node_options.chunks) if by_kernels else 1
    weights = jnp.ones(expert_ids.shape, jnp.float32) if weights is None else jnp.asarray(weights).astype(jnp.float32)
    operands = vary.vary_alike(group.axis_name, tokens, checks.to_int32(expert_ids), weights)
    return DispatchCall(op, group, config, node_capacity, chunks, by_kernels), operands


def note_same_tokens(level: int, op: str, group: Group, what: str, *operands: jax.Array) -> None:
    """Logs `what` each rank does, if types show that several ranks have the same arrays."""
    typed = group.size > 1 and vary.tracks_varying(group.axis_name)
    if typed and not any(vary.varies(x, group.axis_name) for x in operands):
        log_once(level, "%s: tokens are the same on all %d ranks, and each %s", op, group.size, what)


def runs_kernels(op: str, group: Group, implementation: Implementation, num_tokens: int) -> bool:
    """Whether an op runs kernels. An op without tokens does not: jaxlib does not compile a custom call in a
    `jax.shard_map` whose operands are all empty.
    """
    return group._resolve(op, implementation, serves_nodes=True) == "kernels" and num_tokens > 0


def _capacity_in_rows(op: str, capacity: object, factor: object, even: int, alignment: int, max_rows: int) -> int:
    """The capacity in rows.

    Args:
      factor: the argument `capacity_factor`.
      even: the rows that every rank receives under an even load, T * K.
      max_rows: the most rows that a rank can need.
    """
    if factor is not None:
        if capacity is not None:
            raise ValueError(f"{op}: capacity must be None where capacity_factor is given, got {capacity!r}")
        if isinstance(factor, bool) or not isinstance(factor, int | float | np.integer | np.floating):
            raise TypeError(
                f"{op}: capacity_factor must be a float or None, known when the op is traced; got "
                f"{checks.describe(factor)}"
            )
        if not 0 < factor < math.inf:
            raise ValueError(f"{op}: capacity_factor must be positive and finite, got {factor}")
        rows = math.ceil(min(float(factor), 2.0**31) * even / alignment)  # no rank takes 2^31 rows
        return min(max_rows, max(1, rows) * alignment)
    if capacity is None:
        return max_rows
    if isinstance(capacity, bool) or not isinstance(capacity, int | np.integer):
        hint = "; pass times the even load as capacity_factor" if isinstance(capacity, float | np.floating) else ""
        raise TypeError(
            f"{op}: capacity must be an int of rows or None, known when the op is traced; got "
            f"{checks.describe(capacity)}{hint}"
        )
    rows = int(capacity)
    checks.check_int(op, "capacity", rows)
    if rows % alignment:
        raise ValueError(f"{op}: capacity must be a multiple of alignment {alignment}, got {rows}")
    if rows <= 4 and even >= 16 * rows:
        few = "%s: capacity=%d is %d rows, where an even load is of %d; for times the even load pass capacity_factor=%d"
        log_once(logging.WARNING, few, op, rows, rows, even, rows)
    return rows


def worst_case_capacity(size: int, num_tokens: int, top_k: int, local_experts: int, alignment: int) -> int:
    """The most rows that a rank receives if no token names an expert twice. Each segment is padded to `alignment`."""
    rows = size * num_tokens * min(top_k, local_experts)
    padded = rows + min(local_experts, rows) * (alignment - 1)
    return padded // alignment * alignment

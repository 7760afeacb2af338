"""Names of ops in HLO, which profiles show, forward and backward."""

import re
from typing import Any

import helpers
import jax
import matmul_cases
import pytest
import test_matrix
from conftest import Rng
from matrix_forms import Form, Function

from jax_ep import Group, Implementation, embedding

NAME = re.compile(r'op_name="([^"]*)"')


def lookup(form: Form, group: Group) -> Function:
    def taken(floats: Any, known: Any) -> jax.Array:
        table, ids = floats["tokens"], known["ids"]
        needed = embedding.rows_needed(ids, group.size * len(table), group=group)
        rows = embedding.sharded_lookup(table, ids[:, 0], group=group, implementation=form["implementation"])
        return rows + needed[0].astype(rows.dtype)

    return taken


# By form in test_matrix.py: the names in the forward pass, and in the backward pass by kernels; some transposes are
# other ops.
NAMES: dict[tuple[str, str], tuple[set[str], set[str]]] = {
    ("moe_mlp", "default"): (
        {"moe_mlp", "dispatch", "ragged_dot", "combine"},
        {"moe_mlp", "scatter", "ragged_dot", "combine"},
    ),
    ("dispatch", "default"): ({"dispatch", "combine"}, {"dispatch", "combine", "scatter"}),
    ("dispatch", "sharded_lookup"): (
        {"sharded_lookup", "rows_needed", "dispatch", "combine"},
        {"sharded_lookup", "scatter"},
    ),
    **{("op", op): ({op}, {op}) for op in ("ragged_dot", "ragged_all_to_all", *matmul_cases.OPS)},
    ("op", "sparse mean, sharded"): ({"sparse_all_reduce"}, {"sparse_all_reduce"}),
}


@pytest.mark.parametrize(("op", "name"), NAMES)
def test_names(op: str, name: str, implementation: Implementation, group: Group, rng: Rng) -> None:
    """Every kernel of ours has one of them."""
    forms, (forward, backward) = test_matrix.OPS[op], NAMES[op, name]
    is_lookup = name == "sharded_lookup"
    form = forms.form("default" if is_lookup else name, rng) | {"implementation": implementation}
    body = lookup(form, group) if is_lookup else forms.body(form, group)

    def derived(floats: Any, known: Any) -> Any:
        return jax.value_and_grad(lambda floats: body(floats, known).sum())(floats)

    program = helpers.per_rank(derived, group.mesh)
    text = program.lower(*forms.draw(form, group.size, rng)[:2]).as_text(dialect="hlo", debug_info=True)
    paths = [(set(re.split(r"[/()]+", path)), line) for line in text.splitlines() for path in NAME.findall(line)]
    of_backward = [parts for parts, _ in paths if "transpose" in parts]
    of_forward = [parts for parts, _ in paths if "transpose" not in parts]
    assert forward <= set().union(*of_forward)
    assert (backward if implementation == "kernels" else backward - {"scatter"}) <= set().union(*of_backward)
    for parts, line in paths:
        assert "jax_ep_" not in line or parts & (forward | backward), line

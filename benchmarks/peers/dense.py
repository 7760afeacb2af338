"""The products of a layer alone, equally many rows for every expert."""
# pyright: reportMissingImports=false

from functools import partial
from typing import Any

import torch

from . import on_torch
from .on_torch import Operands, Passes


def dense(given: Operands) -> Passes:
    first, down = given.matrices()
    tall = (given.E, given.T * given.K // given.E, given.H)
    rows, d_answers = (each.detach().repeat(given.K, 1).view(tall) for each in (given.tokens, given.cotangent))
    inner = torch.bmm(rows, first[:, : given.F].mT)

    def forward() -> Any:
        return torch.bmm(rows, first.mT), torch.bmm(inner, down.mT)

    def step() -> Any:  # what the first product yields serves as its cotangent, too
        products, answers = forward()
        of_down = torch.bmm(d_answers, down), torch.bmm(d_answers.mT, inner)
        return answers, of_down, torch.bmm(products, first), torch.bmm(products.mT, rows)

    return {"forward": forward, "step": step}


Layer = partial(on_torch.Layer, dense)

"""Sorts, takes rows, multiplies, weighs and adds, as torchtitan's layer does. Elementwise parts are compiled."""
# pyright: reportMissingImports=false

from functools import partial
from typing import Any

import torch

from . import on_torch
from .on_torch import ON_GPU, Operands, Passes, passes_of


def torch_grouped_mm(given: Operands) -> Passes:
    first, down = given.matrices()
    F, T, K = given.F, given.T, given.K
    experts, assignments = torch.arange(given.E).to(given.ids), torch.arange(T * K).to(given.ids.device)
    multiply = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    compiled = torch.compile(dynamic=False) if ON_GPU else lambda function: function

    @compiled
    def activate(products: Any) -> Any:
        return torch.nn.functional.silu(products[:, :F]) * products[:, F:]

    @compiled
    def weigh(answers: Any, places: Any, weights: Any) -> Any:
        return (answers[places].view(T, K, -1) * weights[..., None].to(answers.dtype)).sum(1)

    def forward(training: bool) -> Any:
        del training
        sorted_ids, order = torch.sort(given.ids.view(-1), stable=True)
        ends = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)  # bincount would wait for the GPU
        places = torch.empty_like(order)
        places[order] = assignments
        products = multiply(given.tokens[order // K], first.mT, offs=ends)
        return weigh(multiply(activate(products), down.mT, offs=ends), places, given.weights)

    return passes_of(given, (first, down), forward)


Layer = partial(on_torch.Layer, torch_grouped_mm)

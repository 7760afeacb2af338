"""torch's EmbeddingBag with sparse gradients, and SparseAdam. The parent imports this file, too, without torch."""
# pyright: reportMissingImports=false

from typing import Any

import numpy as np

LEARNING_RATE = 0.01
SCRAMBLE = 40503  # odd: low digits of its multiples are the numbers of a table


class Layer:
    """What `child` asks."""

    def __init__(self) -> None:
        self._layer: Any = None

    def prepare(self, shape: str, operands: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, float]]:
        """The rows `checked` of the table after the first step."""
        import torch

        from . import on_torch

        del shape
        device = "cuda" if on_torch.ON_GPU else "cpu"
        ids, weights, targets = (torch.from_numpy(operands[name]).to(device) for name in ("ids", "weights", "targets"))
        height, width = int(operands["num_rows"]), len(weights)
        table = torch.empty(height, width, device=device)
        for begin in range(0, height, 2**20):
            end = min(begin + 2**20, height)
            number = torch.arange(begin * width, end * width, device=device)
            table[begin:end] = (((number * SCRAMBLE) & 0xFFFF).float() / 2**16 - 0.5).view(-1, width)
        bag = torch.nn.EmbeddingBag(height, width, mode="sum", sparse=True, _weight=table, device=device)
        optimizer = torch.optim.SparseAdam(list(bag.parameters()), lr=LEARNING_RATE)

        def step() -> Any:
            optimizer.zero_grad()
            loss = ((bag(ids) @ weights - targets) ** 2).sum()
            loss.backward()
            optimizer.step()

        step()
        rows = bag.weight[torch.from_numpy(operands["checked"]).to(device)].detach().cpu().numpy()
        self._layer = on_torch.Layer(lambda _: {})
        self._layer._passes = {"step": step}
        return {"rows": rows}, {}

    def microseconds(self, quantity: str, heat: float) -> float:
        return self._layer.microseconds(quantity, heat)

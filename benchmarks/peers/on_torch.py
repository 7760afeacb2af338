"""What the peers share that torch runs. Each is a function of `Operands`."""
# pyright: reportMissingImports=false

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Passes = dict[str, Callable[[], Any]]  # by quantity
ON_GPU = torch.cuda.is_available()
synchronize = torch.cuda.synchronize if ON_GPU else torch.cpu.synchronize


class Operands:
    """Tensors of `shapes.draw`; T, H, F, E, K."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        def tensor(name: str) -> Any:
            array = arrays[name]
            found = torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)
            return (found.view(torch.bfloat16) if array.dtype == np.uint16 else found).to("cuda" if ON_GPU else "cpu")

        self.tokens, self.weights = tensor("tokens").requires_grad_(), tensor("weights").requires_grad_()
        self.cotangent, self.ids = tensor("cotangent"), tensor("ids")
        self._numbers, self._starts = {name: tensor(name) for name in ("gate", "up", "down")}, arrays["starts"].tolist()
        (self.T, self.H), self.K, self.E = self.tokens.shape, self.ids.shape[1], len(self._starts)
        self.F = self._numbers["gate"].numel() // (2 * self.H)

    def empty(self, *sides: int) -> Any:
        return self.tokens.new_empty(sides)

    def fill(self, matrices: Any, name: str) -> Any:
        """`matrices` of torch's layout: gate or up [E, F, H], or down [E, H, F]."""
        for matrix, start in zip(matrices, self._starts, strict=True):
            numbers = self._numbers[name][start : start + matrix.numel()]
            matrix.copy_(numbers.view(matrix.shape[1], matrix.shape[0]).T)
        return matrices

    def matrices(self) -> tuple[Any, Any]:
        """[E, 2 F, H], gate in front; [E, H, F]."""
        first = self.empty(self.E, 2 * self.F, self.H)
        self.fill(first[:, : self.F], "gate")
        self.fill(first[:, self.F :], "up")
        return first, self.fill(self.empty(self.E, self.H, self.F), "down")


def passes_of(given: Operands, matrices: tuple[Any, ...], forward: Callable[[bool], Any]) -> Passes:
    """`forward` is told whether gradients will be asked for."""
    parameters = (given.tokens, given.weights, *(each.requires_grad_() for each in matrices))
    cotangent = given.cotangent

    def step() -> Any:
        out = forward(True)
        return out, torch.autograd.grad(out, parameters, cotangent)

    inference = torch.no_grad()(lambda: forward(False))
    return {"forward": inference, "training forward": lambda: forward(True), "step": step}


class Layer:
    """What `child` asks."""

    def __init__(self, build: Callable[[Operands], Passes]):
        self._build = build
        self._passes: Passes = {}

    def prepare(self, shape: str, operands: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, float]]:
        del shape
        self._passes = {}
        gc.collect()
        _finish()
        torch.compiler.reset()  # or functions run uncompiled from the ninth form on
        self._passes = self._build(Operands(operands))
        out, results = self._passes["forward"](), self._passes["step"]()
        if "training forward" not in self._passes:  # no layer
            return {}, {}
        gradients = results[1]
        if not all(bool(each.sum().isfinite()) for each in gradients):
            raise FloatingPointError("a gradient is not finite")
        checked = {"out": out, "d_tokens": gradients[0], "d_weights": gradients[1]}
        found = {name: each[:64].detach().float().cpu().numpy() for name, each in checked.items()}
        del out, results, gradients, checked
        return found, self._memory() if ON_GPU else {}

    def _memory(self) -> dict[str, float]:
        _finish()
        before = torch.cuda.memory_allocated()
        out = self._passes["training forward"]()
        kept = torch.cuda.memory_allocated() - before - out.nbytes
        del out
        torch.cuda.reset_peak_memory_stats()
        self._passes["step"]()
        _finish()
        return {"kept": kept / 2**20, "peak": (torch.cuda.max_memory_allocated() - before) / 2**20}

    def microseconds(self, quantity: str, heat: float) -> float:
        """The host is ahead of the GPU, so its part of a call does not count, if it takes less time."""
        one, calls, begin = self._passes[quantity], 0, time.perf_counter()
        while time.perf_counter() - begin < heat:
            one()
            calls += 1
            if calls % 4 == 0:
                synchronize()
        calls = max(2, calls // 3)
        synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            one()
        synchronize()
        found = 1e6 * (time.perf_counter() - begin) / calls
        _finish()
        return found


def _finish() -> None:
    """Waits for the GPU, and gives back memory that no tensor holds: the other processes need it."""
    synchronize()
    if ON_GPU:
        torch.cuda.empty_cache()

"""The peers that torch runs, each a function of `Operands`."""
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


def dense(given: Operands) -> Passes:
    """The products alone, equally many rows for every expert."""
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


def torch_grouped_mm(given: Operands) -> Passes:
    """Sorts, takes rows, multiplies, weighs and adds, as torchtitan's layer does. Elementwise parts are compiled."""
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


def sonic(given: Operands) -> Passes:
    """SonicMoE: what its own layer does behind the router."""
    import quack.gemm_interface as gemms
    from quack.autotuner import AutotuneConfig
    from quack.gemm_config import GemmConfig
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import _DownProjection, _UpProjection
    from sonicmoe.functional.triton_kernels import TC_topk_router_metadata_triton

    def configs(*tiles: tuple[int, int, bool]) -> list[Any]:
        common: Any = {"cluster_m": 2, "cluster_n": 1, "swap_ab": False, "is_dynamic_persistent": False}
        found = [GemmConfig(tile_m=m, tile_n=n, pingpong=p, device_capacity=9, **common) for m, n, p in tiles]
        return [AutotuneConfig(config=each) for each in found]

    # Of its tiles for Hopper; to tune over all takes several times as long.
    pingpong = [(128, n, True) for n in (128, 160, 192)]
    gemms.gemm_tuned.configs = configs((128, 256, False), (256, 128, False), (256, 192, False), *pingpong)
    gemms.gemm_gated_tuned.configs = gemms.gemm_tuned.configs
    gemms.gemm_dgated_tuned.configs = configs((128, 256, False), *pingpong[:2])

    E, F, H, T, K = given.E, given.F, given.H, given.T, given.K
    first, down = given.empty(E, F, 2, H), given.fill(given.empty(E, H, F), "down")
    given.fill(first[:, :, 0], "gate")  # rows of gate and up take turns
    given.fill(first[:, :, 1], "up")
    first = first.view(E, 2 * F, H)

    def forward(training: bool) -> Any:
        token_of, place_of, row_of = (given.ids.new_empty(T * K) for _ in range(3))
        counts, ends = given.ids.new_empty(E), given.ids.new_empty(E + 1)
        TC_topk_router_metadata_triton(given.ids, E, counts, ends, token_of, place_of, row_of)
        rest = (token_of, place_of, row_of, None, False, ActivationType.SWIGLU)
        up = first.permute(1, 2, 0)
        inner, products = _UpProjection.apply(given.tokens, up, None, ends, T * K, K, *rest, not training, False)
        return _DownProjection.apply(inner, products, down.permute(1, 2, 0), None, given.weights, ends, T, K, *rest)

    return passes_of(given, (first, down), forward)


class Layer:
    """What `child` asks."""

    def __init__(self, peer: str):
        self._build = {"sonic": sonic, "torch_grouped_mm": torch_grouped_mm, "dense": dense}[peer]
        self._passes: Passes = {}

    def prepare(self, shape: str, operands: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, float]]:
        del shape
        self._passes = {}
        gc.collect()
        _finish()
        torch.compiler.reset()  # or functions run uncompiled from the ninth form on
        self._passes = self._build(Operands(operands))
        out, results = self._passes["forward"](), self._passes["step"]()
        if self._build is dense:
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

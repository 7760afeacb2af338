"""SonicMoE: what its own layer does behind the router."""
# pyright: reportMissingImports=false

from functools import partial
from typing import Any

from . import on_torch
from .on_torch import Operands, Passes, passes_of


def sonic(given: Operands) -> Passes:
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


Layer = partial(on_torch.Layer, sonic)

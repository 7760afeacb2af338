"""What `child` asks of the process of one of DeepEP's ranks. An op's name ends in its SMs."""
# pyright: reportMissingImports=false

import importlib
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

deep_ep: Any = importlib.import_module("deep_ep")  # DeepEP's, for a type checker too

BUFFER = int(2e9)  # bytes, as in DeepEP's own test
SLOTS = 256  # rows of a channel's queue, as there
SMS = (24, 32, 48, 64, 96)
CHUNKS, OF_COMBINE = range(4, 33, 4), range(2, 17, 2)  # rows that are sent at a time
HANDLE = "with a handle: "
CALLS = 20  # in a CUDA graph: an even number, because low-latency calls take turns with two buffers
TUNED, TIMED, MOST_BEFORE = 10, 8, 100  # calls; executions of a graph
EXACT, IN_FLOAT8 = 2**-7, 2**-4  # of the largest value

Call = Callable[[], Any]


class Layer:
    def __init__(self, peer: str):
        del peer
        self._executions: dict[str, Call] = {}

    def prepare(self, shape: dict[str, Any], operands: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, Any]]:
        """`shape`: rank, ranks, store, hidden, experts, low_latency. `operands`: ids and weights [T, K]; and of what
        must come, tokens [1], by_expert [E / R], and the number of ranks that get a token, visits [T].
        """
        torch.cuda.set_device(shape["rank"])
        dist.init_process_group(
            "gloo", init_method=f"file://{shape['store']}", rank=shape["rank"], world_size=shape["ranks"]
        )
        torch.manual_seed(shape["rank"])
        given = {name: torch.from_numpy(each).cuda() for name, each in operands.items()}
        given["ids"] = given["ids"].to(deep_ep.topk_idx_t)
        tokens = torch.randn(len(given["ids"]), shape["hidden"], dtype=torch.bfloat16, device="cuda")
        fill = self._low_latency if shape["low_latency"] else self._normal
        chosen, calls = fill(tokens, given, shape["experts"])
        eager = [name for name, call in calls.items() if not self._capture(name, call)]
        return {}, {"chosen": chosen, "eager": eager}

    def _normal(self, tokens: Any, given: dict[str, Any], experts: int) -> tuple[dict[str, Any], dict[str, Call]]:
        buffer = deep_ep.Buffer(dist.group.WORLD, BUFFER)
        ids, weights, quantized = given["ids"], given["weights"], quantize(tokens)
        worst = len(tokens) * dist.get_world_size()

        def dispatch(x: Any, config: Any, worst: int = worst) -> Any:
            """With all that precedes it. The host does not wait, unless `worst` is 0."""
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, experts)
            known = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
            rest = {"topk_idx": ids, "topk_weights": weights, "num_worst_tokens": worst, "config": config}
            return buffer.dispatch(x, **known, **rest)

        found: dict[str, list[tuple[float, int, int, Call]]] = {}
        for sms in SMS:
            some = deep_ep.Config(sms, 8, SLOTS)
            rows, _, _, by_expert, handle, _ = dispatch(tokens, some, 0)
            in_float8 = dequantize(*buffer.dispatch(quantized, handle=handle, config=some)[0])
            if by_expert != given["by_expert"].tolist() or len(rows) != given["tokens"].item():
                raise AssertionError(f"{len(rows)} tokens arrived, of experts {by_expert}")
            check("combine", buffer.combine(rows, handle, config=some)[0], tokens, given["visits"], EXACT)
            check("combine, fp8", buffer.combine(in_float8, handle, config=some)[0], tokens, given["visits"], IN_FLOAT8)
            ops: dict[str, Callable[[Any], Any]] = {
                "dispatch": lambda config: dispatch(tokens, config),
                "dispatch, fp8": lambda config: dispatch(quantized, config),
                f"{HANDLE}dispatch": lambda config, h=handle: buffer.dispatch(tokens, handle=h, config=config),
                f"{HANDLE}dispatch, fp8": lambda config, h=handle: buffer.dispatch(quantized, handle=h, config=config),
                "combine": lambda config, r=rows, h=handle: buffer.combine(r, h, config=config),
            }
            for name, op in ops.items():
                for chunk in OF_COMBINE if name == "combine" else CHUNKS:
                    config = deep_ep.Config(sms, chunk, SLOTS)
                    call = lambda op=op, config=config: op(config)  # noqa: E731
                    seconds(call, TUNED)
                    found.setdefault(name, []).append((slowest(seconds(call, TUNED)), sms, chunk, call))

        def best(among: list[tuple[float, int, int, Call]]) -> tuple[float, int, int, Call]:
            return min(among, key=lambda one: one[0])

        chosen = {f"{name}, all": best(among) for name, among in found.items()}
        chosen |= {f"{name}, 24": best([one for one in among if one[1] == 24]) for name, among in found.items()}
        tuned = {name: [round(1e6 * time / TUNED, 1), sms, chunk] for name, (time, sms, chunk, _) in chosen.items()}
        return tuned, {name: call for name, (*_, call) in chosen.items()}

    def _low_latency(self, tokens: Any, given: dict[str, Any], experts: int) -> tuple[dict[str, Any], dict[str, Call]]:
        ranks, count, ids, weights = dist.get_world_size(), len(tokens), given["ids"], given["weights"]
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(count, tokens.shape[1], ranks, experts)
        buffer = deep_ep.Buffer(
            dist.group.WORLD, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=experts // ranks
        )

        def dispatch(use_fp8: bool) -> Any:
            return buffer.low_latency_dispatch(tokens, ids, count, experts, use_fp8=use_fp8)

        def combine(rows: Any, handle: Any) -> Any:
            return buffer.low_latency_combine(rows, ids, weights, handle)

        for use_fp8, tolerance in ((True, IN_FLOAT8), (False, EXACT)):
            rows, by_expert, handle, *_ = dispatch(use_fp8)
            rows = dequantize(*rows) if use_fp8 else rows
            if by_expert.tolist() != given["by_expert"].tolist():
                raise AssertionError(f"{by_expert.tolist()} rows arrived for the experts")
            check(f"low latency, fp8 {use_fp8}", combine(rows, handle)[0], tokens, weights.sum(1), tolerance)
        return {}, {
            "dispatch, all": lambda: dispatch(False),
            "dispatch, fp8, all": lambda: dispatch(True),
            "combine, all": lambda: combine(rows, handle),
        }

    def _capture(self, name: str, call: Call) -> bool:
        """Whether a CUDA graph took the calls, so that the host's part does not count; if not, they run without."""
        seconds(call, 2)
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(CALLS):
                    call()
        except RuntimeError:
            traceback.print_exc()
            graph = None
        self._executions[name] = graph.replay if graph else lambda: [call() for _ in range(CALLS)]
        return graph is not None

    def microseconds(self, quantity: str, heat: float) -> float:
        execution = self._executions[quantity]
        seconds(execution, 1)
        once = slowest(seconds(execution, 2)) / 2
        before = min(MOST_BEFORE, 1 + int(heat / once))  # alike on all ranks, which wait for each other
        return 1e6 * seconds(execution, TIMED, before) / (TIMED * CALLS)


def quantize(tokens: Any) -> tuple[Any, Any]:
    """Rows in float8, and scales [T, H / 128], column after column as in DeepEP's test."""
    blocks = tokens.float().view(len(tokens), -1, 128)
    scales = blocks.abs().amax(2) / 448
    rows = (blocks / scales[..., None]).to(torch.float8_e4m3fn).view(tokens.shape)
    return rows, scales.T.contiguous().T


def dequantize(rows: Any, scales: Any) -> Any:
    blocks = rows.float().view(*scales.shape, 128)
    return (blocks * scales[..., None]).to(torch.bfloat16).view(rows.shape)


def check(op: str, found: Any, tokens: Any, times: Any, tolerance: float) -> None:
    wanted = tokens.float() * times[:, None]
    error = ((found.float() - wanted).abs().max() / wanted.abs().max()).item()
    if not error <= tolerance:
        raise AssertionError(f"{op} is off by {error:.1e} of the largest value")


def seconds(call: Call, calls: int, before: int = 0) -> float:
    """By the device's events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(before):
        call()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


def slowest(own: float) -> float:
    """Of all ranks."""
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return max(found)

"""What `child` asks of the process of one of DeepEP's ranks. An op's name ends in its SMs."""
# pyright: reportMissingImports=false

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .child import HANDLE

deep_ep: Any = importlib.import_module("deep_ep")  # DeepEP's, for a type checker too

BUFFER = int(2e9)  # bytes, as in DeepEP's own test
SLOTS = 256  # rows of a channel's queue, as there
SMS = (24, 32, 48, 64, 96)
CHUNKS, OF_COMBINE = range(4, 33, 4), range(2, 17, 2)  # rows that are sent at a time
TUNED, TIMED = 10, 50  # calls
CYCLES = 600_000  # of the device, in which the host enqueues a call: 0.3 ms
EXACT, IN_FLOAT8 = 2**-7, 2**-4  # of the largest value

Call = Callable[[], Any]


class Layer:
    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}  # they hold the buffer and the operands

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
        self._is_low_latency = shape["low_latency"]
        fill = self._low_latency if self._is_low_latency else self._normal
        chosen, self._calls = fill(tokens, given, shape["experts"])
        return {}, {"chosen": chosen}

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

        best: dict[str, tuple[float, int, int, Call]] = {}
        for sms in SMS:
            some = deep_ep.Config(sms, 8, SLOTS)
            rows, _, _, by_expert, handle, _ = dispatch(tokens, some, 0)
            in_float8 = dequantize(*buffer.dispatch(quantized, handle=handle, config=some)[0])
            if by_expert != given["by_expert"].tolist() or len(rows) != given["tokens"].item():
                raise AssertionError(f"{len(rows)} tokens arrived, of experts {by_expert}")
            check("combine", buffer.combine(rows, handle, config=some)[0], tokens, given["visits"], EXACT)
            check(
                "combine, float8", buffer.combine(in_float8, handle, config=some)[0], tokens, given["visits"], IN_FLOAT8
            )
            ops: dict[str, Callable[[Any], Any]] = {
                "dispatch": lambda config: dispatch(tokens, config),
                "dispatch, float8": lambda config: dispatch(quantized, config),
                f"{HANDLE}dispatch": lambda config, h=handle: buffer.dispatch(tokens, handle=h, config=config),
                f"{HANDLE}dispatch, float8": lambda config, h=handle: buffer.dispatch(
                    quantized, handle=h, config=config
                ),
                "combine": lambda config, r=rows, h=handle: buffer.combine(r, h, config=config),
            }
            for name, op in ops.items():
                for chunk in OF_COMBINE if name == "combine" else CHUNKS:
                    config = deep_ep.Config(sms, chunk, SLOTS)
                    call = lambda op=op, config=config: op(config)  # noqa: E731
                    seconds(call, 1)
                    one = (slowest(seconds(call, TUNED)), sms, chunk, call)
                    for of in ("all", "24")[: 1 + (sms == 24)]:
                        now = f"{name}, {of}"
                        best[now] = min(one, best.get(now, one), key=lambda each: each[0])
        tuned = {of: [round(1e6 * time / TUNED, 1), sms, chunk] for of, (time, sms, chunk, _) in best.items()}
        return tuned, {of: call for of, (*_, call) in best.items()}

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
            check(f"low latency, float8 {use_fp8}", combine(rows, handle)[0], tokens, weights.sum(1), tolerance)
        return {}, {
            "dispatch, all": lambda: dispatch(False),
            "dispatch, float8, all": lambda: dispatch(True),
            "combine, all": lambda: combine(rows, handle),
        }

    def microseconds(self, quantity: str, heat: float) -> float:
        call = self._calls[quantity]
        once = slowest(seconds(call, TUNED)) / TUNED
        for _ in range(int(heat / once)):  # alike on all ranks, which wait for each other
            call()
        times = [seconds(call, TIMED) / TIMED]
        if self._is_low_latency:
            times += kernel_seconds(call, TIMED, quantity.partition(",")[0])
        return 1e6 * min(times)


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


def seconds(call: Call, calls: int) -> float:
    """By the device's events. The device sleeps while the host enqueues; one more call waits for the other ranks."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CYCLES * (1 + calls))
    call()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


def kernel_seconds(call: Call, calls: int, kernel: str) -> list[float]:
    """The mean duration of a call's one kernel, as in DeepEP's bench_kineto. Empty where none is seen."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds(call, calls)
    on_device = [each for each in profile.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    found = sorted((each.time_range for each in on_device if f"::{kernel}" in each.name), key=lambda one: one.start)
    return [1e-6 * sum(one.elapsed_us() for one in found[1:]) / calls] if len(found) == 1 + calls else []


def slowest(own: float) -> float:
    """Of all ranks."""
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return max(found)

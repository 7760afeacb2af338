"""The pictures of the docs, as SVG: a token's way, and bars of what docs/performance.md has in tables.

`python -m jax_ep bench report --write` writes them.
"""

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

Find = Callable[..., tuple[Any, list[str]]]  # report.find

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
BLUE, ORANGE, GREY, LIGHT, INK = "#3b6fb6", "#d9822b", "#9aa5b1", "#eef2f6", "#1f2933"

_LAYERS = {  # as the column "layer" of results has them
    "V3": ("T=4096, H=7168, F=2048, top-8 of", 256, 128),
    "Qwen3-30B": ("T=8192, H=2048, F=768, top-8 of", 128, 64),
    "Mixtral": ("T=8192, H=4096, F=14336, top-2 of", 8, 4),
    "GPT-OSS": ("T=8192, H=2880, F=2880, top-4 of", 128, 64),
}
_PEER_SHAPES = ("v3-half", "gpt-oss-half", "qwen3-30b-half", "qwen3-30b-32k", "mixtral", "sonic-120b")
_MOE = "T=4096, H=7168, top-8 of 256, bfloat16, uniform"


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal", fill: str = INK) -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{fill}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.5g}" height="{height:g}" rx="3" fill="{fill}" stroke="{stroke}"/>'


def _arrow(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    line = f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" stroke-width="2"'
    return f'{line} marker-end="url(#{color[1:]})"/>'


def _svg(width: int, height: int, *parts: str) -> str:
    tip = '<marker id="{}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" orient="auto">'
    tips = [f'{tip.format(each[1:])}<path d="M0 0 8 4 0 8z" fill="{each}"/></marker>' for each in (BLUE, ORANGE)]
    font = 'font-family="sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {font}>'
    return "\n".join([head, f"<defs>{''.join(tips)}</defs>", _box(0, 0, width, height, "white"), *parts, "</svg>\n"])


def bars(title: str, groups: Mapping[str, Mapping[str, float]], form: str, mark: tuple[float, str]) -> str:
    """Groups of horizontal bars, of each series one; a dashed line where `mark` says. `form` formats the values."""
    series = list(dict.fromkeys(name for group in groups.values() for name in group))
    colors = dict(zip(series, (BLUE, ORANGE, GREY), strict=False))
    left, width, high = 210, 420, 16
    most = max(mark[0], *(value for group in groups.values() for value in group.values()))
    parts, values_shown, y = [_text(16, 26, title, weight="bold")], [], 44
    for i, name in enumerate(series):
        parts += [_box(left + 140 * i, y, 11, 11, colors[name]), _text(left + 140 * i + 17, y + 10, name)]
    top = y = y + 28
    for group, values in groups.items():
        parts.append(_text(left - 10, y + 8 * len(values) + 4, group, "end"))
        for name, value in values.items():
            parts.append(_box(left, y, width * value / most, high - 3, colors[name]))
            x = left + width * value / most
            values_shown.append(_box(x + 4, y, 8 * len(form.format(value)), 13, "white"))
            values_shown.append(_text(x + 6, y + 11, form.format(value)))
            y += high
        y += 10
    x = left + width * mark[0] / most
    dashes = f'<line x1="{x:g}" y1="{top - 4}" x2="{x:g}" y2="{y}" stroke="{INK}" stroke-dasharray="4 4"/>'
    return _svg(left + width + 70, y + 28, *parts, dashes, *values_shown, _text(x, y + 16, mark[1], "middle"))


def layers(find: Find) -> str:
    groups: dict[str, dict[str, float]] = {}
    for gpus in (2, 1):
        for model, (shape, *experts) in _LAYERS.items():
            layer = f"{model}, {shape} {experts[2 - gpus]}"
            for name, of_it in (("jax_ep", "jax_ep"), ("padded all_to_all of XLA", "padded all_to_all")):
                _, (ratio,) = find(f"{gpus} H200", {"layer": layer, "of it": of_it}, ["of products"])
                groups.setdefault(f"{model}, {gpus} H200", {})[name] = float(ratio)
    title = "moe_mlp, forward: time over that of its matrix products alone"
    return bars(title, groups, "{:.3f}", (1, "products alone"))


def peers(find: Find) -> str:
    names = ("jax_ep", "sonic", "torch_grouped_mm", "dense")
    groups: dict[str, dict[str, float]] = {}
    for shape in _PEER_SHAPES:
        _, cells = find("1 H200", {"shape": shape}, list(names), "step, us (TFLOP/s)")
        *times, products = (float(cell.split()[0].replace(",", "")) for cell in cells)
        groups[shape] = {name: time / products for name, time in zip(names, times, strict=False)}
    title = "A step on one H200: time over that of dense products alone"
    return bars(title, groups, "{:.3f}", (1, "products alone"))


def ranks(find: Find) -> str:
    moe = {op: ({"shape": _MOE, "op": op}, "remote GB/s") for op in ("dispatch", "combine")}
    ragged = {"lax.ragged_all_to_all": ({"exchange": "jax_ep.lax.ragged_all_to_all"}, "remote GB/s")}
    rows = "uniform ids, table 5,000,000 x 2048, 50,000 rows a rank, float32"
    sparse = {"sparse_all_reduce": ({rows: "jax_ep, bitmap"}, "GB/s")}
    groups: dict[str, dict[str, float]] = {}
    for op, (names, heading) in (moe | ragged | sparse).items():
        for gpus in (2, 4):
            _, (rate,) = find(f"{gpus} H200", names, [heading])
            groups.setdefault(op, {})[f"{gpus} H200"] = float(rate)
    return bars("GB/s that a rank gets from others", groups, "{:.0f}", (370, "NVLink, one way: 370"))


def token_way(find: Find) -> str:
    """Token t of rank 0 chose experts 1 and 2 of four. A cell is a row."""
    del find
    lefts, wide, high, colors = (30, 400), 68, 26, (BLUE, ORANGE)
    stages = [  # y, name, what t is there by (rank, cell)
        (48, "tokens [T, H]", {(0, 1): "t"}),
        (158, "rows [C, H], by expert", {(0, 2): "t", (1, 0): "t"}),
        (268, "outputs [C, H']", {(0, 2): "expert 1", (1, 0): "expert 2"}),
        (378, "sums [T, H']", {(0, 1): "t"}),
    ]
    parts = [
        _text(x, 24, f"rank {rank}, owns experts {2 * rank} and {2 * rank + 1}", weight="bold")
        for rank, x in enumerate(lefts)
    ]
    for y, name, places in stages:
        for rank, x in enumerate(lefts):
            parts.append(_text(x + rank * (4 * wide - 4), y + 10, name, ("start", "end")[rank]))
            for cell in range(4):
                label = places.get((rank, cell))
                parts.append(_box(x + wide * cell, y + 16, wide - 4, high, colors[rank] if label else LIGHT, GREY))
                if label:
                    parts.append(_text(x + wide * cell + 32, y + 34, label, "middle", fill="white"))

    def way(stage: int, start: tuple[int, int], end: tuple[int, int], label: str, color: str, dx: float) -> None:
        (x1, x2), (y1, y2) = (
            (lefts[rank] + wide * cell + 32 for rank, cell in (start, end)),
            (stages[stage + i][0] for i in (0, 1)),
        )
        parts.append(_arrow(x1, y1 + 16 + high, x2, y2 + 14, color))
        parts.append(_text((x1 + x2) / 2 + dx, (y1 + y2 + high) / 2 + 18, label, fill=color))

    way(0, (0, 1), (0, 2), "dispatch, here", BLUE, -116)
    way(0, (0, 1), (1, 0), "dispatch: once over the wire", ORANGE, 34)
    way(1, (0, 2), (0, 2), "ragged_dot", BLUE, 8)
    way(1, (1, 0), (1, 0), "ragged_dot", ORANGE, 8)
    way(2, (0, 2), (0, 1), "combine: + w1 of it", BLUE, -138)
    way(2, (1, 0), (0, 1), "combine: + w2 of it", ORANGE, 34)
    return _svg(700, 436, *parts)


PICTURES = {"token_way": token_way, "layers": layers, "peers": peers, "ranks": ranks}


def write(find: Find) -> None:
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(find))

"""Pictures of the docs, as SVG: bars of what docs/performance.md has in tables.

`python -m jax_ep bench report --write` writes them.
"""

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

from .moe_cases import MODELS
from .peers.shapes import SHAPES, TINY

Find = Callable[..., list[str]]  # report.find

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
BLUE, ORANGE, GREY, INK = "#3b6fb6", "#d9822b", "#9aa5b1", "#1f2933"


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{INK}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.5g}" height="{height:g}" rx="3" fill="{fill}" stroke="none"/>'


def _svg(width: int, height: int, *parts: str) -> str:
    font = 'font-family="sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {font}>'
    return "\n".join([head, _box(0, 0, width, height, "white"), *parts, "</svg>\n"])


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
        for model in ("V3", "Qwen3-30B", "Mixtral", "GPT-OSS"):
            layer = f"{MODELS[model] if gpus == 2 else MODELS[model].halved}, uniform"
            for name, of_it in (("jax_ep", "jax_ep"), ("padded all_to_all of XLA", "padded all_to_all")):
                (ratio,) = find(f"{gpus} H200", {"layer": layer, "of it": of_it}, ["of products"])
                groups.setdefault(f"{model}, {gpus} H200", {})[name] = float(ratio)
    title = "moe_mlp, forward: time over that of its matrix products alone"
    return bars(title, groups, "{:.3f}", (1, "products alone"))


def peers(find: Find) -> str:
    names = ("jax_ep", "sonic", "torch_grouped_mm", "dense")
    groups: dict[str, dict[str, float]] = {}
    for shape in [name for name in SHAPES if name != TINY]:
        cells = find("1 H200", {"shape": shape, "quantity": "step, us (TFLOP/s)"}, names)
        *times, products = (float(cell.split()[0].replace(",", "")) for cell in cells)
        groups[shape] = {name: time / products for name, time in zip(names, times, strict=False)}
    title = "A step on one H200: time over that of dense products alone"
    return bars(title, groups, "{:.3f}", (1, "products alone"))


PICTURES: dict[str, Callable[[Find], str]] = {"layers": layers, "peers": peers}


def write(find: Find) -> None:
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(find))

"""Charts of what a benchmark measured."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class Panel:
    """Groups of bars: of each series one in every group."""

    title: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float]]


def add_plot(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--plot", type=Path, nargs="?", const=Path(f"jax_ep_bench_{what}.png"), help="also write a PNG [%(const)s]"
    )


def write_plot(path: Path | None, draw: Callable[[Path], None]) -> None:
    """`path`: what the option said."""
    if path:
        draw(path)
        print(f"\nwrote {path}")


def grouped_bars(panels: Sequence[Panel], unit: str, path: Path) -> None:
    """Writes the panels side by side as a PNG."""
    from matplotlib.figure import Figure

    most = max(len(panel.groups) for panel in panels)
    figure = Figure(figsize=(max(6, 1.5 * most) * len(panels), 5), layout="constrained")
    for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        places, width = np.arange(len(panel.groups)), 0.8 / len(panel.series)
        for i, (name, values) in enumerate(panel.series.items()):
            axes.bar(places + width * (i - (len(panel.series) - 1) / 2), values, width=width, label=name)
        slanted = most > 3
        axes.set_xticks(places, panel.groups, rotation=30 if slanted else 0, ha="right" if slanted else "center")
        axes.set(title=panel.title, ylabel=unit)
        axes.legend()
    figure.savefig(path, dpi=120)

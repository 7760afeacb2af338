"""Bytes that a compiled program's collectives send to other nodes, read from its HLO."""

import math
import re
from collections.abc import Sequence

import numpy as np

COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "reduce-scatter", "collective-permute")

_INSTRUCTION = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)}|ragged-all-to-all)(-start)?\(.*?\)(.*)")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([\w',]*)\}")
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")


def to_other_nodes(hlo: str, nodes: Sequence[int]) -> int:
    """Bytes that each device sends to devices of other nodes in one run of the program, loops counted once.

    What a collective's result needs is counted, and not what an algorithm may send on the way. All devices must send
    as many.

    Args:
      hlo: `compiled.as_text()`.
      nodes: the node of each device, in the order of the mesh.

    Raises:
      ValueError: devices send different amounts, or there is a collective whose bytes are not in its shapes.
    """
    sent = np.zeros(len(nodes))
    for line in hlo.splitlines():
        found = _INSTRUCTION.search(line)
        if found is None:
            continue
        shape, opcode, started, attributes = found.groups()
        result = _bytes(_second(shape) if started and opcode != "all-reduce" else shape)
        for group in _groups(attributes):
            for device in group:
                elsewhere = sum(nodes[peer] != nodes[device] for peer in group)
                sent[device] += elsewhere * _for_each(opcode, result, len(group))
    if sent.min() != sent.max():
        raise ValueError(f"devices send different amounts to other nodes: {sent.tolist()}")
    return round(sent[0])


def _for_each(opcode: str, result: int, size: int) -> float:
    """Bytes for each other device of the group."""
    if opcode in ("all-gather", "all-to-all"):
        return result / size
    if opcode == "reduce-scatter":
        return result
    if opcode == "all-reduce":  # as a reduce-scatter and an all-gather
        return 2 * result / size
    raise ValueError(f"{opcode}: what it sends is not in its shapes")


def _second(shape: str) -> str:
    """The result of an operation that was only started: ((operands), result, ...)."""
    depth, parts = 0, [""]
    for character in shape.strip()[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts[1]


def _bytes(shape: str) -> int:
    total = 0
    for dtype, sides in _ARRAY.findall(shape):
        digits = re.search(r"\d+", dtype)
        bits = 8 if digits is None else int(digits[0])  # pred has none; f8e4m3fn begins with its own
        total += math.prod(int(side) for side in sides.split(",") if side) * bits // 8
    return total


def _groups(attributes: str) -> list[list[int]]:
    """The three forms that XLA prints: {{0,2},{1,3}}, [2,2]<=[2,2]T(1,0) and mesh['node'=2,'ep'=2] {'node'}."""
    if iota := _IOTA.search(attributes):
        devices = _devices([int(side) for side in iota[3].split(",")])
        if iota[4]:
            devices = devices.transpose([int(axis) for axis in iota[4].split(",")])
        return devices.reshape(int(iota[1]), int(iota[2])).tolist()
    if mesh := _MESH.search(attributes):
        sides = {name: int(side) for name, side in (axis.split("=") for axis in mesh[1].split(","))}
        along = [list(sides).index(name) for name in mesh[2].split(",")]
        devices = np.moveaxis(_devices(list(sides.values())), along, range(-len(along), 0))
        return devices.reshape(-1, math.prod(devices.shape[-len(along) :])).tolist()
    if listed := _LISTED.search(attributes):
        return [[int(device) for device in group.split(",") if device] for group in listed[1][1:-1].split("},{")]
    raise ValueError(f"no replica groups in {attributes!r}")


def _devices(sides: list[int]) -> np.ndarray:
    return np.arange(math.prod(sides)).reshape(sides)

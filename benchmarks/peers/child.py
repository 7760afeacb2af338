"""The process of one peer: answers questions, JSON a line, until its input ends.

    {"shape": name, "operands": file, "expected": file} -> {"error": .., "kept": .., "peak": ..}
    {"quantity": name, "heat": seconds} -> {name: us}

An exception answers {"failed": text}. The `Layer` of a peer's module has two methods. prepare(shape, operands) runs
every pass once; it returns the results that `shapes.expected` names, of the first tokens or of all, and MiB: "kept",
which a training forward leaves beside operands and output, and "peak", which a step takes beside its operands, results
included.
microseconds(quantity, heat) is the time of a call after so many seconds of the same. What is unknown is left out.
"""

import importlib
import json
import os
import sys
import traceback
from typing import Any

import numpy as np

HANDLE = "with a handle: "  # begins the ops of DeepEP that leave out all but the tokens


def answer(layer: Any, question: dict[str, Any]) -> dict[str, Any]:
    if "quantity" in question:
        return {question["quantity"]: layer.microseconds(question["quantity"], question["heat"])}
    results, memory = layer.prepare(question["shape"], dict(np.load(question["operands"])))
    wanted = np.load(question["expected"])
    errors = {name: each[: len(wanted[name])] - wanted[name] for name, each in results.items()}
    relative = [np.abs(error).max() / np.abs(wanted[name]).max() for name, error in errors.items()]
    return memory | ({"error": float(np.max(relative))} if relative else {})  # NaN stays


def main(peer: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    layer = importlib.import_module(f".{peer}", __package__).Layer()
    for line in sys.stdin:
        try:
            found = answer(layer, json.loads(line))
        except Exception as error:
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

"""Continues a text with a model of examples/models: `python -m jax_ep generate FOLDER "Once upon a time"`.

The folder is a checkpoint of Hugging Face. Its tokenizer.json makes tokens of the text, by the package tokenizers;
without one, the text must be numbers of tokens.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jax_ep

if __name__ == "__main__":  # run as a file: the package is its folder
    sys.path.append(str(Path(__file__).parents[1]))
    __package__ = "examples"

from .models import model
from .models.families import config_of
from .models.layers import Run


def tokenizer_of(folder: Path) -> Any:
    """What encodes a text and decodes tokens, or None."""
    if not (path := folder / "tokenizer.json").exists():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jax_ep generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="with config.json and safetensors")
    parser.add_argument("text", help="the beginning")
    parser.add_argument("--tokens", type=int, default=64, help="how many follow [%(default)s]")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", help="of weights and activations [%(default)s]")
    options = parser.parse_args(arguments)
    config, tokenizer = config_of(options.folder), tokenizer_of(options.folder)
    given = tokenizer.encode(options.text).ids if tokenizer else [int(number) for number in options.text.split()]
    with jax_ep.Group(Mesh(np.array(jax.devices()), ("ep",)), "ep") as group:
        run = Run(group, dtype=jnp.dtype(options.dtype))
        params = model.load(options.folder, config, group, run.dtype)
        key, ids = jax.random.key(options.seed), jnp.asarray([given], jnp.int32)
        start = time.perf_counter()
        found = model.generate(params, ids, options.tokens, config, run, temperature=options.temperature, key=key)
        tokens = np.asarray(found[0]).tolist()
        print(tokenizer.decode(given + tokens) if tokenizer else " ".join(map(str, tokens)))
        print(f"{options.tokens} tokens in {time.perf_counter() - start:.1f} s, compilation included", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

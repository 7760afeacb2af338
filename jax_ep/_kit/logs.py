"""What is said in the log once, however often it is found."""

import functools
import logging


@functools.cache
def log_once(level: int, text: str, *values: object) -> None:
    logging.getLogger("jax_ep").log(level, text, *values)

"""The words of Python's own standard library, from its identifiers, comments and docstrings."""

import re
from collections import Counter
from typing import NamedTuple

import numpy as np

from .moe_lm_data import load_bytes

# fooBar, FooBar and foo_bar are two words; HTTPServer is "http" and "server".
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


class Corpus(NamedTuple):
    vocabulary: list[str]  # [V], the most frequent first
    text: np.ndarray  # [N] int32: the words in their order, frequent ones thinned out
    noise: np.ndarray  # [V] float64: the cumulated distribution that negative samples come from


class Batch(NamedTuple):
    """Pairs of words that stand close together, and random words; ids are int32."""

    center: np.ndarray  # [B]
    context: np.ndarray  # [B]
    noise: np.ndarray  # [M]


def load_corpus(rng: np.random.Generator, *, min_count: int = 5, threshold: float = 1e-3) -> Corpus:
    """Words of two letters and more that occur often enough, sampled as by Mikolov et al. (2013).

    A word whose share of the text exceeds `threshold` is kept with probability sqrt(threshold / share); noise is drawn
    in proportion to count ** 0.75.
    """
    source = load_bytes().tobytes().decode(errors="ignore")
    words = [word.lower() for word in _WORD.findall(source) if len(word) > 1]
    vocabulary = [word for word, count in Counter(words).most_common() if count >= min_count]
    index = {word: i for i, word in enumerate(vocabulary)}
    ids = np.array([index[word] for word in words if word in index], np.int32)
    counts = np.bincount(ids)
    keep = rng.random(ids.size) < np.sqrt(threshold * ids.size / counts[ids])
    noise = np.cumsum(counts**0.75)
    return Corpus(vocabulary, ids[keep], noise / noise[-1])


def sample_batch(corpus: Corpus, rng: np.random.Generator, pairs: int, noise: int, window: int = 5) -> Batch:
    """Random words with a neighbour at most `window` words away, and words of the noise distribution."""
    center = rng.integers(window, corpus.text.size - window, pairs)
    distance = rng.integers(1, window + 1, pairs) * rng.choice([-1, 1], pairs)
    drawn = np.searchsorted(corpus.noise, rng.random(noise)).astype(np.int32)
    return Batch(corpus.text[center], corpus.text[center + distance], drawn)

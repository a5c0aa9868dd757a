"""Operations on arrays of unit numbers: hashing, masks, connected components."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from lightning_sym.symmetry.arrays import Bools, Ints, rising

Hashes = NDArray[np.uint64]
Numbers = NDArray[np.integer[Any]]  # 32-bit where there are millions
_AT_ONCE = 2**17  # positions hashed in memory at once
_IN_CACHE = 2**14  # numbers scrambled at once


def mix(values: Numbers) -> Hashes:
    """Scramble integers (splitmix64), so that sums of them identify multisets."""
    x = np.array(values, np.uint64).reshape(-1)  # a copy, which is then scrambled in place
    between = np.empty(min(len(x), _IN_CACHE), np.uint64)
    for begin in range(0, len(x), _IN_CACHE):
        part = x[begin : begin + _IN_CACHE]
        high = between[: len(part)]
        part += np.uint64(0x9E3779B97F4A7C15)
        part *= np.uint64(0xBF58476D1CE4E5B9)
        part ^= np.right_shift(part, np.uint64(31), out=high)
        part *= np.uint64(0x94D049BB133111EB)
        part ^= np.right_shift(part, np.uint64(29), out=high)
        part *= np.uint64(0xBF58476D1CE4E5B9)
        part ^= np.right_shift(part, np.uint64(32), out=high)
    return x.reshape(np.shape(values))


def sum_by(index: Numbers, values: Hashes | Callable[[slice], Hashes], number: int) -> Hashes:
    """Add hashes by index, modulo 2^64; a function may compute the hashes in batches of positions."""
    total = np.zeros(number, np.uint64)
    with np.errstate(over="ignore"):
        for part in parts(np.arange(0, len(index) + _AT_ONCE, _AT_ONCE)):
            np.add.at(total, index[part], values(part) if callable(values) else values[part])
    return total


def parts(offset: Ints) -> Iterator[slice]:
    """Yield slices of positions in batches of whole places, slightly larger than a cache."""
    starts = rising(np.searchsorted(offset, np.arange(0, offset[-1], _AT_ONCE), side="right") - 1)
    for first, last in itertools.pairwise([*offset[starts].tolist(), int(offset[-1])]):
        yield slice(first, last)


def flat(parts: Sequence[Numbers]) -> Ints:
    """Concatenate arrays of any shapes into one axis."""
    return np.concatenate([np.zeros(0, np.int64), *(part.ravel() for part in parts)], dtype=np.int64)


def marked(number: int, *positions: Numbers) -> Bools:
    """Return a mask that is true at given positions."""
    mask = np.zeros(number, bool)
    mask[flat(list(positions))] = True
    return mask


def components(number: int, merges: list[tuple[Ints, Ints]]) -> Ints:
    """Return for each atom the smallest atom merged with it."""
    one, two = (flat([pair[side] for pair in merges]) for side in (0, 1))
    graph = sparse.coo_matrix((np.ones(len(one), np.int8), (one, two)), shape=(number, number))
    count, labels = sparse.csgraph.connected_components(graph, directed=False)
    first = np.zeros(count, np.int64)
    first[labels[::-1]] = np.arange(number)[::-1]  # the last value written is the smallest
    result: Ints = first[labels]
    return result

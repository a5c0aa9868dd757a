"""Random numbers that depend on named keys only, never on earlier draws.

Draws that must not change with a resume, the world size or the population come from a
generator with keys for their purpose, for example ``generator("order", member_seed, epoch)``.
"""

import hashlib
import operator
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(*keys: str | int) -> int:
    """Return a seed that depends on the keys and their order only.

    Args:
        keys: Strings or integers that identify the purpose of the random numbers.

    Returns:
        An integer in ``[0, 2**63)``, the same on every platform.
    """
    plain = (key if isinstance(key, str | bool) else operator.index(key) for key in keys)  # also integers of numpy
    text = "\x1f".join(f"{type(key).__name__}:{key}" for key in plain)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(*keys: str | int) -> torch.Generator:
    """Return a CPU generator seeded with :func:`derive_seed` of the keys."""
    return torch.Generator().manual_seed(derive_seed(*keys))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generators within the block, and restore their state afterwards.

    Args:
        seed: Argument of ``torch.manual_seed``.
    """
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count())) if cuda else []):
        if cuda:
            torch.manual_seed(seed)
        else:  # torch.manual_seed would store the seed until CUDA is initialised
            torch.default_generator.manual_seed(seed)
        yield

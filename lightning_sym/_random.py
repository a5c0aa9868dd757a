"""Random numbers that depend on named keys only, never on what was drawn before.

Every draw that has to survive a resume, a change of world size or a change of population is made from a
generator derived from what it is for, for example ``generator("order", member_seed, epoch)``.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(*keys: str | int) -> int:
    """Return a seed that depends on the keys and their order only.

    Args:
        keys: Strings or integers that say what the random numbers are for.

    Returns:
        An integer in ``[0, 2**63)``, the same on every platform.
    """
    text = "\x1f".join(f"{type(key).__name__}:{key}" for key in keys)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(*keys: str | int) -> torch.Generator:
    """Return a CPU generator seeded with :func:`derive_seed` of the keys."""
    return torch.Generator().manual_seed(derive_seed(*keys))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generators for the block and put them back as they were afterwards.

    Args:
        seed: What ``torch.manual_seed`` is called with.
    """
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count())) if cuda else []):
        if cuda:
            torch.manual_seed(seed)
        else:  # torch.manual_seed would leave the seed waiting for CUDA
            torch.default_generator.manual_seed(seed)
        yield

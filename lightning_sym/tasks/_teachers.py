"""Sources of a teacher: a seed, numbers, a member of a zoo, or a file of weights."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from lightning_sym.networks import Network, architecture_name
from lightning_sym.symmetry.tracing.graph.capture import copied
from lightning_sym.weights import fit_weights, read_weights
from lightning_sym.zoo import ModelZoo

Teacher: TypeAlias = int | str | list[float]


def check_teacher(
    teacher: Teacher | None, zoo: str | None, member: int | None, network: Network | None
) -> Teacher | None:
    """Check that exactly one argument names the teacher.

    Args:
        teacher: A seed, a file or the weights themselves; or None.
        zoo: A zoo's folder, or None.
        member: Number of a member of the zoo; or None.
        network: The architecture, or None.

    Returns:
        The teacher; seed 0 if nothing is said.

    Raises:
        ValueError: If too much is said, or too little.
    """
    if zoo is not None and teacher is not None:
        raise ValueError("teacher and zoo both name the teacher; give one of them.")
    if zoo is None and member is not None:
        raise ValueError(f"member {member} is of a zoo, and none is given; give zoo, or teacher in its place.")
    if zoo is None and network is None:
        raise ValueError("Give network (and teacher), or the folder of a zoo as zoo.")
    if not (teacher is None or isinstance(teacher, Sequence) or (type(teacher) is int and teacher >= 0)):
        raise ValueError(f"teacher must be a seed >= 0, a file, or a list of weights, got {teacher!r}.")
    if isinstance(teacher, Sequence) and not isinstance(teacher, str):
        return [float(weight) for weight in teacher]
    return 0 if teacher is None and zoo is None else teacher


def drawn(network: Network, seed: int) -> Network:
    """Return ``network.fresh(seed)`` with weights drawn in single precision, also in a fit in double precision.

    Lightning changes the default dtype there, and with it which numbers a seed gives.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return network.fresh(seed)
    finally:
        torch.set_default_dtype(dtype)


def load_teacher(
    teacher: Teacher | None,
    zoo: str | None,
    member: int | None,
    network: Network | None,
    allow: Sequence[str] = (),
) -> tuple[Network, dict[str, Any]]:
    """Return the teacher in evaluation mode, and where it is from in plain values.

    Args:
        teacher: Result of :func:`check_teacher`.
        zoo: The zoo's folder, or None.
        member: Number of a member of the zoo; None for its first one.
        network: The architecture; with a zoo it must be the zoo's, or None.
        allow: Your own packages with networks of the zoo.

    Raises:
        FileNotFoundError: If there is no such file or zoo.
        ValueError: If the weights do not fit the network, or are not finite.
    """
    if zoo is not None:
        opened = ModelZoo.open(zoo, allow=allow)
        if network is not None and network.architecture != opened.architecture:
            raise ValueError(
                f"network is another architecture than that of the zoo at {zoo} ({opened.architecture}); leave network "
                "out."
            )
        number = opened.numbers[0] if member is None else member
        found = opened.load(number).eval()
        about: dict[str, Any] = {"zoo": str(zoo), "member": number, "sha256": opened.member(number).sha256}
    else:
        assert network is not None
        assert teacher is not None
        about = {"teacher": teacher}
        if isinstance(teacher, int):
            found = drawn(network, teacher)
        else:
            found = copied(network)
            if isinstance(teacher, str):
                found.load_state_dict(fit_weights(read_weights(teacher), found, source=teacher))
            else:
                _fill(found, teacher)
        found = found.eval()
    if not all(bool(torch.isfinite(parameter).all()) for parameter in found.parameters()):
        raise ValueError(f"The teacher has weights that are not finite ({about}); choose another one.")
    return found, about


def _fill(network: Network, weights: Sequence[float]) -> None:
    parameters = list(network.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    if len(weights) != count:
        raise ValueError(
            f"teacher has {len(weights)} weights, and {architecture_name(network)} has {count} parameters "
            f"({', '.join(name for name, _ in network.named_parameters())}); give as many, in this order."
        )
    sizes = [parameter.numel() for parameter in parameters]
    parts = torch.split(torch.tensor(weights, dtype=torch.float64), sizes)
    with torch.no_grad():
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))  # stays on its device, like the buffers

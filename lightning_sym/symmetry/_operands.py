HEAD


def along(tensor: Tensor, axes: tuple[int, ...]) -> Floats:
    """Sum over all other axes."""
    others = [axis for axis in range(tensor.ndim) if axis not in axes]
    total = tensor.sum(others) if others else tensor
    return np.asarray(total.double().cpu().numpy())


def working(network: nn.Module, symmetry: Symmetry, device: torch.device) -> dict[str, Tensor]:
    """Return the parameters, in at least single precision."""
    tensors = {}
    for name, tensor in state_tensors(network).items():
        if name in symmetry.parameter_names:
            value = tensor.detach().to(device)
            tensors[name] = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    return tensors


def check_networks(symmetry: Symmetry, **networks: nn.Module) -> None:
    for which, network in networks.items():
        try:
            symmetry.require(network)
        except ValueError as error:
            raise ValueError(f"{which} is not of the traced architecture: {error}.") from error
        for name, tensor in state_tensors(network).items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} of {which} holds values that are not finite; networks must be finite.")


def check_counts(**numbers: int) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}.")


def balanced(symmetry: Symmetry, network: nn.Module) -> tuple[nn.Module, Element]:
    """Return the network in the balanced gauge, and the element that brings it there."""
    from lightning_sym.symmetry.canonical import canonicalize

    form = canonicalize(symmetry, network, scales="balanced", signs=False, order=False)
    return form.network, form.element

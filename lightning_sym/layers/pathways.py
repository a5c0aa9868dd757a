"""Several layers in parallel."""

from collections.abc import Mapping

from torch import Tensor, nn


def parameter_paths(module: nn.Module) -> dict[str, tuple[str, str]]:
    """Return the block and the pathway of each parameter on a pathway.

    Args:
        module: A network or any other module.

    Returns:
        By parameter name, the name of the outermost :class:`ResidualPathways` around it, and the name of its pathway in
        the innermost one. Parameters outside of all pathways are left out.

    Example:
        >>> from lightning_sym.layers import CircularConv
        >>> network = nn.Sequential(ResidualPathways({"conv": CircularConv(1, 1)}), nn.Flatten(), nn.Linear(4, 2))
        >>> parameter_paths(network)
        {'0.conv.weight': ('0', 'conv'), '0.conv.bias': ('0', 'conv')}
    """
    blocks = [name for name, part in module.named_modules() if isinstance(part, ResidualPathways)]
    found = {}
    for name, _ in module.named_parameters():
        around = [block for block in blocks if name.startswith(f"{block}." if block else "")]
        if around:
            outer, inner = min(around, key=len), max(around, key=len)
            found[name] = (outer, name[len(inner) :].removeprefix(".").split(".")[0])
    return found


class ResidualPathways(nn.Module):
    """The scaled sum of residual pathways with the same input: by default their mean.

    ``forward`` is ``scale * (path1(x) + path2(x) + ...)``. The scale only changes the meaning of a prior precision: a
    pathway that is linear in one tensor has the same function, and the same evidence, with ``(theta, delta, s)`` as
    with ``(s theta, delta / s^2, 1)``.

    If several equivariant pathways halve the grid, add one :class:`~lightning_sym.layers.PolyphasePool` after
    their sum: separate pools may keep different components, and the sum would not be equivariant.

    Args:
        paths: Modules, named ``"0"``, ``"1"``, ...; or one mapping from names to modules. Their outputs must have
            the same shape.
        scale: A number; default ``1 / (number of paths)``.

    Attributes:
        scale: The scale, a Python float outside of the state.

    Raises:
        ValueError: If there is no pathway, a name is invalid, or, in the forward, outputs differ in shape.

    References:
        Finzi et al. (2021), "Residual Pathway Priors for Soft Equivariance Constraints", arXiv:2112.01388;
        docs/theory/relaxed_layers.md, 1.7.
    """

    def __init__(self, *paths: nn.Module | Mapping[str, nn.Module], scale: float | None = None) -> None:
        super().__init__()
        only = paths[0] if len(paths) == 1 else None
        named = only if isinstance(only, Mapping) else {str(index): path for index, path in enumerate(paths)}
        if not named:
            raise ValueError("ResidualPathways needs one path at least, got none.")
        self.scale = 1 / len(named) if scale is None else float(scale)
        for name, path in named.items():
            if not isinstance(path, nn.Module):
                raise ValueError(
                    f"A path of ResidualPathways must be a module, got {path!r}; pass modules, or one mapping from "
                    "names to modules."
                )
            if not name or "." in name or hasattr(self, name):
                raise ValueError(f"A path cannot be named {name!r}, which modules do not allow; choose another name.")
            self.add_module(name, path)

    @property
    def paths(self) -> dict[str, nn.Module]:
        """The pathways by name."""
        return {name: path for name, path in self.named_children() if path is not None}

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled sum of the pathways' outputs."""
        outputs: dict[str, Tensor] = {name: path(x) for name, path in self.paths.items()}
        shapes = {name: list(output.shape) for name, output in outputs.items()}
        if any(shape != next(iter(shapes.values())) for shape in shapes.values()):
            found = ", ".join(f"{shape} by {name}" for name, shape in shapes.items())
            raise ValueError(
                f"The paths of ResidualPathways must give the same shape, got {found}; let a PolyphasePool follow "
                "paths without out_grid where others have a smaller one."
            )
        # The sum has the memory format of the first: factored layers have the channels before the samples there.
        total, *others = sorted(outputs.values(), key=lambda output: not output.is_contiguous())
        for output in others:
            total = total + output
        return total if self.scale == 1 else total * self.scale

    def extra_repr(self) -> str:
        """Return the scale, for ``repr``."""
        return f"scale={self.scale:.6g}"

HEAD


@dataclass(frozen=True, eq=False)
class OrbitDistance:
    """Bounds for the distance of two networks up to symmetry, both in the balanced gauge.

    Attributes:
        upper: Distance to a member of the orbit that was found.
        lower: No member of the orbit is nearer than this, up to rounding. 0 where no bound is known.
    """

    upper: float
    lower: float

    @property
    def exact(self) -> bool:
        """Whether both bounds agree to a relative 1e-6."""
        return self.upper - self.lower <= 1e-6 * max(self.upper, 1e-300)


def orbit_distance(
    symmetry: Symmetry,
    a: nn.Module,
    b: nn.Module,
    *,
    balance: bool = True,
    signs: bool = True,
    restarts: int = 1,
    seed: int = 0,
    max_sweeps: int = 100,
    device: torch.device | str | None = None,
) -> OrbitDistance:
    r"""Bound the distance of two networks up to symmetry: :math:`\min_g |\theta_a - g\,\theta_b|`, both balanced.

    The upper bound is that of :func:`weight_matching`. The lower bound is a relaxation: parameters on which one axis
    group stands, on one axis, are matched exactly for that group alone; all others are compared as sorted lists of
    numbers, which no permutation of their entries can beat (of absolute values, where signs are free). With one axis
    group both bounds agree.

    Args:
        symmetry: The symmetry of the architecture.
        a: The first network.
        b: The second network.
        balance: Whether both are balanced first. Without it, magnitudes are compared as they are.
        signs: Whether signs are free.
        restarts: As for :func:`weight_matching`.
        seed: As for :func:`weight_matching`.
        max_sweeps: As for :func:`weight_matching`.
        device: As for :func:`weight_matching`.

    Returns:
        Both bounds. The lower one is 0 if matrices act on some units, for which none is known.

    Raises:
        ValueError: As for :func:`weight_matching`.

    Note:
        The bounds are for permutations and signs of the balanced networks. A dead unit has no balanced form; it is
        left as it is.
    """
    check_counts(restarts=restarts, max_sweeps=max_sweeps)
    check_networks(symmetry, a=a, b=b)
    where = torch.device(device) if device is not None else device_of(a)
    with torch.no_grad():
        if balance:
            a, b = (balanced(symmetry, network)[0] for network in (a, b))
        descent = Descent(symmetry, a, b, signs=signs, device=where)
        best, _ = best_of_restarts(symmetry, descent, restarts, seed, None, max_sweeps, False)
        descent.restart(best[2])
        # Subtracted, not computed from inner products: near 0 these cancel.
        upper = math.sqrt(
            sum(
                float((t - descent.current[name]).square().sum(dtype=wide(where))) for name, t in descent.target.items()
            )
        )
        return OrbitDistance(upper, min(lower_bound(descent), upper))


def lower_bound(descent: Descent) -> float:
    if descent.symmetry.structure.dense:
        return 0.0
    owners: dict[str, list[Group]] = {}
    for group in descent.groups:
        for name in group.tensors:
            owners.setdefault(name, []).append(group)
    signed = {
        site.tensor
        for site in descent.symmetry.structure.sites
        if descent.sign_columns[:, :].shape[1]
        and descent.sign_columns.tocsr()[site.offset : site.offset + site.size].nnz
    }
    joint = {site.tensor for site in descent.symmetry.structure.sites if len(site.axes) == 2}
    double = {name: tensor.double().cpu() for name, tensor in descent.target.items()}
    other = {name: tensor.double().cpu() for name, tensor in descent.start.items()}
    total = 0.0
    alone: dict[int, list[str]] = {}
    for name, tensor in double.items():
        mine = [group for group in owners.get(name, []) if group.movable or group.free]
        fixed = not mine and name not in signed
        if fixed:
            total += float((tensor - other[name]).square().sum())
        elif len(owners[name]) == 1 and not mine[0].quadratic and name not in joint:
            alone.setdefault(mine[0].index, []).append(name)
        else:
            flip = descent.signs and name in signed
            lists = [(t.abs() if flip else t).flatten().sort().values for t in (tensor, other[name])]
            total += float((lists[0] - lists[1]).square().sum())
    for index, names in alone.items():
        group = descent.groups[index]
        slices = {
            pattern: kept
            for pattern, parts in group.slices.items()
            if (kept := tuple(part for part in parts if part.tensor in names))
        }
        size = len(group.units)
        parts = {
            pattern: descent.rows_of(kept, double, size) @ descent.rows_of(kept, other, size).T
            for pattern, kept in slices.items()
        }
        gain = Gain(parts, descent.signs)
        if not gain.exact or (
            descent.signs and len(group.free) < descent.symmetry.structure.sign_table[index].shape[1]
        ):
            # Shared signs, or too many: the bound by absolute values.
            for name in names:
                lists = [t.abs().flatten().sort().values for t in (double[name], other[name])]
                total += float((lists[0] - lists[1]).square().sum())
            continue
        # Blocks may change places: relaxed to all permutations.
        whole = replace(group, cells=(np.arange(size),)) if descent.systems else group
        chosen = within_cells(whole, Tables(gain))
        for pattern, kept in slices.items():
            sign = math.prod((chosen.signs[k] for k in pattern if k in chosen.signs), start=np.ones(size))
            moved = (
                descent.rows_of(kept, other, size)[torch.from_numpy(chosen.source)] * torch.from_numpy(sign)[:, None]
            )
            total += float((descent.rows_of(kept, double, size) - moved).square().sum())
        # Entries of these parameters at which no unit of the group stands are fixed.
        for name in names:
            axis = next(part.axis for parts_ in slices.values() for part in parts_ if part.tensor == name)
            stands = torch.zeros(double[name].shape[axis] if double[name].ndim else 1, dtype=torch.bool)
            for part in itertools.chain(*slices.values()):
                if part.tensor == name:
                    stands[slice(None) if part.positions is None else part.positions] = True
            if not bool(stands.all()):
                rest = (~stands).nonzero().flatten()
                total += float((double[name] - other[name]).index_select(axis, rest).square().sum())
    return math.sqrt(total)

HEAD


Pattern: TypeAlias = tuple[int, ...]
# Sign generators that meet on one position are tried in all combinations up to this number.
_MOST_JOINT_SIGNS = 3


@dataclass(frozen=True)
class Slices:
    """Where the units of a group stand in one parameter: on an axis, at these positions (None: at all, in order)."""

    tensor: str
    axis: int
    positions: Tensor | None

    def of(self, tensor: Tensor, size: int) -> Tensor:
        """Return one row per unit: everything that stands at its positions."""
        moved = tensor.movedim(self.axis, 0)
        if self.positions is not None:
            moved = moved.index_select(0, self.positions.to(tensor.device))
        return moved.reshape(size, -1)


@dataclass(frozen=True)
class Joint:
    """Where the units of a group stand in a grouped convolution's weight: rows, their columns, and the units there."""

    tensor: str
    rows: Ints
    columns: Ints
    members: Ints
    pattern: Pattern

    def of(self, tensor: Tensor) -> Tensor:
        """Return the slices, columns in the order of the members. Shape (columns, rows * kernel)."""
        rows, columns = (torch.from_numpy(index).to(tensor.device) for index in (self.rows, self.columns))
        chosen = tensor[rows[:, None], columns]
        return chosen.transpose(0, 1).reshape(len(self.members), -1)


@dataclass(frozen=True)
class Group:
    """What the descent needs to know about an axis group.

    `free` are the columns of the sign table whose generators belong to one unit alone, `shared` those whose generators
    belong to a whole cell; `slices` and `joints` are sorted by the pattern of those generators that act on them.
    """

    index: int
    units: Ints
    cells: tuple[Ints, ...]
    movable: bool
    dense: bool
    free: tuple[int, ...]
    shared: tuple[int, ...]
    slices: dict[Pattern, tuple[Slices, ...]]
    joints: tuple[Joint, ...]
    tensors: frozenset[str]
    quadratic: bool


def matched_groups(symmetry: Symmetry) -> list[Group]:
    structure = symmetry.structure
    matrix = structure.signs.tocsr()
    generators = matrix.shape[1]
    unit_at = np.full(matrix.shape[0], -1)
    joint_sites = [site for site in structure.sites if len(site.axes) == 2]
    for site in structure.sites:
        unit_at[site.offset : site.offset + site.size] = site.unit.ravel()
    type_of_unit = np.full(structure.units, -1)
    for index, units in enumerate(structure.types):
        type_of_unit[units] = index
    type_at = np.where(unit_at >= 0, type_of_unit[np.maximum(unit_at, 0)] if structure.units else -1, -1)
    # A generator is a unit's own if no unit but that one stands where it acts.
    entries = matrix.tocoo()
    odd = np.mod(np.rint(entries.data), 2) == 1
    first = np.full(generators, structure.units)
    last = np.full(generators, -1)
    np.minimum.at(first, entries.col[odd], unit_at[entries.row[odd]])
    np.maximum.at(last, entries.col[odd], unit_at[entries.row[odd]])
    # A depthwise weight has two labels on its rows: the one of the second axis adds its signs.
    extra: dict[int, int] = {}
    for site in joint_sites:
        if site.shape[1] == 1:
            rows = next(s for s in structure.sites if s.tensor == site.tensor and s.axes == (0,))
            extra.update({rows.offset + r: site.offset + r for r in range(site.shape[0])})

    acting_at = matrix.tocsc()

    def belongs(generators: Ints, units: Ints) -> bool:
        """Whether all units of a cell have one generator, which acts on nothing else."""
        if np.any(generators != generators[0]):
            return False
        lo, hi = acting_at.indptr[generators[0] : generators[0] + 2]
        return bool(np.isin(unit_at[acting_at.indices[lo:hi]], units).all())

    def own_pattern(position: int, table: Ints, local: int, columns: tuple[int, ...]) -> Pattern:
        acting: dict[int, int] = {}
        for place in (position, extra.get(position, -1)):
            if place >= 0:
                for j in range(matrix.indptr[place], matrix.indptr[place + 1]):
                    if round(float(matrix.data[j])) % 2:
                        acting[int(matrix.indices[j])] = acting.get(int(matrix.indices[j]), 0) ^ 1
        return tuple(k for k in columns if acting.get(int(table[local, k]), 0))

    result = []
    for index, group in enumerate(symmetry.groups):
        units = structure.types[index]
        table = structure.sign_table[index]
        free = tuple(
            k
            for k in range(table.shape[1])
            if np.all(first[table[:, k]] == units) and np.all(last[table[:, k]] == units)
        )
        numbers = group.cells.numpy()
        cells = tuple(np.flatnonzero(numbers == cell) for cell in np.unique(numbers))
        shared = tuple(
            k
            for k in range(table.shape[1])
            if k not in free and all(belongs(table[cell, k], units[cell]) for cell in cells)
        )
        known = free + shared
        slices: dict[Pattern, list[Slices]] = {}
        axes_of: dict[str, set[int]] = {}
        offset = {(site.tensor, site.axes): site.offset for site in structure.sites}
        for occurrence in group.occurrences:
            if not occurrence.is_parameter:
                continue
            axes_of.setdefault(occurrence.tensor, set()).add(occurrence.axis)
            start = offset.get((occurrence.tensor, (occurrence.axis,)))
            positions = occurrence.positions
            by_pattern: dict[Pattern, list[int]] = {}
            for column in range(positions.shape[1]):
                place = -1 if start is None else start + int(positions[0, column])
                pattern = () if place < 0 or group.dense else own_pattern(place, table, 0, known)
                by_pattern.setdefault(pattern, []).append(column)
            length = symmetry.layout[occurrence.tensor][0][occurrence.axis] if start is not None else 1
            for pattern, columns in by_pattern.items():
                flat = positions[:, columns].reshape(-1)
                whole = flat.numel() == length and torch.equal(flat, torch.arange(length))
                slices.setdefault(pattern, []).append(
                    Slices(occurrence.tensor, occurrence.axis, None if whole else flat)
                )
        joints = []
        for site in joint_sites:
            axes = axes_of.setdefault(site.tensor, set())
            if site.shape[1] == 1 or not np.any(type_at[site.offset : site.offset + site.size] == index):
                if not axes:
                    del axes_of[site.tensor]
                continue
            axes.add(1)
            order = np.argsort(site.unit, axis=1, kind="stable")
            held = np.take_along_axis(site.unit, order, axis=1)
            for members in np.unique(held, axis=0):
                if not np.all(type_of_unit[members] == index):
                    continue
                reading = np.flatnonzero((held == members).all(1))
                local = np.searchsorted(units, members)
                corner = site.offset + int(reading[0]) * site.shape[1] + int(order[reading[0], 0])
                acting = () if group.dense else own_pattern(corner, table, int(local[0]), known)
                joints.append(Joint(site.tensor, reading, order[reading], local, acting))
        result.append(
            Group(
                index=index,
                units=units,
                cells=cells,
                movable=group.movable,
                dense=group.dense,
                free=free,
                shared=shared,
                slices={pattern: tuple(parts) for pattern, parts in slices.items()},
                joints=tuple(joints),
                tensors=frozenset(axes_of),
                quadratic=any(len(axes) > 1 for axes in axes_of.values()),
            )
        )
    return result


class Gain:
    """How much is won where a unit of B takes the place of a unit of A; the best signs are taken.

    With the gains M_p over the positions on which the generators p act, the signs s win
    sum_p (prod_{k in p} s_k) M_p. A generator that never meets another adds |M_k|; those that meet are tried in all
    combinations, the others given them. Generators that a whole cell shares are tried in all combinations, too: each of
    the `cases` holds signs of these, and the gain given them.
    """

    def __init__(self, parts: dict[Pattern, Tensor], signs: bool, shared: tuple[int, ...] = ()) -> None:
        if not signs:
            parts = _folded(parts, dict.fromkeys({k for pattern in parts for k in pattern}, 1.0))
        self.shared = tuple(k for k in shared if any(k in pattern for pattern in parts))
        if len(self.shared) > _MOST_JOINT_SIGNS:
            parts = _folded(parts, dict.fromkeys(self.shared, 1.0))
            self.shared = ()
        self.cases: list[tuple[dict[int, float], Gain]] = []
        if self.shared:
            for values in itertools.product((1.0, -1.0), repeat=len(self.shared)):
                given = dict(zip(self.shared, values, strict=True))
                self.cases.append((given, Gain(_folded(parts, given), signs)))
        else:
            self.cases.append(({}, self))
        met = sorted({k for pattern in parts if len(pattern) > 1 for k in pattern})
        self.exact = len(met) <= _MOST_JOINT_SIGNS
        if not self.exact:
            met = []
        self.parts = parts
        self.met = met
        self.signed = signs and any(parts)  # any pattern that is not empty

    def _split(self) -> tuple[list[tuple[Pattern, Tensor]], dict[int, Tensor]]:
        joint, single = [], {}
        for pattern, part in self.parts.items():
            if len(pattern) == 1 and pattern[0] not in self.met:
                single[pattern[0]] = part
            else:
                joint.append((pattern if self.exact else (), part))
        return joint, single

    def total(self) -> Tensor:
        """Return the gain of each pair. Shape (size, size)."""
        joint, single = self._split()
        best: Tensor | None = None
        value: Tensor | None
        for signs in itertools.product((1.0, -1.0), repeat=len(self.met)) if joint else ():
            of = dict(zip(self.met, signs, strict=True))
            value = None
            for pattern, part in joint:
                term = -part if math.prod(of[k] for k in pattern) < 0 else part
                value = term if value is None else value + term
            assert value is not None
            best = value if best is None else torch.maximum(best, value)
        for part in single.values():
            best = part.abs() if best is None else best + part.abs()
        assert best is not None
        return best

    def signs_at(self, rows: Ints, columns: Ints) -> dict[int, Floats]:
        """Return the best signs of pairs, by generator."""
        joint, single = self._split()
        at = torch.from_numpy(rows), torch.from_numpy(columns)

        def values(part: Tensor) -> Floats:
            return np.asarray(part.cpu()[at].double().numpy())

        result = {k: np.where(values(part) < 0, -1.0, 1.0) for k, part in single.items()}
        if self.met:
            options = list(itertools.product((1.0, -1.0), repeat=len(self.met)))
            held = [(pattern, values(part)) for pattern, part in joint]
            table = np.zeros((len(options), len(rows)))
            for number, option in enumerate(options):
                of = dict(zip(self.met, option, strict=True))
                for pattern, value in held:
                    table[number] += math.prod(of[k] for k in pattern) * value
            chosen = np.array(options)[table.argmax(0)]
            result |= {k: chosen[:, i] for i, k in enumerate(self.met)}
        return result


def _folded(parts: Mapping[Pattern, Tensor], given: Mapping[int, float]) -> dict[Pattern, Tensor]:
    """Put the given signs into gains."""
    result: dict[Pattern, Tensor] = {}
    for pattern, part in parts.items():
        left = tuple(k for k in pattern if k not in given)
        value = -part if math.prod(given[k] for k in pattern if k in given) < 0 else part
        result[left] = result[left] + value if left in result else value
    return result


@dataclass
class Chosen:
    """Which unit of a group comes to each place, and with which signs, by the column of the table of signs."""

    source: Ints
    signs: dict[int, Floats]

    @property
    def moves(self) -> bool:
        return not np.array_equal(self.source, np.arange(len(self.source))) or any(
            bool((sign < 0).any()) for sign in self.signs.values()
        )


class Tables:
    """The gains of a group on the CPU, in float64, one table for each case of shared signs."""

    def __init__(self, gain: Gain) -> None:
        self.gain = gain
        self.tables = [case.total().double().cpu().numpy() for _, case in gain.cases]

    def best(self, rows: Ints, columns: Ints) -> tuple[float, int, Ints]:
        """Return the best assignment's gain, its case of shared signs, and each row's place among the columns."""
        best = (-math.inf, 0, np.arange(len(rows)))
        for number, table in enumerate(self.tables):
            part = table[np.ix_(rows, columns)]
            chosen = best_assignment(part)
            value = float(part[np.arange(len(rows)), chosen].sum())
            if value > best[0]:
                best = value, number, chosen
        return best

    def put(self, chosen: Chosen, rows: Ints, columns: Ints) -> None:
        """Assign some columns to some rows in the best way."""
        _, number, own = self.best(rows, columns)
        chosen.source[rows] = columns[own]
        self.set_signs(chosen, rows, number)

    def set_signs(self, chosen: Chosen, rows: Ints, number: int) -> None:
        if not self.gain.signed:
            return
        given, case = self.gain.cases[number]
        signs = {k: np.full(len(rows), sign) for k, sign in given.items()}
        signs |= case.signs_at(rows, chosen.source[rows])
        for k, sign in signs.items():
            chosen.signs.setdefault(k, np.ones(len(chosen.source)))[rows] = sign


def best_assignment(gain: Floats) -> Ints:
    """Return for each row its column; rows keep their own where that is as good."""
    rows, columns = linear_sum_assignment(gain, maximize=True)
    own = np.arange(len(gain))
    if gain[rows, columns].sum() <= gain[own, own].sum():
        return own
    return np.asarray(columns, dtype=np.int64)


def within_cells(group: Group, tables: Tables) -> Chosen:
    chosen = Chosen(np.arange(len(group.units)), {})
    for cell in group.cells:
        if group.movable:
            tables.put(chosen, cell, cell)
        else:
            diagonal = [float(table[cell, cell].sum()) for table in tables.tables]
            tables.set_signs(chosen, cell, int(np.argmax(diagonal)))
    return chosen

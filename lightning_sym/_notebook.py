"""Results as tables of pandas, and as HTML in a notebook."""

import html
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_sym._text import without_wrappers

if TYPE_CHECKING:
    import pandas as pd

_MOST = 30  # rows of a table in a notebook


class Tabular:
    """Base of results that consist of rows: :meth:`to_pandas`, and a table in notebooks."""

    @abstractmethod
    def titled_rows(self) -> tuple[str, Sequence[Mapping[str, Any]]]:
        """Return a title and the rows; all with the same columns, in the same order."""

    def to_pandas(self) -> "pd.DataFrame":
        """Return the rows as a table of pandas; its ``attrs`` have the title.

        Raises:
            ImportError: If pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_pandas needs pandas, which is not installed: pip install pandas.") from error
        title, rows = self.titled_rows()
        frame = pd.DataFrame(list(rows))
        frame.attrs["title"] = title
        return frame

    def _repr_html_(self) -> str:
        return html_table(*self.titled_rows())


def html_table(title: str, rows: Sequence[Mapping[str, Any]], units: Mapping[str, str] | None = None) -> str:
    """Return a table in HTML: numbers with four digits, of many rows the first 30.

    Args:
        title: Above the table.
        rows: All with the same columns.
        units: Units of columns, shown where the mouse rests on their names.
    """
    known = units or {}
    names = list(rows[0]) if rows else []
    head = "".join(
        f'<th title="{html.escape(known[name])}">{html.escape(name)}</th>'
        if name in known
        else f"<th>{html.escape(name)}</th>"
        for name in names
    )
    body = "".join(f"<tr>{''.join(map(_cell, row.values()))}</tr>" for row in rows[:_MOST])
    more = f"<p>The first {_MOST} of {len(rows)} rows.</p>" if len(rows) > _MOST else ""
    caption = f"<caption>{html.escape(title)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def python_number(value: Any) -> Any:
    """Return numbers of numpy and torch as those of Python, and other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def _cell(value: object) -> str:
    value = python_number(value)
    if isinstance(value, float):
        return f'<td style="text-align: right">{value:.4g}</td>'
    return f"<td>{'' if value is None else html.escape(without_wrappers(str(value)))}</td>"

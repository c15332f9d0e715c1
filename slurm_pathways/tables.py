"""Tables for people. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any


def table(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A title and indented columns under their names; those that no row has are left out."""
    columns = [column for column in columns if any(column in row for row in rows)]
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    ]
    return "\n".join([title, *lines])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    return "-" if value is None else str(value)

"""Rows for people: a table where the window is wide enough, else a block for each row. Nothing is ever cut."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

Cell = str | Text
_LAST_MIN = 28
"""Columns that the last cell of a row, which is prose, needs to be readable when it is folded."""
_FRAME = 3
"""Columns between two cells; one more for the edge."""


def print_rows(console: Console, names: Sequence[str], rows: Sequence[Sequence[Cell]], head: int = 2) -> None:
    """Prints `rows` under `names`. Cells are shown as they are: what workers and users write is no markup.

    Where the table does not fit the window, the first `head` cells of each row make a line, and each of the others that
    is not empty a line of its own behind its name.
    """
    if not rows:
        return
    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    if _needed(names, cells) <= console.width:
        _print_table(console, names, cells)
    else:
        _print_blocks(console, names, cells, head)


def _needed(names: Sequence[str], rows: Sequence[Sequence[Text]]) -> int:
    widths = [max(cell_len(name), *(_width(row[number]) for row in rows)) for number, name in enumerate(names)]
    last = min(widths[-1], max(_LAST_MIN, cell_len(names[-1])))
    return sum(widths[:-1]) + last + _FRAME * len(names) + 1


def _width(text: Text) -> int:
    return max(map(cell_len, text.plain.splitlines()), default=0)


def _print_table(console: Console, names: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    table = Table()
    for number, name in enumerate(names):
        table.add_column(name, overflow="fold", no_wrap=number < len(names) - 1)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _print_blocks(console: Console, names: Sequence[str], rows: Sequence[Sequence[Text]], head: int) -> None:
    width = max((cell_len(name) for name in names[head:]), default=0)
    for row in rows:
        console.print(Text("  ").join(cell for cell in row[:head] if cell.plain), soft_wrap=True)
        for name, cell in zip(names[head:], row[head:], strict=True):
            if cell.plain:
                console.print(Text(f"    {name:<{width}}  ").append_text(cell), soft_wrap=True)

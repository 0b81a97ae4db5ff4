"""Tables, names and links as Markdown."""

import re
from urllib.parse import quote

Rows = tuple[list[str], list[list[str]]]  # a table: its header and its rows


def markdown_table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Returns a table as Markdown lines, aligned for people."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in [header, *rows]
    ]
    return [lines[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *lines[1:]]


def escaped(text: str) -> str:
    """Returns ``text`` in one line, all of it shown and none of it understood."""
    return re.sub(r"([\\`*\[\]<>|&~$!#]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """Returns ``text`` as code in one line, also for a cell of a table."""
    line = " ".join(text.split()).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if len(fence) > 1 else f"`{line}`"


def linked(text: str, target: str) -> str:
    """Returns ``text`` with a link to ``target``, an address of the web or a file beside."""
    kept = "/:?#@!$&'*+,;=%" if "://" in target else ""
    return f"[{escaped(text)}]({quote(target, safe=kept)})"

"""What the commands print: tables and facts for people, JSON for programs."""

import json
from pathlib import Path
from typing import Any


def print_table(content: dict[str, Any], output: Path) -> None:
    from tasks.report import table

    print("\n" + "\n".join(table(content)) + f"\n\nreport, plots and checkpoints: {output}")


def print_facts(facts: dict[str, Any], *, as_json: bool) -> None:
    """Prints ``facts`` as one JSON object, or line by line for people."""
    if as_json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            print(name)
            for inner, number in value.items():
                print(f"  {inner:32} {number:,.2f}" if isinstance(number, float) else f"  {inner:32} {number}")
        elif isinstance(value, list):
            for row in value:
                print(
                    "  "
                    + "  ".join(
                        f"{key} {item:,.4g}" if isinstance(item, float) else f"{key} {item}"
                        for key, item in row.items()
                    )
                )
        else:
            print(f"{name:34} {value}")

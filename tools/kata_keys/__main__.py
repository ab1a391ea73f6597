"""Print kata/keys.json: python -m tools.kata_keys GIT_DIRECTORY > kata/keys.json."""

from __future__ import annotations

import argparse
import json

from tools.kata_keys.repository import Repository
from tools.kata_keys.table import make_table

OLDEST = (3, 2, 0)


def main() -> None:
    """Read the release tags, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.kata_keys", description=__doc__)
    parser.add_argument(
        "directory", help="git directory of kata-containers/kata-containers, with its tags"
    )
    print(written(make_table(Repository(parser.parse_args().directory), OLDEST)), end="")


def written(table: dict[str, object]) -> str:
    """The table as text, a row a line."""
    parts = []
    for name, value in table.items():
        rows = value if isinstance(value, list) and value and isinstance(value[0], dict) else None
        shown = json.dumps(value) if rows is None else _lines(rows)
        parts.append(f' "{name}": {shown}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(rows: list[dict[str, object]]) -> str:
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"


if __name__ == "__main__":
    main()

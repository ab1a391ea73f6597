"""Print kata/keys.json, or src/vfiomgr/kata/passed.toml with --passed."""

from __future__ import annotations

import argparse
import json

from tools.kata_keys.passed import write_passed
from tools.kata_keys.repository import Repository
from tools.kata_keys.table import make_table

OLDEST = (3, 2, 0)


def main() -> None:
    """Read the release tags, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tools.kata_keys", description=__doc__)
    parser.add_argument(
        "directory", help="git directory of kata-containers/kata-containers, with its tags"
    )
    parser.add_argument("--passed", action="store_true", help="which functions reach the guest")
    options = parser.parse_args()
    repository = Repository(options.directory)
    text = write_passed(repository, OLDEST) if options.passed else ""
    print(text or written(make_table(repository, OLDEST)), end="")


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

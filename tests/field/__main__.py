"""Runs the corpus: `python -m tests.field` prints the table, with paths also all answers."""

from __future__ import annotations

import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests.field.answers import Result, run
from tests.field.situation import CORPUS, VERDICTS, corpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def run_all() -> list[Result]:
    """The results of the corpus, with one process on each processor."""
    paths = corpus()
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        return list(processes.map(run, paths, chunksize=4))


def table(results: Iterable[Result], name_of: Callable[[Result], str], title: str) -> str:
    """Rows of counts by name, those with most to mend first."""
    counts: dict[str, Counter[str]] = {}
    for result in results:
        counts.setdefault(name_of(result), Counter())[result.judgement.verdict] += 1
    width = max(len(title), *map(len, counts))
    rows = [f"{title:{width}}  " + "  ".join(f"{verdict:>6}" for verdict in VERDICTS)]
    for name in sorted(counts, key=lambda n: (counts[n]["right"] - counts[n].total(), n)):
        numbers = "  ".join(f"{counts[name][verdict] or '':>6}" for verdict in VERDICTS)
        rows.append(f"{name:{width}}  {numbers}")
    return "\n".join(rows)


def changed(result: Result) -> str | None:
    """How the verdict differs from the one in the file; None if it does not."""
    verdict, expected = result.judgement.verdict, result.situation.verdict
    if verdict == expected:
        return None
    details = "; ".join((*result.judgement.misleading, *result.judgement.missing))
    name = result.path.relative_to(CORPUS)
    return f"{name}: {verdict}, the file says {expected}" + (f" ({details})" if details else "")


def _show(result: Result) -> None:
    print(f"#### {result.path}\n")
    for answer in result.answers:
        print(f"$ vfiomgr {answer.command}\n{answer.text}[{answer.status}]\n")
    judgement = result.judgement
    print(f"=> {judgement.verdict}, the file says {result.situation.verdict}")
    for fact in judgement.missing:
        print(f"   missing: {fact}")
    for fact in judgement.misleading:
        print(f"   misleading: {fact}")


def main(names: list[str]) -> int:
    """Print the table of the corpus, or the answers about the named files."""
    if names:
        for name in names:
            _show(run(Path(name)))
        return 0
    results = run_all()
    print(table(results, lambda result: result.situation.kind, "kind"), end="\n\n")
    print(table(results, lambda result: result.situation.category, "category"), end="\n\n")
    print(table(results, lambda _: "all", "total"))
    differences = list(filter(None, map(changed, results)))
    print("\n".join(["", *differences]) if differences else "\nall verdicts are as in the files")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Checks what the modules of vfiomgr import from each other: python -m tools.imports.

Prints the largest knot, which is the most modules that all import each other directly or
indirectly, and the upward imports, which are those against the order of packages in imports.toml.
Fails if either is above its limit there. Imports that only types need, imports in functions and
`import_module` with the name of a module count like any other.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    Graph = Mapping[str, frozenset[str]]
    """The modules that each module imports."""

_TOOLS = Path(__file__).resolve().parents[1]
SOURCE = _TOOLS.parent / "src" / "vfiomgr"
SETTINGS = _TOOLS / "imports.toml"


class Limits(NamedTuple):
    """What imports.toml says about the imports between packages."""

    layers: Mapping[str, int]
    """The layer of each package and each module beside them; the highest number is at the top."""
    largest_knot: int
    upward_imports: int
    upward: Mapping[str, str]
    """The reason for each upward import, `IMPORTER -> IMPORTED`."""


def read_limits(file: Path) -> Limits:
    """The limits of a file like imports.toml."""
    settings: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["vfiomgr"]
    layers = {
        name.strip(): number
        for number, names in enumerate(reversed(settings["layers"]))
        for name in names.split("|")
    }
    return Limits(layers, settings["largest_knot"], settings["upward_imports"], settings["upward"])


def read_imports(source: Path) -> Graph:
    """The imports between the modules of a package, which is the directory `source`."""
    trees = {_module_name(file, source): _parsed(file) for file in sorted(source.rglob("*.py"))}
    exported = {name: dict(_re_exports(tree, trees.keys())) for name, tree in trees.items()}
    return {
        name: frozenset(_imported(tree, exported, source.name)) - {name}
        for name, tree in trees.items()
    }


def _module_name(file: Path, source: Path) -> str:
    names = [source.name, *file.relative_to(source).with_suffix("").parts]
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _re_exports(tree: ast.Module, modules: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The names that a module imports from others, with the modules that define them."""
    known = frozenset(modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in known:
            yield from ((alias.asname or alias.name, str(node.module)) for alias in node.names)


def _imported(
    tree: ast.Module, exported: Mapping[str, Mapping[str, str]], root: str
) -> Iterator[str]:
    """The modules that a module imports.

    `from PACKAGE import MODULE` imports both. Of the names of the root package, which imports
    nothing itself, those that it re-exports are imported from the modules that define them.
    """
    for module, name in _names(tree):
        if module not in exported:
            continue
        if (below := f"{module}.{name}") in exported:
            yield below
        if module != root:
            yield module
        elif name in exported[root] and below not in exported:
            yield exported[root][name]


def _names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each module that is named, and the name that is imported or taken from it."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from ((alias.name, "") for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0):
                yield from ((module, alias.name) for alias in node.names)
            case ast.Call(
                func=ast.Name("import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(str(module))],
            ):
                yield module, ""
            case ast.Attribute(value=ast.Name(name), attr=attribute):
                yield name, attribute


def largest_knot(graph: Graph) -> tuple[str, ...]:
    """The largest set of modules of which each imports each other one, directly or indirectly."""
    found = max(_components(graph), key=len, default=frozenset())
    return tuple(sorted(found)) if len(found) > 1 else ()


def _components(graph: Graph) -> Iterator[frozenset[str]]:
    """The strongly connected components (Kosaraju and Sharir)."""
    order: list[str] = []
    seen: set[str] = set()
    for start in graph:
        order += _reached(graph, start, seen)
    importers = _reversed(graph)
    seen = set()
    for start in reversed(order):
        if found := _reached(importers, start, seen):
            yield frozenset(found)


def _reached(graph: Graph, start: str, seen: set[str]) -> list[str]:
    """What can be reached from a module and was not seen before; a module comes after its own."""
    if start in seen:
        return []
    seen.add(start)
    found: list[str] = []
    path = [(start, iter(sorted(graph[start])))]
    while path:
        module, following = path[-1]
        for each in following:
            if each not in seen:
                seen.add(each)
                path.append((each, iter(sorted(graph[each]))))
                break
        else:
            path.pop()
            found.append(module)
    return found


def _reversed(graph: Graph) -> Graph:
    importers: dict[str, set[str]] = {name: set() for name in graph}
    for name, imported in graph.items():
        for each in imported:
            importers[each].add(name)
    return {name: frozenset(found) for name, found in importers.items()}


def upward_imports(graph: Graph, layers: Mapping[str, int]) -> list[tuple[str, str]]:
    """The imports of modules of a package that is not below the importer's."""
    numbers = {**layers, "": len(layers)}  # the root package is above all
    return sorted(
        (name, each)
        for name, imported in graph.items()
        for each in imported
        if _package(name) != _package(each)
        if numbers[_package(each)] >= numbers[_package(name)]
    )


def _package(module: str) -> str:
    """The package, or the module beside the packages; empty for the root package itself."""
    return module.split(".")[1] if "." in module else ""


def unlisted(graph: Graph, layers: Mapping[str, int]) -> list[str]:
    """Packages that have no layer, and layers without a package."""
    return sorted({*map(_package, graph), *layers} - {""} - ({*map(_package, graph)} & {*layers}))


def _report(knot: Sequence[str], upward: Sequence[tuple[str, str]], limits: Limits) -> list[str]:
    pairs = Counter((_package(name), _package(each)) for name, each in upward)
    present = {f"{name} -> {each}" for name, each in upward}
    return [
        f"largest knot: {len(knot)} modules (at most {limits.largest_knot})",
        *(f"  {name}" for name in knot),
        f"upward imports: {len(upward)} (at most {limits.upward_imports})",
        *(f"  {count:3}  {name} -> {each}" for (name, each), count in pairs.most_common()),
        *(f"not in upward, with a reason: {name}" for name in sorted(present - {*limits.upward})),
        *(f"in upward, but not imported: {name}" for name in sorted({*limits.upward} - present)),
    ]


def main(source: Path = SOURCE, settings: Path = SETTINGS) -> int:
    """Print the knot and the upward imports; 1 if there are too many."""
    limits, graph = read_limits(settings), read_imports(source)
    if missing := unlisted(graph, limits.layers):
        print(f"not in layers, or not in {source.name}: {', '.join(missing)}")
        return 1
    knot, upward = largest_knot(graph), upward_imports(graph, limits.layers)
    print(*_report(knot, upward, limits), sep="\n")
    is_named = {f"{name} -> {each}" for name, each in upward} == {*limits.upward}
    is_small = len(knot) <= limits.largest_knot and len(upward) <= limits.upward_imports
    return int(not (is_named and is_small))


if __name__ == "__main__":
    sys.exit(main())

"""Text files of a host that may be large, absent, unreadable or linked from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_LIMIT = 8 << 20
"""Characters; /proc/interrupts of a host with 512 CPUs is smaller."""
_ACCOUNT_FIELDS = 3


def text_of(tree: HostTree, place: str) -> str | None:
    """The start of a text file; None if it cannot be read."""
    return tree.read_text(HostPath(place), _LIMIT)


def configuration_files(tree: HostTree, directories: Iterable[str]) -> list[str]:
    """The `*.conf` files of some directories, by name; earlier directories take precedence.

    This is the rule of modprobe.d(5) and systemd.unit(5).
    """
    found: dict[str, str] = {}
    for directory in directories:
        for name in tree.children(HostPath(directory)):
            if name.endswith(".conf"):
                found.setdefault(name, f"{directory}/{name}")
    return [found[name] for name in sorted(found)]


def settings_of(tree: HostTree, place: str) -> Iterator[str]:
    """The lines of a configuration file without comments; a trailing backslash joins two."""
    text = (text_of(tree, place) or "").replace("\\\n", " ")
    for line in text.splitlines():
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield stripped


def exists(tree: HostTree, place: str) -> bool:
    """Whether a file exists, as far as visible."""
    return tree.exists(HostPath(place))


def account_names(tree: HostTree) -> tuple[dict[int, str], dict[int, str]]:
    """Names of the host's users and groups, by number (passwd(5), group(5))."""
    users, groups = (_names(tree, place) for place in ("/etc/passwd", "/etc/group"))
    return users, groups


def _names(tree: HostTree, place: str) -> dict[int, str]:
    rows = (line.split(":") for line in (text_of(tree, place) or "").splitlines())
    return {
        int(row[2]): row[0] for row in rows if len(row) >= _ACCOUNT_FIELDS and row[2].isdecimal()
    }

"""What a release of containerd cannot do with its configuration, or does unexpectedly."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from vfiomgr.adapters.runtimes import values
from vfiomgr.errors import Refusal
from vfiomgr.model.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.model.runtime import Key, RuntimeFacts, Wish

_TAKES_SHIMS = Version(1, 6)
_FIRST, _LAST = Version(2, 0), Version(2, 3)
"""From one release on, and before another, settings of the image store depend on the runtimes."""
_DORMANT = {
    "snapshotter": "overlayfs",
    "disable_snapshot_annotations": True,
    "discard_unpacked_layers": False,
}
"""Settings beside the runtimes that belong to the image store since 2.0, with their defaults."""


def refuse_missing(facts: RuntimeFacts) -> None:
    """Make sure that every file that is imported by its name exists.

    Before 2.0 `config dump` fails without it, since 2.0 it stops reading there, without a word.

    Raises:
        Refusal: one does not.

    """
    for one in facts.missing:
        message = f"cannot read {one.path}: {one.importer} imports it, and it does not exist"
        hint = f"create it, or remove it from imports in {one.importer}"
        raise Refusal(message, f"{hint}: containerd does not start without it")


def refuse_old(facts: RuntimeFacts, wish: Wish) -> None:
    """Make sure that containerd takes the path of a shim (runtime_path, since 1.6).

    Raises:
        Refusal: it is older.

    """
    if wish.is_kata and facts.version is not None and facts.version < _TAKES_SHIMS:
        message = f"cannot add {wish.subject}: it needs containerd 1.6, and this is {facts.version}"
        raise Refusal(message, "install containerd 1.6 or later")


def refuse_unsure(facts: RuntimeFacts) -> None:
    """Make sure that the files that a containerd imports are known.

    Raises:
        Refusal: that depends on its release, which is not known to the third number.

    """
    if facts.unsure:
        message = (
            f"cannot tell which files {facts.main.path} imports: "
            f"{', '.join(facts.unsure)} is relative to the working directory up to containerd "
            "1.6.28 and 1.7.15, and to that file in later releases"
        )
        raise Refusal(message, "pass the release in full, e.g. --containerd-version 1.7.24")


def refuse_dormant(
    facts: RuntimeFacts, files: Iterable[tuple[str, values.Data]], key: Key, wish: Wish
) -> None:
    """Make sure that no setting of the image store takes effect because of an entry.

    Releases 2.0 to 2.2 ignore these settings of a configuration of version 2 that has no table of
    runtimes (migrateConfig in plugins/cri/images/plugin.go). `key` is the table that has both.

    Raises:
        Refusal: one would.

    """
    if facts.version is None or not _FIRST <= facts.version < _LAST:
        return
    tables = [(path, values.found(data, key)) for path, data in files]
    told = [(path, table) for path, table in tables if isinstance(table, dict)]
    if any("runtimes" in table for _, table in told):
        return
    for path, table in told:
        for name, default in _DORMANT.items():
            if table.get(name, default) != default:
                setting = f"{name} = {json.dumps(table[name])}"
                raise _dormant(setting, name, path, facts, wish)


def _dormant(setting: str, name: str, path: str, facts: RuntimeFacts, wish: Wish) -> Refusal:
    message = (
        f"cannot add {wish.subject}: containerd {facts.version} ignores {setting} in {path} while "
        "no runtime is configured there, and would apply it with this entry"
    )
    hint = (
        f"to keep {json.dumps(_DORMANT[name])}, remove {name} from {path}; to apply the setting, "
        "add an entry for runc there; then run the command again"
    )
    return Refusal(message, hint)

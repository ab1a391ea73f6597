"""How long Kata waits for a container: in which key of a release it stands, and in which unit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vfiomgr.model.kata import KataRelease, RuntimeName
    from vfiomgr.model.kata_keys import KeyTable
    from vfiomgr.model.kata_settings import KataSettings

_KEY, _OLD_KEY = "create_container_timeout", "request_timeout_ms"
_DEFAULTS: dict[RuntimeName, float] = {"go": 60.0, "rs": 30.0}
"""Seconds where the key is not set (defaultRequestTimeout in
src/runtime/virtcontainers/kata_agent.go, default_request_timeout in
src/libs/kata-types/src/config/agent.rs)."""


def container_timeout_key(table: KeyTable, release: KataRelease) -> tuple[str, str]:
    """The section and the key of it."""
    if release.runtime == "go":
        return "runtime", _KEY
    return "agent", _KEY if table.knows(release, "agent", _KEY) else _OLD_KEY


def container_timeout(
    table: KeyTable, release: KataRelease, settings: KataSettings
) -> tuple[str, float]:
    """The key, and the seconds that a release waits with these settings."""
    section, key = container_timeout_key(table, release)
    found = settings.number("agent.kata" if section == "agent" else section, key)
    if found is None or not table.knows(release, section, key):
        return key, _DEFAULTS[release.runtime]
    return key, found / table.per_second(release, section, key)

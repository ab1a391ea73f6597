"""How long each release of Kata waits for a container."""

from __future__ import annotations

import pytest

from vfiomgr.kata.check import container_timeout
from vfiomgr.kata.facts import read_settings
from vfiomgr.kata.model import KataRelease
from vfiomgr.paths import HostPath
from vfiomgr.units import Version

NEW, OLD = "create_container_timeout", "request_timeout_ms"


@pytest.mark.parametrize(
    ("release", "text", "key", "seconds"),
    [
        ("rs 3.18", f"[agent.kata]\n{OLD} = 90000", OLD, 90),
        ("rs 3.18", f"[agent.kata]\n{NEW} = 90000", OLD, 30),
        ("rs 3.20", f"[agent.kata]\n{NEW} = 90000", NEW, 90),
        ("rs 3.21", f"[agent.kata]\n{NEW} = 90", NEW, 90),
        ("rs 4.1", f"[agent.kata]\n{OLD} = 90000", NEW, 30),
        ("go 3.3", f"[runtime]\n{NEW} = 90", NEW, 60),
        ("go 3.4", f"[runtime]\n{NEW} = 90", NEW, 90),
        ("go 4.1", "", NEW, 60),
    ],
)
def test_the_key_and_the_unit_are_those_of_the_release(
    release: str, text: str, key: str, seconds: float
) -> None:
    runtime, version = release.split()
    kata = KataRelease(Version.parse(version), "rs" if runtime == "rs" else "go")
    settings = read_settings(HostPath("/x.toml"), text)
    assert container_timeout(kata, settings) == (key, seconds)

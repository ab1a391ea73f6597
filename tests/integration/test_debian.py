"""Programs of other releases come from Debian, signed, and leave the machine as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import debian
from tests.integration.programs import ask
from tests.lab.errors import BuildError
from tests.lab.kernel import cache_root

if TYPE_CHECKING:
    from pathlib import Path

    from tests.debian import Program


def test_containerd_runs_with_the_libraries_of_its_release(containerd: Program) -> None:
    answer = ask(containerd, "--version")
    assert answer.status == 0, answer.error
    assert containerd.version.partition("+")[0] in answer.output.replace("~ds1 ", "~ds1+")
    is_own = containerd.command[0].startswith(str(cache_root()))
    assert is_own == (containerd.release != "installed")


def test_a_mirror_that_debian_did_not_sign_is_refused(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    (mirror / "dists/trixie").mkdir(parents=True)
    (mirror / "dists/trixie/Release").write_text(
        "Origin: Debian\nSuite: trixie\nCodename: trixie\nComponents: main\n"
        "Architectures: amd64\nMD5Sum:\nSHA256:\n"
    )
    apt = debian.Apt(tmp_path / "apt", "trixie", f"file://{mirror}")
    with pytest.raises(BuildError, match="not signed"):
        apt.download("containerd")


def test_a_package_that_no_mirror_has_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VFIOMGR_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(debian, "mirrors", lambda: [f"file://{tmp_path}/none"])
    with pytest.raises(BuildError, match="none"):
        debian.program("trixie", "containerd", "usr/bin/containerd")
    assert not list(tmp_path.glob("debian/trixie/[!.]*"))


def test_mirrors_are_those_of_this_machine_and_debians() -> None:
    mirrors = debian.mirrors()
    assert mirrors[-1].endswith("/debian")
    assert not [mirror for mirror in mirrors if "security" in mirror]

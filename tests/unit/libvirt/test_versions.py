"""`--libvirt-version` and `--qemu-version`: XML for another host, or for another QEMU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import Run

GPU = "0000:01:00.0"
GUEST = ("libvirt", "domain", "win", "--memory", "4G")
TDX = (*GUEST, "--vcpus", "2", "--device", GPU, "--launch-security", "tdx")
MANY = (*GUEST, "--vcpus", "1025", "--numa", "off", "--device", GPU)
ATS = (*GUEST, "--vcpus", "2", "--device", f"{GPU},ats=on")
IOMMUFD = (*GUEST, "--vcpus", "2", "--device", GPU, "--iommufd")
HOSTDEV = ("libvirt", "hostdev", GPU, "--iommufd")
UNKNOWN = "the version of QEMU is unknown: what depends on it is not checked (set --qemu-version)"


@pytest.mark.parametrize(
    ("words", "older", "message", "newer"),
    [
        (TDX, "10.0", "QEMU 10.0.0 does not start guests with tdx and host devices", "10.1"),
        (MANY, "8.2", "1025 CPUs are too many: q35 of QEMU 8.2.0 supports 1024", "9.0"),
        (ATS, "11.0", f"ats of {GPU} needs QEMU 11.1.0 or later; this is 11.0.0", "11.1"),
        (IOMMUFD, "8.2", "needs QEMU 9.0.0 or later; this is 8.2.0", "9.0"),
        (HOSTDEV, "8.2", "needs QEMU 9.0.0 or later; this is 8.2.0", "9.0"),
    ],
)
def test_the_given_qemu_decides_for_another_host(
    run: Run, words: tuple[str, ...], older: str, message: str, newer: str
) -> None:
    elsewhere = (*words, "--libvirt-version", "12.8")
    refused = run(*elsewhere, "--qemu-version", older)
    assert (refused.status, refused.stdout) == (4, "")
    assert message in refused.stderr
    made = run(*elsewhere, "--qemu-version", newer)
    assert (made.status, UNKNOWN in made.stderr) == (0, False)
    unknown = run(*elsewhere)
    assert (unknown.status, unknown.stdout) == (0, made.stdout)
    assert unknown.stderr.count(UNKNOWN) == 1


def test_a_file_gets_devices_for_the_given_qemu(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "guest.xml"
    file.write_text("<domain><name>g</name><devices/></domain>")
    words = ("libvirt", "edit", str(file), "--add", GPU, "--iommufd", "--dry-run")
    refused = run(*words, "--libvirt-version", "12.8", "--qemu-version", "8.2")
    assert "needs QEMU 9.0.0 or later; this is 8.2.0" in refused.stderr
    assert run(*words, "--libvirt-version", "12.8", "--qemu-version", "9.0").status == 0


@pytest.mark.parametrize("version", ["ten", "", "11"])
@pytest.mark.parametrize("words", [("libvirt", "hostdev", GPU), (*IOMMUFD,)])
@pytest.mark.parametrize(
    ("option", "example"), [("--libvirt-version", "12.8"), ("--qemu-version", "11.1")]
)
def test_a_version_that_is_none_is_refused_with_its_option_and_an_example(
    run: Run, version: str, words: tuple[str, ...], option: str, example: str
) -> None:
    others = {"--libvirt-version": "12.8", "--qemu-version": "11.1"}
    given = [word for pair in {**others, option: version}.items() for word in pair]
    answer = run(*words, *given)
    assert answer.status == 2
    assert f"invalid {option}: {version!r} is not a version" in answer.stderr
    assert f"e.g. {option} {example}\n" in answer.stderr

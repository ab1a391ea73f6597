"""Which functions of an IOMMU group reach the guest, by release and runtime of Kata."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import pci_device
from tests.unit.kata.test_explain_releases import explained, found_by
from tests.unit.kata_nodes import CONFIGURATION, GROUP, KataNode
from vfiomgr.kata.model import KataRelease, RuntimeName
from vfiomgr.kata.passed import dropped, takes_group, takes_one_function
from vfiomgr.units import Version

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import Run

SWITCH, AUDIO, USB, GPU = "068000", "040300", "0c0330", "030200"
GROUP_NODE, CDEV = f"/dev/vfio/{GROUP}", "/dev/vfio/devices/vfio0"


def add(node: KataNode, class_code: str, vendor: str = "10de") -> None:
    """A second function in the group of the first GPU."""
    node.kernel.add_pci(
        "0000:41:00.2",
        vendor=vendor,
        device="22a3",
        class_code=class_code,
        group=GROUP,
        driver="vfio-pci",
        driver_override="vfio-pci",
    )


@pytest.mark.parametrize(
    ("version", "runtime", "lost"),
    [
        ("3.1", "go", ()),
        ("3.2", "go", (SWITCH,)),
        ("4.0.9", "go", (SWITCH,)),
        ("4.1", "go", ()),
        ("3.30", "rs", ()),
        ("3.31", "rs", ()),
        ("4.0", "rs", (SWITCH, AUDIO, USB)),
        ("4.1", "rs", (AUDIO,)),
    ],
)
def test_the_class_of_a_function_decides_by_release(
    version: str, runtime: RuntimeName, lost: tuple[str, ...]
) -> None:
    release = KataRelease(Version.parse(version), runtime)
    devices = [
        replace(pci_device(f"0000:51:00.{number}"), class_code=code)
        for number, code in enumerate((SWITCH, AUDIO, USB, GPU))
    ]
    assert tuple(d.class_code for d in dropped(release, devices, GROUP_NODE)) == lost
    is_group = takes_group(release, CDEV)
    assert tuple(d.class_code for d in dropped(release, devices, CDEV)) == (
        lost if is_group else ()
    )


@pytest.mark.parametrize(
    ("version", "runtime", "code", "broken"),
    [
        ("3.31", "go", SWITCH, "kata-function-dropped"),
        ("4.0", "rs", SWITCH, "kata-function-dropped"),
        ("4.1", "go", SWITCH, None),
        ("4.1", "rs", SWITCH, "kata-duplicate-function"),
        ("4.1", "rs", AUDIO, None),
        ("3.31", "go", USB, None),
        ("4.0", "rs", USB, None),
        ("3.31", "rs", USB, "kata-duplicate-function"),
        ("4.0", "go", AUDIO, None),
    ],
)
def test_a_pod_is_told_of_what_does_not_reach_it(  # noqa: PLR0913, PLR0917 - a case each
    run: Run, tmp_path: Path, version: str, runtime: RuntimeName, code: str, broken: str | None
) -> None:
    node = KataNode(tmp_path / "node", runtime)
    node.add_gpus()
    add(node, code)
    node.publish()
    found = found_by(explained(run, node, version))
    own = [name for name in found if name in {"kata-function-dropped", "kata-duplicate-function"}]
    assert own == ([broken] if broken else [])


@pytest.mark.parametrize(
    ("version", "runtime", "node", "is_limited"),
    [
        ("3.30", "rs", GROUP_NODE, False),
        ("3.31", "rs", CDEV, True),
        ("4.0", "rs", CDEV, True),
        ("4.1", "rs", GROUP_NODE, True),
        ("4.1", "rs", CDEV, False),
        ("4.1", "go", GROUP_NODE, False),
    ],
)
def test_runtime_rs_names_the_port_of_a_function_after_its_group(
    version: str, runtime: RuntimeName, node: str, *, is_limited: bool
) -> None:
    release = KataRelease(Version.parse(version), runtime)
    assert takes_one_function(release, node) == is_limited


def test_a_gpu_that_is_alone_in_its_group_is_passed(run: Run, tmp_path: Path) -> None:
    node = KataNode(tmp_path / "node", "rs")
    node.add_gpus()
    node.publish()
    found = found_by(explained(run, node, "3.31"))
    assert "kata-duplicate-function" not in found


@pytest.mark.parametrize(
    ("version", "runtime", "domain", "path", "words"),
    [
        ("4.0", "rs", 0x10000, GROUP_NODE, "fails with 'invalid BDF format'"),
        ("4.0", "rs", 1, GROUP_NODE, ""),
        ("3.20", "rs", 0x10000, GROUP_NODE, ""),
        ("4.0", "go", 0x10000, GROUP_NODE, ""),
        ("4.0", "go", 0x10000, CDEV, "assigns a wrong address"),
        ("4.0", "go", 1, CDEV, ""),
    ],
)
def test_a_domain_of_five_digits_is_not_read(  # noqa: PLR0913, PLR0917 - a case each
    run: Run,
    tmp_path: Path,
    version: str,
    runtime: RuntimeName,
    domain: int,
    path: str,
    words: str,
) -> None:
    node = KataNode(tmp_path / "node", runtime)
    node.add_gpus(domain=domain)
    node.publish(nodes=[path])
    line = ("--root", str(node.root), "check", "pod", str(node.pod), "--kata-version", version)
    answer = run(*line)
    assert ("of more than four digits" in answer.stdout) == bool(words)
    assert words in answer.stdout


@pytest.mark.parametrize(("version", "is_refused"), [("3.25", False), ("3.26", True)])
def test_groups_of_confidential_guests_are_refused_since_3_26(
    run: Run, tmp_path: Path, version: str, *, is_refused: bool
) -> None:
    node = KataNode(tmp_path / "node", "go")
    node.add_gpus()
    node.publish()
    node.change(CONFIGURATION, "machine_type", "confidential_guest = true\nmachine_type")
    found = found_by(explained(run, node, version))
    assert ("kata-confidential-group" in found) == is_refused
    assert ("kata-confidential-mappings" in found) != is_refused

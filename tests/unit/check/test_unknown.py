"""What decides whether a host is ready and could not be read is unknown, and never fine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes import hosts
from tests.fakes.vgpu_hosts import a40_host
from tests.unit.check.test_commands import TREE
from tests.unit.host_files import tree_of
from tests.unit.kata.test_image import EROFS, disk
from vfiomgr.check import check
from vfiomgr.diagnostic import diagnostics_of
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.passthrough.steps import Bind

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

GPU = "0000:01:00.0"
IOMMU = "whether the IOMMU is on"
DOMAIN = """\
<domain type='kvm'><name>win</name><memory>4194304</memory><vcpu>2</vcpu>
<os><type machine='q35'>hvm</type></os><devices><hostdev mode='subsystem' type='pci' managed='yes'>
<source><address domain='0' bus='1' slot='0' function='0'/></source></hostdev></devices></domain>
"""
LAYOUT = f"""\
version: vfiomgr/v1
layouts:
  a: {{devices: [{{select: {{address: "{GPU}"}}, state: passthrough}}]}}
"""
POD = """\
apiVersion: v1
kind: Pod
metadata: {name: p}
spec:
  containers: [{name: a, image: b}]
"""


@pytest.fixture
def recording(run: Run, kernel: FakeKernel, tmp_path: Path) -> str:
    """A recording of a workstation whose GPU is on VFIO, without the IOMMU's directories."""
    assert run("bind", GPU).status == 0
    place = tmp_path / "recording"
    shutil.copytree(Path(kernel.root), place, symlinks=True)
    shutil.rmtree(place / "sys/kernel/iommu_groups")
    shutil.rmtree(place / "sys/class/iommu", ignore_errors=True)
    for link in place.glob("sys/devices/**/iommu_group"):
        link.unlink()
    return str(place)


def test_a_host_whose_iommu_is_unknown_is_not_called_free_of_blockers(
    run: Run, recording: str
) -> None:
    answer = run("--root", recording, "check")
    assert answer.status == 0
    assert f"unknown: {IOMMU}\n  evidence  the recording has neither " in answer.stdout
    assert answer.stdout.splitlines()[-1].startswith(f"unknown: {IOMMU}")
    assert "no blocker found" not in answer.stdout
    assert run("--root", recording, "check", "--strict").status == 1
    document = json.loads(run("--root", recording, "check", "--format", "json").stdout)
    assert document["unknown"][0].startswith(f"{IOMMU}: ")
    refused = run("--root", recording, "bind", "0000:02:00.0", "--dry-run")
    assert (refused.status, IOMMU in refused.stderr) == (4, True)


def test_what_was_not_checked_is_one_line_and_whole_with_all(run: Run, recording: str) -> None:
    shutil.rmtree(Path(recording, "proc"))
    short = run("--root", recording, "check").stderr
    assert short.count("\n") == 1
    assert short.endswith(" more (--all lists them)\n")
    every = run("--root", recording, "check", "--all").stderr.splitlines()
    assert len(every) > 3
    assert all(line.startswith("not checked: ") and ": " in line[13:] for line in every)


def test_a_host_of_which_all_is_known_passes_a_strict_check(run: Run, kernel: FakeKernel) -> None:
    assert json.loads(run("check", "--format", "json").stdout)["unknown"] != []
    tree_of(Path(kernel.root), TREE)
    answer = run("check", "--strict")
    assert "unknown" not in answer.stdout
    assert answer.status == 0


@pytest.mark.parametrize("strict", [False, True])
def test_each_kind_of_check_says_unknown_and_fails_if_strict(
    run: Run, recording: str, tmp_path: Path, *, strict: bool
) -> None:
    Path(tmp_path, "win.xml").write_text(DOMAIN)
    Path(tmp_path, "other.xml").write_text(DOMAIN.replace("bus='1'", "bus='2'"))
    Path(recording, "proc/sys/kernel/osrelease").unlink()
    share = "/opt/kata/share"
    for name, data in (
        ("kernel", b"kernel"),
        ("nvidia.img", disk(EROFS)),
        (
            "defaults/kata-containers/configuration.toml",
            f'[hypervisor.qemu]\nkernel="{share}/kernel"\nimage="{share}/nvidia.img"\n'
            'rootfs_type = "erofs"\n'
            '[runtime]\nvfio_mode = "vfio"\n'.encode(),
        ),
    ):
        file = Path(recording, share[1:], name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    option = ["--strict"] * strict
    for words in (
        ("domain", str(tmp_path / "win.xml")),
        ("kata", GPU, "--config", f"{share}/defaults/kata-containers/configuration.toml"),
        ("migration", str(tmp_path / "other.xml")),
    ):
        answer = run("--root", recording, "check", *words, *option)
        assert answer.status == int(strict), (words, answer)
        assert "unknown: " in answer.stdout.splitlines()[-1], words


def test_a_named_device_without_an_iommu_blocks_a_kata_guest(run: Run, tmp_path: Path) -> None:
    kernel = hosts.without_iommu(tmp_path / "off")
    kernel.sysfs.put_bytes(
        "/kata.toml", b'[hypervisor.qemu]\nkernel="/k"\nimage="/i"\n[runtime]\nvfio_mode="vfio"\n'
    )
    answer = run("--root", kernel.root, "check", "kata", GPU, "--config", "/kata.toml")
    assert answer.status == 1
    assert "blocker: the IOMMU is off\n" in answer.stdout


def test_show_and_groups_say_that_the_iommu_is_unknown(run: Run, recording: str) -> None:
    shown = run("--root", recording, "show", GPU).stdout
    assert f"  guest-ready      unknown: {IOMMU}: the recording has neither " in shown
    groups = run("--root", recording, "groups").stdout
    assert groups.startswith(f"unknown: {IOMMU}: the recording has neither ")


def test_a_layout_does_not_match_a_host_of_which_too_little_is_known(
    run: Run, recording: str, tmp_path: Path
) -> None:
    file = tmp_path / "layout.yaml"
    file.write_text(LAYOUT)
    assert run("layout", "assert", str(file)).status == 0
    answer = run("--root", recording, "layout", "assert", str(file))
    assert answer.status == 3
    assert f"unknown: {IOMMU}\n" in answer.stdout
    assert answer.stdout.endswith("unknown whether the host matches layout 'a'\n")
    document = run("--root", recording, "layout", "assert", str(file), "--format", "json").stdout
    assert json.loads(document)["is_met"] is False


def test_a_simulation_names_nodes_of_which_too_little_is_known(
    run: Run, recording: str, tmp_path: Path
) -> None:
    node, pods = tmp_path / "one.json", tmp_path / "pods.yaml"
    node.write_text(run("--root", recording, "snapshot").stdout)
    pods.write_text(POD)
    words = ("node", "simulate", str(node), "--pods", str(pods))
    assert f"unknown: {IOMMU} (one): " in run(*words).stdout.replace("\n  evidence  ", ": ")
    assert run(*words).status == 0
    assert run(*words, "--strict").status == 1


HOSTS: tuple[Callable[[Path], FakeKernel], ...] = (
    hosts.workstation,
    hosts.without_iommu,
    hosts.network_adapter,
    hosts.arm_server,
    hosts.mixed,
    a40_host,
)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("make", HOSTS, ids=lambda make: make.__name__)
def test_check_has_a_finding_wherever_bind_refuses_for_lack_of_an_iommu(
    tmp_path: Path, make: Callable[[Path], FakeKernel], *, is_known: bool
) -> None:
    kernel = make(tmp_path)
    first = next(iter(Path(kernel.root).glob("sys/devices/**/iommu_group")), None)
    if first is not None:
        first.unlink()  # one function that the IOMMU does not cover
    if not is_known:
        shutil.rmtree(Path(kernel.root, "sys/kernel/iommu_groups"))
    host = api.scan(kernel, with_readiness=True)
    report = check(host)
    found = {finding.rule for finding in report.findings if finding.severity != "ok"}
    for device in host.devices:
        try:
            plan(host, Bind((device.address,)))
        except UsageError:
            continue
        except Refusal as refusal:
            for one in diagnostics_of(refusal):
                if one.rule == "iommu":
                    assert report.is_blocked or report.unknown
                if one.rule == "no-group" and not device.is_bridge:
                    assert "no-group" in found

"""`vfiomgr libvirt hostdev` on a fake kernel."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.vgpu_trees import make_vgpu_tree
from tests.unit.cli.test_reading import imported_by
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import PCI_DEVICES, HostPath
from vfiomgr.pci import facts as pci_facts
from vfiomgr.pci.facts import read_device
from vfiomgr.snapshot.session import Session

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run
    from vfiomgr.pci.function import Functions
    from vfiomgr.pci.model import PciDevice

GPU = "0000:01:00.0"
ROUTED = "0000:04:00.0"
BRIDGE = "<controller type='pci' index='0' model='pcie-root'/>"


def test_options_are_written_for_the_libvirt_that_is_told(run: Run) -> None:
    options = ("--driver-model", "nvgrace_gpu_vfio_pci", "--rom", "/gpu.rom", "--boot-order", "1")
    idle = run("libvirt", "hostdev", GPU, *options, "--libvirt-version", "10.0")
    assert (idle.status, idle.stdout) == (2, "")
    assert f"vfiomgr bind {GPU} --driver nvgrace_gpu_vfio_pci" in idle.stderr
    managed = (*options, "--managed")
    made = run("libvirt", "hostdev", GPU, *managed, "--libvirt-version", "10.0")
    assert made.status == 0
    for text in ("model='nvgrace_gpu_vfio_pci'", "<rom file='/gpu.rom'/>", "<boot order='1'/>"):
        assert text in made.stdout
    refused = run("libvirt", "hostdev", GPU, *managed, "--libvirt-version", "9.10")
    assert (refused.status, refused.stdout) == (4, "")
    assert "<driver model> (libvirt 10.0.0 or later); this is 9.10.0" in refused.stderr


def test_an_unknown_libvirt_is_taken_for_an_old_one_and_told(run: Run) -> None:
    refused = run("libvirt", "hostdev", GPU, "--iommufd")
    assert refused.status == 4
    assert refused.stderr.splitlines()[0] == (
        "libvirt not found; assuming 9.0.0 (set --libvirt-version)"
    )
    plain = run("libvirt", "hostdev", GPU)
    assert "9.0.0" not in plain.stderr, "nothing of it depends on the release"


def test_the_installed_libvirt_is_asked(
    run: Run, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"virtqemud": "virtqemud (libvirt) 12.1.0\n", "qemu-system-x86_64": None}
    said["/usr/libexec/qemu-kvm"] = "QEMU emulator version 8.2.5 (qemu-kvm-8.2.5-1.el9)\n"
    monkeypatch.setattr(kernel, "run", lambda command, _seconds: said.get(command[0]))
    refused = run("libvirt", "hostdev", GPU, "--iommufd")
    assert "needs QEMU 9.0.0 or later; this is 8.2.5" in refused.stderr
    elsewhere = run("libvirt", "hostdev", GPU, "--iommufd", "--libvirt-version", "12.8")
    assert "iommufd='yes'" in elsewhere.stdout, "QEMU of this host does not count for another"
    assert "the version of QEMU is unknown" in elsewhere.stderr
    said["/usr/libexec/qemu-kvm"] = None
    silent = run("libvirt", "hostdev", GPU, "--iommufd")
    assert silent.status == 4
    assert "iommufd needs /dev/iommu, which this host does not have" in silent.stderr
    assert "CONFIG_IOMMUFD" in silent.stderr
    kernel.sysfs.put("/dev/iommu", "")
    silent = run("libvirt", "hostdev", GPU, "--iommufd")
    assert "iommufd='yes'" in silent.stdout
    assert "the version of QEMU is unknown: what depends on it is not checked" in silent.stderr


@pytest.mark.parametrize("version", ["ten", ""])
def test_a_version_that_is_none_is_told(run: Run, version: str) -> None:
    answer = run("libvirt", "hostdev", GPU, "--iommufd", "--libvirt-version", version)
    assert answer.status == 2
    assert f"{version!r} is not a version" in answer.stderr


def test_an_element_needs_nothing_that_changes_the_host(run: Run, kernel: FakeKernel) -> None:
    """Nor what reads documents of people, which takes longer than all the rest."""
    run("bind", GPU)
    imported = imported_by("--root", kernel.root, "libvirt", "hostdev", GPU)
    assert "jinja2" in imported
    assert not imported & {"vfiomgr.library", "vfiomgr.engine.run", "pydantic", "ruamel.yaml"}
    assert not imported & {"pydantic", "rich", "libvirt"}


def test_of_many_functions_that_wait_one_command_tells_all(run: Run, kernel: FakeKernel) -> None:
    names = ["0000:01:00.0", "0000:02:00.0", "10000:01:00.0"]
    told = run("libvirt", "hostdev", *names).stderr.splitlines()
    assert len(told) == 1
    assert "functions are not ready for a guest" in told[0]
    command = told[0].partition("vfiomgr ")[2].split()
    assert run(*command).status in (0, 4)
    assert set(names) <= set(command)
    assert kernel.writes == []


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that are read from now on."""
    read: list[str] = []

    def counted(functions: Functions, name: str, *more: Any) -> PciDevice | None:
        read.append(name)
        return read_device(functions, name, *more)

    monkeypatch.setattr(pci_facts, "read_device", counted)
    return read


def test_only_the_slots_that_are_named_are_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("bind", GPU)
    read = recorded(monkeypatch)
    assert run("libvirt", "hostdev", "01:00.1").status == 0
    assert sorted(read) == [GPU, "0000:01:00.1"]


@pytest.mark.parametrize("options", [(), ("--managed",), ("--function-only",)])
def test_what_is_read_of_the_host_changes_no_answer(
    run: Run, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    run("bind", GPU)
    names = [
        *sorted(str(a) for a in pci_facts.list_addresses(kernel)),
        "0000:77:00.0",
        "77",
        "1:00.0",
    ]
    command = ("libvirt", "hostdev", "--libvirt-version", "9.0", *options)
    answers = [run(*command, name) for name in names]
    assert len({answer.status for answer in answers}) > 2
    monkeypatch.setattr(Session, "slots_of", lambda session, _: session.scan_devices())
    assert answers == [run(*command, name) for name in names]


def test_a_function_is_what_its_siblings_on_the_vendors_driver_are(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them that the driver does not serve is no plain virtual function."""
    tree = tmp_path / "vendor"
    make_vgpu_tree(str(tree), gpus=1, vfs=5, types=2, family="vendor")
    addresses = pci_facts.list_addresses(HostTree(tree))
    names = sorted(str(address) for address in addresses)
    last = tree / "sys/bus/pci/devices" / names[-1]
    shutil.rmtree(last.resolve() / "nvidia")
    command = ("--root", str(tree), "libvirt", "hostdev", "--libvirt-version", "9.0")
    told = [run(*command, name) for name in names]
    assert "a virtual function on its vendor driver" in told[-1].stderr
    monkeypatch.setattr(Session, "slots_of", lambda session, _: session.scan_devices())
    assert told == [run(*command, name) for name in names]


def test_what_libvirt_is_to_bind_is_looked_at_with_all_that_the_host_does(run: Run) -> None:
    """An adapter that libvirt is to bind: what it carries, its function alone does not tell."""
    refused = run("libvirt", "hostdev", ROUTED, "--managed", "--function-only")
    assert (refused.status, refused.stdout) == (4, "")
    assert "carries the default route" in refused.stderr


@pytest.mark.parametrize("has_groups", [True, False])
def test_a_kernel_without_vfio_groups_has_iommufd(
    run: Run, kernel: FakeKernel, *, has_groups: bool
) -> None:
    """CONFIG_VFIO_GROUP is optional where there are cdevs (CONFIG_VFIO_DEVICE_CDEV)."""
    kernel.vfio.has_cdev, kernel.vfio.has_groups = True, has_groups
    kernel.sysfs.put("/dev/iommu", "")
    group, cdev = "/dev/vfio/10", "/dev/vfio/devices/vfio0"
    bound = run("bind", GPU).stdout
    nodes = f"VFIO nodes: {group}, {cdev}\n" if has_groups else f"VFIO node: {cdev}\n"
    assert f"{GPU} is on vfio-pci, {nodes}" in bound
    assert f"yes, {nodes}" in run("show", GPU).stdout
    made = run("libvirt", "hostdev", GPU, "--libvirt-version", "12.8")
    assert ("iommufd='yes'" in made.stdout) is not has_groups
    refused = run("libvirt", "hostdev", GPU, "--libvirt-version", "11.3")
    assert refused.status == (0 if has_groups else 4)
    assert has_groups or "<driver iommufd> (libvirt 12.1.0 or later)" in refused.stderr
    assert "omit it" not in refused.stderr
    kernel_remedy = "install libvirt 12.1.0 or later, or boot a kernel with CONFIG_VFIO_GROUP"
    assert has_groups or kernel_remedy in refused.stderr


@pytest.mark.parametrize("command", ["domain", "edit"])
def test_what_lifts_an_old_libvirt_on_a_kernel_without_groups(
    run: Run, kernel: FakeKernel, tmp_path: Path, command: str
) -> None:
    kernel.vfio.has_cdev, kernel.vfio.has_groups = True, False
    assert run("bind", GPU).status == 0
    file = tmp_path / "guest.xml"
    file.write_text("<domain><name>g</name><devices/></domain>")
    words = {
        "domain": ("g", "--memory", "4G", "--vcpus", "2", "--device", GPU),
        "edit": (str(file), "--add", GPU),
    }
    refused = run("libvirt", command, *words[command], "--libvirt-version", "11.3")
    assert refused.status == 4
    assert "or boot a kernel with CONFIG_VFIO_GROUP" in refused.stderr
    assert "omit it" not in refused.stderr


def test_iommufd_that_a_kernel_without_groups_needs_cannot_be_omitted(
    run: Run, kernel: FakeKernel
) -> None:
    kernel.vfio.has_cdev, kernel.vfio.has_groups = True, False
    assert run("bind", GPU).status == 0
    refused = run("libvirt", "hostdev", GPU, "--iommufd", "--libvirt-version", "11.3")
    assert "omit" not in refused.stderr


@pytest.fixture
def member(kernel: FakeKernel) -> str:
    """A virtual function on vfio-pci; so is its physical function, which is the second of two."""
    name, physical = "0000:66:10.1", "0000:66:00.1"
    kernel.drivers.known["vfio-pci"].configures_sriov = True
    kernel.add_pci("0000:66:00.0", vendor="8086", device="1521", driver="igb", group=50)
    kernel.add_pci(
        physical,
        vendor="8086",
        device="1521",
        driver="vfio-pci",
        driver_override="vfio-pci",
        group=51,
        total_vfs=2,
        vf_device="1520",
    )
    kernel.write(PCI_DEVICES / physical / "sriov_numvfs", "1")
    kernel.write(PCI_DEVICES / name / "driver_override", "vfio-pci")
    kernel.write(HostPath("/sys/bus/pci/drivers_probe"), name)
    return name


def test_a_virtual_function_of_one_on_vfio_needs_a_token_that_its_element_lacks(
    run: Run, member: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = f"{member} cannot be opened: its physical function 0000:66:00.1 is on vfio-pci"
    read = recorded(monkeypatch)
    made = run("libvirt", "hostdev", member)
    assert made.status == 0
    assert told in made.stderr
    assert sorted(read) == ["0000:66:00.1", member], "its physical function is read, and no other"
    file = tmp_path / "guest.xml"
    file.write_text(f"<domain type='kvm'><name>g</name><devices>{BRIDGE}</devices></domain>")
    assert told in run("libvirt", "edit", str(file), "--add", member, "--dry-run").stderr
    assert told in run("libvirt", "edit", str(file), "--add", member).stderr
    assert told not in run("libvirt", "edit", str(file), "--add", member).stderr, "it is there"
    file.write_text(
        "<domain type='kvm' xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'><name>g</name>"
        f"<devices>{BRIDGE}</devices><q:override><q:device alias='ua-vf'><q:frontend><q:property "
        "name='vf-token' type='string' value='14d63f20-8445-11ea-8900-1f9ce7d5650d'/></q:frontend>"
        "</q:device></q:override></domain>"
    )
    assert told not in run("libvirt", "edit", str(file), "--add", member).stderr

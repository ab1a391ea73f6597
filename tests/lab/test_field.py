"""Causes of public reports on a real kernel: what it does, and that vfiomgr says the same.

VMD is not among them: QEMU emulates no such controller.
"""

from __future__ import annotations

import subprocess
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab import nested
from tests.lab.command import document, vfiomgr
from tests.lab.nested import NAME
from tests.lab.progress import Patience

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology

DEVICES = Path("/sys/bus/pci/devices")
MODPROBE = Path("/etc/modprobe.d")
DRIVERS = Path("/sys/bus/pci/drivers")
_MAPS = 90.0
"""Seconds in which a guest may stand still until its firmware placed the BARs."""
_SHARED = "shmmem-shmem0"
"""QEMU's name of the memory of the first `<shmem>`."""


def driver(address: str) -> str | None:
    """The driver of a function."""
    link = DEVICES / address / "driver"
    return link.resolve().name if link.exists() else None


@pytest.fixture
def unbound(topology: Topology) -> Iterator[tuple[str, str, str]]:
    """A display, its twin and an audio function without a driver, and no vfio-pci in the kernel."""
    gpu, twin, audio = (topology.addresses[name] for name in ("gpu", "twin", "gpu_audio"))
    addresses = (gpu, twin, audio)
    before = {address: driver(address) for address in addresses}
    subprocess.run(["modprobe", "--remove", "vfio-pci"], check=True)
    for address in addresses:
        (DEVICES / address / "driver/unbind").write_text(address)
    try:
        yield addresses
    finally:
        for address in addresses:
            if driver(address) is not None:
                (DEVICES / address / "driver/unbind").write_text(address)
        for file in MODPROBE.glob("lab-*.conf"):
            file.unlink()
        subprocess.run(["modprobe", "--remove", "vfio-pci"], check=True)
        subprocess.run(["modprobe", "vfio-pci"], check=True)
        for address, native in before.items():
            (DRIVERS / str(native) / "bind").write_text(address)


def identifiers(address: str) -> str:
    """`1234:1111`."""
    files = (DEVICES / address / name for name in ("vendor", "device"))
    return ":".join(file.read_text().strip().removeprefix("0x") for file in files)


@pytest.mark.topology("workstation")
def test_of_two_lines_with_ids_the_kernel_follows_the_last(
    unbound: tuple[str, str, str],
) -> None:
    gpu, twin, audio = unbound
    (MODPROBE / "lab-1.conf").write_text(f"options vfio-pci ids={identifiers(gpu)}\n")
    (MODPROBE / "lab-2.conf").write_text(f"options vfio_pci ids={identifiers(audio)}\n")
    subprocess.run(["modprobe", "vfio-pci"], check=True)
    assert [driver(address) for address in (gpu, twin, audio)] == [None, None, "vfio-pci"]

    text = vfiomgr("check").stdout
    assert f"ids={identifiers(gpu)} of vfio_pci has no effect\n" in text
    assert "replaced by /etc/modprobe.d/lab-2.conf" in text
    assert f"options vfio_pci ids={identifiers(gpu)},{identifiers(audio)}" in text

    (MODPROBE / "lab-1.conf").unlink()
    both = f"options vfio_pci ids={identifiers(gpu)},{identifiers(audio)}\n"
    (MODPROBE / "lab-2.conf").write_text(both)
    subprocess.run(["modprobe", "--remove", "vfio-pci"], check=True)
    subprocess.run(["modprobe", "vfio-pci"], check=True)
    assert driver(gpu) == driver(audio) == "vfio-pci", "as the remedy says"
    assert driver(twin) == "vfio-pci", "an ID means every function that has it"


@pytest.mark.topology("workstation")
def test_new_id_takes_every_function_of_a_model_and_bind_only_one(
    unbound: tuple[str, str, str],
) -> None:
    gpu, twin, _ = unbound
    subprocess.run(["modprobe", "vfio-pci"], check=True)
    (DRIVERS / "vfio-pci/new_id").write_text(identifiers(gpu).replace(":", " "))
    assert driver(gpu) == driver(twin) == "vfio-pci"
    (DRIVERS / "vfio-pci/remove_id").write_text(identifiers(gpu).replace(":", " "))
    for address in (gpu, twin):
        (DRIVERS / "vfio-pci/unbind").write_text(address)

    vfiomgr("bind", gpu)
    assert driver(gpu) == "vfio-pci"
    assert driver(twin) is None
    vfiomgr("unbind", gpu)


@pytest.mark.topology("workstation")
def test_vfio_pci_takes_nothing_without_an_id_or_an_override(
    unbound: tuple[str, str, str],
) -> None:
    gpu, _, _ = unbound
    subprocess.run(["modprobe", "vfio-pci"], check=True)
    with pytest.raises(OSError, match="No such device"):
        (DRIVERS / "vfio-pci/bind").write_text(gpu)
    assert driver(gpu) is None
    vfiomgr("bind", gpu)
    assert driver(gpu) == "vfio-pci"
    vfiomgr("unbind", gpu)


@pytest.fixture(scope="module")
def kvm() -> None:
    """KVM on the virtualization that the emulator has; libvirtd looks for it when it starts."""
    subprocess.run(["modprobe", "kvm_amd"], check=True)


@pytest.fixture
def shared_memory(topology: Topology) -> Iterator[Path]:
    """A domain with a device that has a BAR of 1 GiB, and memory that it shares with the host."""
    large = topology.addresses["large"]
    vfiomgr("bind", large)
    size = ("--memory", "256M", "--vcpus", "1", "--firmware", "bios", "--graphics", "none")
    domain = ET.fromstring(vfiomgr("libvirt", "domain", NAME, *size, "--device", large).stdout)
    devices = domain.find("devices")
    assert devices is not None
    shared = "<shmem name='lab'><model type='ivshmem-plain'/><size unit='M'>16</size></shmem>"
    devices.append(ET.fromstring(shared))
    file = Path("/run/lab/shared.xml")
    file.write_bytes(ET.tostring(domain))
    try:
        yield file
    finally:
        nested.call("virsh", "destroy", NAME)
        nested.call("virsh", "undefine", NAME)
        vfiomgr("unbind", large)


def start(file: Path) -> str:
    """Define and start a domain; returns the log of its QEMU once it ended or mapped the memory."""
    for words in (("define", str(file), "--validate"), ("start", NAME)):
        done = nested.call("virsh", *words)
        assert done.returncode == 0, done.stderr
    patience = Patience(_MAPS, nested.pid())
    while nested.call("virsh", "domstate", NAME).stdout.strip() == "running":
        views = nested.call("virsh", "qemu-monitor-command", NAME, "--hmp", "info mtree -f").stdout
        if _SHARED in views:
            break
        assert not patience.is_over, views
        time.sleep(1)
    return Path(f"/var/log/libvirt/qemu/{NAME}.log").read_text()


@pytest.mark.topology("narrow")
@pytest.mark.platforms("debian13", only=True)
@pytest.mark.usefixtures("kvm", "libvirtd")
def test_a_guest_that_is_wider_than_the_iommu_fails_and_starts_with_the_limit(
    shared_memory: Path,
) -> None:
    """As in https://github.com/gnif/LookingGlass/issues/1184."""
    written = shared_memory.read_text()
    limit = '<maxphysaddr mode="passthrough" limit="39" />'
    assert limit in written
    wide = Path("/run/lab/wide.xml")
    wide.write_text(written.replace(limit, ""))
    found = vfiomgr("check", "domain", str(wide), status=1).stdout
    assert "the guest has 46 address bits, but the host's IOMMU translates only 39" in found
    assert "<maxphysaddr mode='passthrough' limit='39'/>" in found
    log = start(wide)
    assert nested.call("virsh", "domstate", NAME).stdout.strip() == "shut off"
    assert "-22 (Invalid argument)" in log

    nested.call("virsh", "undefine", NAME)
    found = vfiomgr("check", "domain", str(shared_memory)).stdout
    assert "address bits" not in found
    start(shared_memory)
    assert nested.call("virsh", "domstate", NAME).stdout.strip() == "running"


@pytest.mark.topology("workstation")
def test_a_suspended_function_is_read_and_stays_suspended(topology: Topology) -> None:
    nic = topology.addresses["nic"]
    vfiomgr("bind", nic)
    try:
        power = DEVICES / nic / "power"
        assert (DEVICES / nic / "power_state").read_text() == "D3hot\n"
        before = (power / "runtime_active_time").read_text()
        assert document("show", nic)["header_type"] == 0
        assert (power / "runtime_status").read_text() == "suspended\n"
        assert (power / "runtime_active_time").read_text() == before
    finally:
        vfiomgr("unbind", nic)

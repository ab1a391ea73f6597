"""Causes of public reports on a real kernel: what it does, and that vfiomgr says the same."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.command import vfiomgr

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology

DEVICES = Path("/sys/bus/pci/devices")
MODPROBE = Path("/etc/modprobe.d")
DRIVERS = Path("/sys/bus/pci/drivers")


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

"""Disks and interfaces in use on the fake kernel: refused until the use has ended, or allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.hosts import network_adapter, workstation
from vfiomgr.engine import transaction
from vfiomgr.engine.locks import hold
from vfiomgr.errors import Refusal
from vfiomgr.passthrough.steps import Bind, Reset
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.sriov.steps import SetVirtualFunctions

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.diagnostic import Override
    from vfiomgr.host.tree import HostTree

DISK, NODE = PciAddress.parse("10000:01:00.0"), "/dev/nvme1n1"
NIC = PciAddress.parse("0000:05:00.0")


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return workstation(tmp_path)


def bind(kernel: FakeKernel, address: PciAddress, *allowed: Override) -> None:
    api.apply(Bind((address,), allow=frozenset(allowed)), tree=kernel)
    assert kernel.driver_of(str(address)) == "vfio-pci"


def refused(kernel: FakeKernel, address: PciAddress) -> str:
    with pytest.raises(Refusal) as caught:
        bind(kernel, address)
    assert kernel.operations == []
    return f"{caught.value.message}; {caught.value.hint}"


def test_a_disk_of_another_mount_namespace_is_refused_until_its_end(kernel: FakeKernel) -> None:
    kernel.disks.mount_privately(NODE, "/mnt/x", pid=77, command="sh")
    said = refused(kernel, DISK)
    assert f"{NODE} on /mnt/x in the mount namespace of sh (PID 77)" in said
    assert "nsenter -t 77 -m umount /mnt/x" in said
    kernel.disks.end(NODE, pid=77)
    bind(kernel, DISK)


def test_a_claimed_disk_that_no_table_shows_is_refused_or_allowed(kernel: FakeKernel) -> None:
    kernel.disks.claim(NODE)
    assert f"{NODE}, claimed by something" in refused(kernel, DISK)
    bind(kernel, DISK, "mounted-disk")


def test_a_disk_that_is_mounted_while_one_waits_for_the_lock_is_refused(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(
        tree: HostTree, names: Iterable[str], *arguments: object, **options: object
    ) -> AbstractContextManager[None]:
        kernel.disks.claim(NODE)
        return hold(tree, names, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(transaction, "hold", slowly)
    with pytest.raises(Refusal, match=f"{NODE}, claimed by something"):
        bind(kernel, DISK)
    assert kernel.driver_of(str(DISK)) == "nvme"


def put_address(kernel: FakeKernel, interface: str, function: PciAddress) -> None:
    """Give an interface an address, and have it up."""
    directory = kernel.resolve(pci_device(function))
    assert directory is not None
    kernel.sysfs.put(directory / "net" / interface / "flags", "0x1003")
    kernel.sysfs.link(directory / "net" / interface / "device", directory)
    row = f"20010db8000000000000000000000005 02 40 00 80 {interface}"
    kernel.sysfs.put("/proc/net/if_inet6", row)


def test_an_interface_with_an_address_is_refused_until_it_is_down(kernel: FakeKernel) -> None:
    put_address(kernel, "enp5s0", NIC)
    said = refused(kernel, NIC)
    assert "in use by the host's network: interface enp5s0: address 2001:db8::5/64" in said
    assert "ip link set enp5s0 down" in said
    assert "--allow in-use" in said
    kernel.sysfs.put("/proc/net/if_inet6", "")
    bind(kernel, NIC)


def test_an_interface_in_use_can_be_allowed(kernel: FakeKernel) -> None:
    put_address(kernel, "enp5s0", NIC)
    bind(kernel, NIC, "in-use")


@pytest.fixture
def used(tmp_path: Path) -> FakeKernel:
    """A network adapter whose interface has an address."""
    kernel = network_adapter(tmp_path)
    put_address(kernel, "enp5s0", NIC)
    return kernel


def test_a_reset_takes_the_interface_from_the_host_as_well(used: FakeKernel) -> None:
    with pytest.raises(Refusal) as caught:
        api.apply(Reset(NIC), tree=used)
    assert "in use by the host's network" in caught.value.message
    assert "--function-only" not in caught.value.hint


def test_a_virtual_function_with_an_address_is_not_removed(tmp_path: Path) -> None:
    kernel = network_adapter(tmp_path)
    kernel.write(HostPath(f"{pci_device(NIC)}/sriov_numvfs"), "1")
    put_address(kernel, "enp5s0v0", PciAddress.parse("0000:05:10.0"))
    kernel.sysfs.link(
        "/sys/class/net/enp5s0v0",
        f"{kernel.resolve(pci_device(PciAddress.parse('0000:05:10.0')))}/net/enp5s0v0",
    )
    with pytest.raises(Refusal, match="interface enp5s0v0: address"):
        api.apply(SetVirtualFunctions(NIC, 0), tree=kernel)

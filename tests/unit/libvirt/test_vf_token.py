"""Virtual functions whose physical function is on vfio-pci: domains, hostdevs and preflight."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.guest_hosts import planned, two_sockets
from tests.unit.libvirt.preflight import situations as good
from tests.unit.libvirt.preflight.situations import domain, function, host, of, pci_element, xml
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.libvirt.build.named import parse_device
from vfiomgr.libvirt.build.vf_token import is_in
from vfiomgr.libvirt.model import DomainHostdev
from vfiomgr.libvirt.xml import render

PF, VF, TOKEN = "0000:61:00.0", "0000:61:00.2", "14d63f20-8445-11ea-8900-1f9ce7d5650d"
OWNER = function(PF, sriov_totalvfs=8, sriov_numvfs=1, class_code="020000")
MEMBER = function(VF, physical_function=OWNER.address, class_code="020000", iommu_group=98)


def planned_with(*words: str, **changes: Any) -> str:
    wanted = tuple(parse_device(word) for word in words)
    known = two_sockets(replace(OWNER, **changes), MEMBER)
    return render.domain(planned(devices=wanted, host=known, numa="off"))


def test_a_token_is_a_property_of_the_device() -> None:
    text = planned_with(f"{VF},vf-token={TOKEN.upper()}")
    assert f"<qemu:property name='vf-token' type='string' value='{TOKEN}'/>" in text
    assert "alias='ua-vfio-0000-61-00-2'" in text
    assert TOKEN in planned_with(f"{PF},vf-token={TOKEN}"), "its user sets the token"


def test_a_virtual_function_needs_it_only_if_its_physical_function_is_on_vfio() -> None:
    with pytest.raises(Refusal, match=f"physical function {PF} is on vfio-pci") as refused:
        planned_with(VF)
    assert f"--device {VF},vf-token=UUID" in refused.value.hint
    assert VF not in planned_with(f"{PF}"), "the physical function itself needs none"
    assert "vf-token" not in planned_with(VF, driver="mlx5_core")
    with pytest.raises(UsageError, match="the kernel accepts none"):
        planned_with(f"{VF},vf-token={TOKEN}", driver="mlx5_core")
    with pytest.raises(UsageError, match="invalid VF token"):
        planned_with(f"{VF},vf-token=secret")


def test_a_start_without_token_fails_and_is_told_before() -> None:
    text = xml(pci_element(VF))
    found = good.found(of(domain(text), host(OWNER, MEMBER)), "vf-token-missing")
    assert found is not None
    assert found.severity == "blocker"
    assert f"vfiomgr unbind {PF}" in found.remedy
    on_host = host(replace(OWNER, driver="mlx5_core"), MEMBER)
    assert good.found(of(domain(text), on_host), "vf-token-missing") is None


QEMU = "http://libvirt.org/schemas/domain/qemu/1.0"


def is_told(alias: str, *more: str, own: str = "", other: str = "") -> bool:
    """Whether `check domain` misses the token, with an override for this alias."""
    override = (
        f"<qemu:override xmlns:qemu='{QEMU}'><qemu:device alias='{alias}'><qemu:frontend>"
        f"<qemu:property name='vf-token' type='string' value='{TOKEN}'/></qemu:frontend>"
        f"</qemu:device></qemu:override>{''.join(more)}</domain>"
    )
    devices = pci_element(PF, rest=other) + pci_element(VF, rest=own)
    text = xml(devices).replace("</domain>", override)
    return good.found(of(domain(text), host(OWNER, MEMBER)), "vf-token-missing") is not None


def test_an_override_is_for_the_device_with_its_alias() -> None:
    own = "<alias name='ua-vf'/>"
    assert not is_told("ua-vf", own=own)
    assert is_told("ua-other", own=own)
    assert is_told("hostdev1", own=own)
    assert not is_told("hostdev1"), "the name that libvirt gives it: the second <hostdev>"
    assert is_told("hostdev0")
    assert is_told("ua-vf")
    named = "<alias name='ua-pf'/>"
    assert not is_told("hostdev0", other=named), "libvirt does not count names of users"
    running = "<alias name='hostdev7'/>"
    assert not is_told("hostdev7", own=running)
    assert is_told("hostdev1", own=running)


def test_libvirt_counts_interfaces_before_host_devices() -> None:
    devices = (DomainHostdev(1, "pci"), DomainHostdev(2, "pci", element="interface"))
    setting = ("-set", f"device.hostdev0.vf-token={TOKEN}")
    known = replace(domain(xml()), hostdevs=devices, qemu_arguments=setting)
    assert [is_in(known, device) for device in (*devices, None)] == [False, True, False]


def test_arguments_of_a_command_line_may_be_for_any_device() -> None:
    argument = f"<qemu:arg value='vfio-pci,host={VF},vf-token={TOKEN}'/>"
    line = f"<qemu:commandline xmlns:qemu='{QEMU}'>{argument}</qemu:commandline>"
    assert not is_told("ua-other", line)

"""The twin of the root disk, bound by address: nothing that lasts can take the root disk."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal
from vfiomgr.passthrough.steps import Bind
from vfiomgr.persistence.model import HOOKS, Initramfs, rule_file
from vfiomgr.persistence.steps import RebuildInitramfs, ReplaceFile
from vfiomgr.persistence.systems import SYSTEMS
from vfiomgr.users.model import HostUse

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

IDS = "144d:a80a"


def disk(address: str, group: int, port: str) -> PciDevice:
    """One of two disks of a model, each behind its own port."""
    return replace(
        pci_device(address),
        vendor_id="144d",
        device_id="a80a",
        subsystem_id="144d:a801",
        class_code="010802",
        driver="nvme",
        driver_module="nvme",
        iommu_group=group,
        bridge_path=f"pci0000:00/{port}",
    )


ROOT = disk("0000:03:00.0", 3, "0000:00:1b.0")
TWIN = disk("0000:04:00.0", 4, "0000:00:1d.0")
MATCH = re.compile(r'(\w+)(?:\{([^}]+)\})?(==|!=)"([^"]*)"')


def host(**facts: object) -> HostSnapshot:
    used = (HostUse(ROOT.address, "mounted-disk", "/dev/nvme0n1p2 on /"),)
    return with_facts(host_of(ROOT, TWIN), host_uses=used, has_systemd=True, **facts)


def applies(line: str, device: PciDevice) -> bool:
    """Whether a line of udev applies to the event of a function that appears."""
    own = {
        "ACTION": "add",
        "SUBSYSTEM": "pci",
        "KERNEL": str(device.address),
        "DEVPATH": f"/devices/{device.bridge_path}/{device.address}",
        "vendor": f"0x{device.vendor_id}",
        "device": f"0x{device.device_id}",
        "subsystem_vendor": "0x144d",
        "subsystem_device": "0xa801",
        "class": f"0x{device.class_code}",
    }
    found = ((name, key, is_equal, value) for name, key, is_equal, value in MATCH.findall(line))
    return all(
        (own[key or name] == value) == (operator == "==")
        for name, key, operator, value in found
        if name != "TEST" and not key.startswith("[pci/")
    )


def sets_override(text: str, device: PciDevice) -> list[str]:
    """The functions whose override the rules set when a function appears."""
    found = []
    for line in text.replace("\\\n", "").splitlines():
        target = re.search(r'ATTR\{(?:\[pci/([^\]]+)\])?driver_override\}="', line)
        if target is not None and applies(line, device):
            found.append(target[1] or str(device.address))
    return found


@pytest.mark.parametrize("tool", [*HOOKS, "rpm-ostree"])
def test_what_is_written_for_the_twin_never_names_the_root_disk(tool: str) -> None:
    image = Initramfs(tool, ("nvme",), ("01",))
    made = plan(host(initramfs=image), Bind((TWIN.address,), persist=True, update_initramfs=True))
    written = {s.path: s.after or "" for s in made.steps if isinstance(s, ReplaceFile)}
    rules = written[rule_file(TWIN.address)]
    assert sets_override(rules, TWIN) == [str(TWIN.address)]
    assert sets_override(rules, ROOT) == [str(TWIN.address)], "by the event of its twin"
    commands = [word for s in made.steps if isinstance(s, RebuildInitramfs) for word in s.command]
    assert commands
    for text in (*written.values(), *commands, *made.notes):
        assert str(ROOT.address) not in text
        assert "ids=" not in text
        assert "new_id" not in text


def test_a_disk_that_took_the_place_of_the_twin_has_another_path() -> None:
    """Without the twin the buses may be numbered anew; its port stays where it is."""
    made = plan(host(), Bind((TWIN.address,), persist=True))
    (rules,) = (
        s.after or ""
        for s in made.steps
        if isinstance(s, ReplaceFile) and s.path == rule_file(TWIN.address)
    )
    moved = replace(ROOT, address=TWIN.address)
    assert sets_override(rules, moved) == []


@pytest.mark.parametrize("system", [name for name, one in SYSTEMS.items() if one.why])
def test_a_system_with_its_own_configuration_binds_the_twin_by_address(system: str) -> None:
    with pytest.raises(Refusal) as caught:
        plan(host(settings_system=system), Bind((TWIN.address,), persist=True))
    hint = caught.value.hint
    assert str(ROOT.address) not in hint
    assert "ids=" not in hint
    assert IDS not in hint.replace(f"{TWIN.address}|{IDS}", "")


def test_both_disks_together_are_refused() -> None:
    with pytest.raises(Refusal, match="nvme0n1p2"):
        plan(host(), Bind((ROOT.address, TWIN.address), persist=True))

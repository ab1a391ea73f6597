from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.devices import pci_device
from vfiomgr.documents.text import TextFile
from vfiomgr.errors import Refusal
from vfiomgr.host.owners import NodeAccess, NodeOwner
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.model import (
    PersistedBinding,
    is_rule_file,
    parse_driverctl,
    parse_rule,
    render_rule,
    render_unit,
    rule_file,
)

GPU = pci_device()
BINDING = PersistedBinding(
    GPU.identity, "vfio-pci", "vfio_pci", NodeOwner("libvirt-qemu:kvm", 64055, 107)
)
SHELL = shutil.which("sh") or "/bin/sh"


def record(**fields: object) -> str:
    """A line that looks like one of vfiomgr's."""
    return f"# vfiomgr-record: {json.dumps({'api_version': 'vfiomgr/v1', **fields})}"


@pytest.mark.parametrize("owner", [None, BINDING.owner, NodeOwner("\n\\\u2028", 0)])
def test_a_rule_is_read_back_as_it_was_written(owner: NodeOwner | None) -> None:
    binding = replace(BINDING, owner=owner)
    assert parse_rule(render_rule(binding)) == binding


def test_a_record_stays_on_its_line_whatever_a_user_is_called() -> None:
    text = render_rule(replace(BINDING, owner=NodeOwner('a\nRUN+="x', 0)))
    assert [line for line in text.splitlines() if line.startswith("RUN")] == []


def test_every_rule_asks_for_the_whole_identity() -> None:
    own, others, group, cdev = rules(render_rule(BINDING))
    for rule, place in ((own, ""), (others, "[pci/0000:04:00.0]")):
        for name, value in (
            ("vendor", "0x10de"),
            ("device", "0x25b6"),
            ("subsystem_vendor", "0x10de"),
            ("subsystem_device", "0x157e"),
            ("class", "0x030200"),
        ):
            assert f'ATTR{{{place}{name}}}=="{value}"' in rule
        assert "/devices/pci0000:00/0000:00:01.0/0000:04:00.0" in rule
    for rule in (group, cdev):
        assert 'MODE:="0660", RUN+="/bin/chown 64055:107 $devnode"' in rule
        assert "OWNER" not in rule
        assert "0000:04:00.0" in rule


def rules(text: str) -> list[str]:
    lines = text.replace(", \\\n  ", ", ").splitlines()
    return [line for line in lines if not line.startswith("#")]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vendor_id", '10de", RUN+="x'),
        ("vendor_id", "10d*"),
        ("device_id", "25b6\n"),
        ("subsystem_id", "10de"),
        ("class_code", "0302"),
        ("bridge_path", 'pci0000:00/$env{X}"'),
        ("bridge_path", ""),
    ],
)
def test_what_a_rule_cannot_hold_is_refused(field: str, value: str) -> None:
    changes: dict[str, Any] = {field: value}
    device = replace(GPU, **changes).identity
    with pytest.raises(Refusal, match="cannot persist") as caught:
        render_rule(replace(BINDING, device=device))
    assert caught.value.hint


@pytest.mark.parametrize("driver", ["", 'vfio-pci"', "vfio pci", "../vfio", "$kernel", "-v"])
def test_a_driver_name_that_udev_would_read_otherwise_is_refused(driver: str) -> None:
    with pytest.raises(Refusal, match="unsupported driver"):
        render_rule(replace(BINDING, driver=driver))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# vfiomgr-record: {",
        "# vfiomgr-record: []",
        '# vfiomgr-record: {"api_version": "vfiomgr/v9"}',
        record(device={}, driver="", module="", owner=None),
        record(device=1, driver=2, module=3, owner=None),
        record(device={"address": "0000:04:00.0", "colour": "red"}, driver="x", module="x"),
    ],
)
def test_what_is_no_record_is_none(text: str) -> None:
    assert parse_rule(text) is None


def test_a_rule_file_has_the_address_in_its_name_and_sorts_before_the_drivers() -> None:
    file = rule_file(PciAddress.parse("10000:01:00.0"))
    assert file == "/etc/udev/rules.d/05-vfiomgr-10000:01:00.0.rules"
    assert is_rule_file(file.name)
    assert file.name < "80-drivers.rules"
    assert not is_rule_file("05-driverctl.rules")


def test_without_a_group_only_the_user_gets_in() -> None:
    assert NodeOwner("u", 1000).access == NodeAccess(1000, 0, 0o600)
    assert NodeOwner("u:g", 1000, 7).access == NodeAccess(1000, 7, 0o660)


@pytest.mark.parametrize(
    ("name", "text", "driver"),
    [
        ("0000:04:00.0", "vfio-pci\n", "vfio-pci"),
        ("pci-0000:04:00.0", "vfio-pci", "vfio-pci"),
        ("vmbus-1234", "uio_hv_generic", None),
        ("0000:04:00.0", "", None),
    ],
)
def test_entries_of_driverctl(name: str, text: str, driver: str | None) -> None:
    entry = parse_driverctl(TextFile(f"/etc/driverctl.d/{name}", text))
    assert (entry.driver if entry else None) == driver


def test_a_unit_runs_vfiomgr_by_its_path_and_no_path_that_needs_quotes() -> None:
    assert "ExecStart=/opt/venv/bin/vfiomgr persist watch\n" in render_unit("/opt/venv/bin/vfiomgr")
    with pytest.raises(Refusal, match="cannot write a systemd unit"):
        render_unit("/opt/my programs/vfiomgr")


def test_the_listeners_of_the_unit_may_have_real_time_priority() -> None:
    """What they call (passthrough/watch.py) fails silently where the unit does not let them."""
    settings = [line.partition("=")[::2] for line in render_unit("/opt/vfiomgr").splitlines()]
    assert [value for name, value in settings if name == "RestrictRealtime"][-1] == "no"
    bounding = [value.split() for name, value in settings if name == "CapabilityBoundingSet"]
    assert any("CAP_SYS_NICE" in names for names in bounding)

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.devices import pci_device
from tests.unit.host_files import tree_of
from vfiomgr.errors import UsageError
from vfiomgr.host.owners import NodeOwner, find_owner
from vfiomgr.passthrough.watch import parse_arrival
from vfiomgr.persistence.facts import read_files
from vfiomgr.persistence.model import PersistedBinding, render_rule

if TYPE_CHECKING:
    from pathlib import Path

ACCOUNTS = """
    etc/passwd: root:x:0:0:root:/root:/bin/sh\\nqemu:x:64055:104::/:/bin/false\\nodd:x:y:1
    etc/group: root:x:0:\\nkvm:x:107:
    """


@pytest.mark.parametrize(
    ("text", "owner"),
    [
        ("qemu", NodeOwner("qemu", 64055)),
        ("qemu:kvm", NodeOwner("qemu:kvm", 64055, 107)),
        ("1000:1001", NodeOwner("1000:1001", 1000, 1001)),
        ("0:0", NodeOwner("0:0", 0, 0)),
        ("4294967294", NodeOwner("4294967294", 4294967294)),
        ("00000000001000", NodeOwner("00000000001000", 1000)),
    ],
)
def test_owners_are_found_in_the_hosts_own_tables(
    tmp_path: Path, text: str, owner: NodeOwner
) -> None:
    assert find_owner(tree_of(tmp_path, ACCOUNTS), text) == owner


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("nobody-here", "no such user: 'nobody-here'"),
        ("", "has no user"),
        (":", "has no user"),
        (":kvm", "has no user"),
        ("qemu:", "has no group"),
        ("qemu:wheel", "no such group: 'wheel'"),
        ("odd", "no such user: 'odd'"),
        ("4294967295", "4294967295 is not a user number: the range is 0 to 4294967294"),
        ("-1", "-1 is not a user number"),
        ("qemu:4294967295", "4294967295 is not a group number"),
        ("9" * 5000, "is not a user number"),
    ],
)
def test_unknown_owners_are_refused(tmp_path: Path, text: str, missing: str) -> None:
    with pytest.raises(UsageError, match=missing) as caught:
        find_owner(tree_of(tmp_path, ACCOUNTS), text)
    assert caught.value.hint


def test_a_host_without_tables_and_a_snapshot_take_numbers_alone(tmp_path: Path) -> None:
    bare = tree_of(tmp_path, "etc/group: kvm:x:107:")
    with pytest.raises(UsageError, match=f"cannot read /etc/passwd below {tmp_path}") as caught:
        find_owner(bare, "qemu:kvm")
    assert caught.value.hint == "use the number of the user"
    assert find_owner(bare, "64055:kvm") == NodeOwner("64055:kvm", 64055, 107)
    with pytest.raises(UsageError, match=r"user 'root': a snapshot contains no accounts"):
        find_owner(None, "root")
    assert find_owner(None, "64055:107") == NodeOwner("64055:107", 64055, 107)


def test_a_file_without_a_record_is_told_and_hides_no_other(tmp_path: Path) -> None:
    binding = PersistedBinding(pci_device().identity, "vfio-pci", "vfio_pci")
    tree = tree_of(
        tmp_path,
        """
        etc/udev/rules.d/05-vfiomgr-0000:01:00.0.rules: nothing
        etc/udev/rules.d/99-other.rules: nothing
        etc/driverctl.d/0000:02:00.0: vfio-pci
        """,
    )
    own = tmp_path / "etc/udev/rules.d/05-vfiomgr-0000:04:00.0.rules"
    own.write_text(render_rule(binding))
    with pytest.warns(UserWarning, match=r"0000:01:00\.0.*no record of vfiomgr"):
        files = read_files(tree)
    assert [file.path.rpartition("/")[2] for file in files] == [
        "05-vfiomgr-0000:01:00.0.rules",
        "05-vfiomgr-0000:04:00.0.rules",
        "0000:02:00.0",
    ]


def message(**changes: str | None) -> bytes:
    """What a kernel of the laboratory said, with changes."""
    fields: dict[str, str | None] = {
        "ACTION": "add",
        "DEVPATH": "/devices/pci0000:00/0000:00:01.0/0000:04:00.0",
        "SUBSYSTEM": "pci",
        "PCI_CLASS": "30200",
        "PCI_ID": "10DE:25B6",
        "PCI_SUBSYS_ID": "10DE:157E",
        "PCI_SLOT_NAME": "0000:04:00.0",
        "SEQNUM": "1037",
    }
    fields |= changes
    parts = [f"{key}={value}" for key, value in fields.items() if value is not None]
    return "\0".join([f"{fields['ACTION']}@{fields['DEVPATH']}", *parts, ""]).encode()


def test_an_announcement_of_the_kernel_tells_the_whole_identity() -> None:
    arrival = parse_arrival(message())
    assert arrival is not None
    assert arrival.is_of(pci_device().identity)


@pytest.mark.parametrize(
    "change",
    [
        {"PCI_ID": "10DE:25B7"},
        {"PCI_SUBSYS_ID": "10DE:0000"},
        {"PCI_CLASS": "40300"},
        {"PCI_SLOT_NAME": "0000:05:00.0"},
        {"DEVPATH": "/devices/pci0000:00/0000:00:02.0/0000:04:00.0"},
    ],
)
def test_an_announcement_of_another_device_is_told_apart(change: dict[str, str | None]) -> None:
    arrival = parse_arrival(message(**change))
    assert arrival is not None
    assert not arrival.is_of(pci_device().identity)


@pytest.mark.parametrize(
    "change",
    [
        {"ACTION": "remove"},
        {"SUBSYSTEM": "usb"},
        {"SYNTH_UUID": "0"},
        {"PCI_ID": None},
        {"PCI_ID": "10DE"},
        {"PCI_SLOT_NAME": "x"},
    ],
)
def test_other_messages_are_no_arrivals(change: dict[str, str | None]) -> None:
    assert parse_arrival(message(**change)) is None

"""What outlives a reboot: which function goes to which driver, and who may open its nodes."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from vfiomgr.errors import Refusal, VfiomgrError
from vfiomgr.model.access import NodeAccess
from vfiomgr.model.parsed import parse_json
from vfiomgr.model.path import HostPath
from vfiomgr.model.pci import DeviceIdentity, PciAddress

RULES = HostPath("/etc/udev/rules.d")
DRIVERCTL = HostPath("/etc/driverctl.d")
_VERSION = "vfiomgr/v1"
_PREFIX, _SUFFIX = "05-vfiomgr-", ".rules"
"""udev sorts by name: before 80-drivers.rules, which loads the host's drivers."""
_RECORD = "# vfiomgr-record: "
_LINE = ", \\\n  "
_DRIVER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_IDENTIFIER = re.compile(r"[0-9a-f]{4}")
_SUBSYSTEM = re.compile(r"[0-9a-f]{4}:[0-9a-f]{4}")
_CLASS = re.compile(r"[0-9a-f]{6}")
_DIRECTORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9:._@/-]*")


@dataclass(frozen=True, slots=True)
class TextFile:
    """A small file of the host's configuration, whole."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class NodeOwner:
    """Who may open a function's nodes; `name` is what the user typed, for people."""

    name: str
    uid: int
    gid: int | None = None

    @property
    def access(self) -> NodeAccess:
        """The group gets in only where one was named."""
        return NodeAccess(self.uid, self.gid or 0, 0o600 if self.gid is None else 0o660)


@dataclass(frozen=True, slots=True)
class PersistedBinding:
    """One function that goes to a VFIO driver whenever the kernel finds it."""

    device: DeviceIdentity
    driver: str
    module: str
    """The module that brings the driver, with `_` for `-`."""
    owner: NodeOwner | None = None

    @property
    def address(self) -> PciAddress:
        """Where the function is."""
        return self.device.address

    def is_of(self, device: DeviceIdentity | None) -> bool:
        """Whether it was recorded of this very device."""
        return device is not None and self.device.is_same_as(device)


@dataclass(frozen=True, slots=True)
class DriverctlOverride:
    """An entry of /etc/driverctl.d: driverctl knows an address, not which device is there."""

    address: PciAddress
    driver: str
    file: TextFile


def rule_file(address: PciAddress) -> HostPath:
    """The file of a function's rules."""
    return RULES / f"{_PREFIX}{address}{_SUFFIX}"


def is_rule_file(name: str) -> bool:
    """Whether a file in /etc/udev/rules.d has a name that vfiomgr gives."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def render_rule(binding: PersistedBinding) -> str:
    """The rules of a function for udev (udev(7)), with the record that `parse_rule` reads.

    The first rule is for the function's own event. The second is for the events of all others: the
    driver of a twin, loaded by the twin's event, would probe this function too. Neither touches
    another device at the address.

    Raises:
        Refusal: a value that a rule could not hold; rules have no way to escape one.

    """
    import json  # noqa: PLC0415 - `list` needs none

    _require_plain(binding)
    record = {"api_version": _VERSION, **asdict(binding)}
    record["device"]["address"] = str(binding.address)
    return "\n".join(
        [
            f"# vfiomgr: {binding.address} goes to {binding.driver}.",
            f"# Take it back with: vfiomgr persist remove {binding.address}",
            _RECORD + json.dumps(record),
            *map(_LINE.join, _driver_rules(binding)),
            *map(_LINE.join, _access_rules(binding)),
            "",
        ]
    )


def parse_rule(text: str) -> PersistedBinding | None:
    """The record in a file that `render_rule` wrote; None where there is none."""
    for line in text.splitlines():
        if line.startswith(_RECORD):
            try:
                return _binding(parse_json(line.removeprefix(_RECORD)))
            except (ValueError, KeyError, TypeError, AttributeError, VfiomgrError):
                return None
    return None


def parse_driverctl(file: TextFile) -> DriverctlOverride | None:
    """An entry of driverctl: the file's name is the address, its text the driver."""
    try:
        address = PciAddress.parse(HostPath(file.path).name.removeprefix("pci-"))
    except VfiomgrError:
        return None
    driver = file.text.strip()
    return DriverctlOverride(address, driver, file) if _DRIVER.fullmatch(driver) else None


def _binding(record: dict[str, object]) -> PersistedBinding:
    if record["api_version"] != _VERSION:
        message = f"api_version is {record['api_version']!r}"
        raise ValueError(message)
    device, driver, module = record["device"], record["driver"], record["module"]
    if not (isinstance(device, dict) and isinstance(driver, str) and isinstance(module, str)):
        message = "not a record of vfiomgr"
        raise TypeError(message)
    identity = DeviceIdentity(**{**device, "address": PciAddress.parse(device["address"])})
    owner = record["owner"]
    return PersistedBinding(
        identity, driver, module, NodeOwner(**owner) if isinstance(owner, dict) else None
    )


def _require_plain(binding: PersistedBinding) -> None:
    device = binding.device
    for what, value, pattern in (
        ("driver", binding.driver, _DRIVER),
        ("module", binding.module, _DRIVER),
        ("vendor", device.vendor_id, _IDENTIFIER),
        ("device", device.device_id, _IDENTIFIER),
        ("subsystem", device.subsystem_id, _SUBSYSTEM),
        ("class", device.class_code, _CLASS),
        ("bridge path", device.bridge_path, _DIRECTORY),
    ):
        if not pattern.fullmatch(value):
            message = f"{device.address} cannot be persisted: its {what} is {value!r}"
            raise Refusal(message, "leave out --persist, and report it: no rule can hold this")


def _driver_rules(binding: PersistedBinding) -> tuple[list[str], list[str]]:
    device, driver = binding.device, binding.driver
    place = f"/devices/{device.bridge_path}/{device.address}"
    other = f"[pci/{device.address}]"
    own = [
        'ACTION=="add"',
        'SUBSYSTEM=="pci"',
        f'KERNEL=="{device.address}"',
        f'DEVPATH=="{place}"',
        *_identity(device, ""),
        f'ATTR{{driver_override}}="{driver}"',
        f'RUN{{builtin}}+="kmod load {binding.module}"',
        'TAG+="systemd"',
        'ENV{SYSTEMD_WANTS}+="vfiomgr-persist.service"',
    ]
    others = [
        'ACTION=="add"',
        'SUBSYSTEM=="pci"',
        f'KERNEL!="{device.address}"',
        f'TEST=="/sys{place}"',
        f'TEST!="/sys{place}/driver"',
        *_identity(device, other),
        f'ATTR{{{other}driver_override}}="{driver}"',
    ]
    return own, others


def _identity(device: DeviceIdentity, prefix: str) -> list[str]:
    """One match for each identifier; a line of udev holds only if all of its matches do."""
    subsystem_vendor, subsystem_device = device.subsystem_id.split(":")
    values = {
        "vendor": device.vendor_id,
        "device": device.device_id,
        "subsystem_vendor": subsystem_vendor,
        "subsystem_device": subsystem_device,
        "class": device.class_code,
    }
    return [f'ATTR{{{prefix}{name}}}=="0x{value}"' for name, value in values.items()]


def _access_rules(binding: PersistedBinding) -> list[list[str]]:
    """Rules for the node of the group and for the cdev, bound to the function they lead to.

    A group's number differs from boot to boot, so the rule asks which group holds the function.
    """
    if binding.owner is None:
        return []
    access = binding.owner.access
    group = f"/sys/kernel/iommu_groups/%k/devices/{binding.address}"
    matches = [
        [
            'SUBSYSTEM=="vfio"',
            'KERNEL=="[0-9]*"',
            f'TEST=="{group}"',
            *_identity(binding.device, f"[pci/{binding.address}]"),
        ],
        [
            'SUBSYSTEM=="vfio-dev"',
            f'KERNELS=="{binding.address}"',
            *_identity(binding.device, f"[pci/{binding.address}]"),
        ],
    ]
    given = [f'OWNER:="{access.uid}"', f'GROUP:="{access.gid}"', f'MODE:="{access.mode:04o}"']
    return [['ACTION!="remove"', *match, *given] for match in matches]

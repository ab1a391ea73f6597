"""Persistent bindings: the driver of each function, and the owner of its nodes."""

from __future__ import annotations

from vfiomgr.diagnostic import refuse
from vfiomgr.documents.jsonable import to_jsonable
from vfiomgr.documents.text import TextFile, parse_json, sealed
from vfiomgr.errors import VfiomgrError
from vfiomgr.expressions import expression
from vfiomgr.host.owners import NodeOwner
from vfiomgr.paths import RUNTIME, HostPath
from vfiomgr.pci.model import DeviceIdentity, PciAddress
from vfiomgr.value import Value

RULES = HostPath("/etc/udev/rules.d")
DRIVERCTL = HostPath("/etc/driverctl.d")
_VERSION = "vfiomgr/v1"
_PREFIX, _SUFFIX = "05-vfiomgr-", ".rules"
"""udev sorts by name; this precedes 80-drivers.rules, which loads host drivers."""
_RECORD = "# vfiomgr-record: "
_LINE = ", \\\n  "
_DRIVER = expression(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_IDENTIFIER = expression(r"[0-9a-f]{4}")
_SUBSYSTEM = expression(r"[0-9a-f]{4}:[0-9a-f]{4}")
_CLASS = expression(r"[0-9a-f]{6}")
_DIRECTORY = expression(r"[A-Za-z0-9_][A-Za-z0-9:._@/-]*")


class PersistedBinding(Value):
    """A function that is bound to a VFIO driver whenever the kernel finds it."""

    device: DeviceIdentity
    driver: str
    module: str
    """The module of the driver, with `_` for `-`."""
    owner: NodeOwner | None = None

    @property
    def address(self) -> PciAddress:
        """The address of the function."""
        return self.device.address

    def is_of(self, device: DeviceIdentity | None) -> bool:
        """Whether it was recorded for this device."""
        return device is not None and self.device.is_same_as(device)


class DriverctlOverride(Value):
    """An entry of /etc/driverctl.d, which has an address but no device identity."""

    address: PciAddress
    driver: str
    file: TextFile


def rule_file(address: PciAddress) -> HostPath:
    """The rule file of a function."""
    return RULES / f"{_PREFIX}{address}{_SUFFIX}"


def is_rule_file(name: str) -> bool:
    """Whether a file in /etc/udev/rules.d has a name used by vfiomgr."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def render_rule(binding: PersistedBinding) -> str:
    """Render the udev rules (udev(7)) of a function, with the record that `parse_rule` reads.

    The first rule handles the function's own event. The second handles events of other devices: the
    driver of an identical device, loaded by its event, would also probe this function. Neither
    affects a different device at the address.

    Raises:
        Refusal: a rule cannot contain a value; rules have no escapes.

    """
    import json  # noqa: PLC0415 - `list` needs none

    _require_plain(binding)
    record = {"api_version": _VERSION, **to_jsonable(binding)}
    return "\n".join(
        [
            f"# vfiomgr: bind {binding.address} to {binding.driver}.",
            f"# Remove with: vfiomgr unbind {binding.address} --forget-only",
            _RECORD + json.dumps(record),
            *map(_LINE.join, _driver_rules(binding)),
            *map(_LINE.join, _access_rules(binding)),
            "",
        ]
    )


def parse_rule(text: str) -> PersistedBinding | None:
    """Parse the record in a file of `render_rule`; None if there is none."""
    for line in text.splitlines():
        if line.startswith(_RECORD):
            try:
                return _binding(parse_json(line.removeprefix(_RECORD)))
            except (ValueError, KeyError, TypeError, AttributeError, VfiomgrError):
                return None
    return None


def parse_driverctl(file: TextFile) -> DriverctlOverride | None:
    """Parse an entry of driverctl: the file name is the address, the text the driver."""
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
            message = f"cannot persist {device.address}: unsupported {what}: {value!r}"
            refuse(
                "not-persistable",
                device.address,
                message,
                "leave out --persist, and report this problem",
            )


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
    """One match per ID; a udev line applies only if all of its matches do."""
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
    """Rules for the node of the group and the cdev of a function.

    The number of a group changes between boots, so the rule looks up the group of the function.
    A program sets the owner: from systemd 258 on, udev ignores a whole line if it does not know
    its OWNER or GROUP, or, before it was allowed again, if they are not those of the system
    (pull requests 36123 and 40612 of systemd).
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
    chown = f"/bin/chown {access.uid}:{access.gid} $devnode"
    given = [f'MODE:="{access.mode:04o}"', f'RUN+="{chown}"']
    return [['ACTION!="remove"', *match, *given] for match in matches]


UNITS = HostPath("/etc/systemd/system")
UNIT = UNITS / "vfiomgr-persist.service"
SWEPT = RUNTIME / "persist-swept"
"""Marks that the service has checked all functions in this boot."""
_PLAIN = expression(r"/[A-Za-z0-9._+/-]+( -I -m vfiomgr)?")
_CAPABILITIES = (
    "CAP_SYS_ADMIN CAP_SYS_MODULE CAP_SYS_PTRACE CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH "
    "CAP_CHOWN CAP_FOWNER CAP_MKNOD CAP_SYS_CHROOT"
)
SANDBOX = f"""\
NoNewPrivileges=yes
CapabilityBoundingSet={_CAPABILITIES}
ProtectSystem=strict
StateDirectory=vfiomgr
ReadWritePaths=/run -/etc/cdi -/etc/vfiomgr -/etc/mdevctl.d
ProtectHome=read-only
PrivateTmp=yes
ProtectControlGroups=yes
ProtectKernelLogs=yes
ProtectHostname=yes
RestrictAddressFamilies=AF_UNIX AF_NETLINK
IPAddressDeny=any
RestrictNamespaces=net mnt
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service @module
SystemCallErrorNumber=EPERM
"""
"""The sandbox of the services (systemd.exec(5)): docs/decisions/0014-programs-and-services.md.

Not restricted is what its work needs: /sys, kernel modules, device nodes, other processes (users of
a device), the host's network namespace (udev events, routes), and mount namespaces of processes in
a chroot, which setns(2) enters with CAP_SYS_CHROOT (mntns_install in fs/namespace.c)."""

_REAL_TIME = """\
CapabilityBoundingSet=CAP_SYS_NICE
RestrictRealtime=no
"""
"""Additional rights for the listeners (passthrough/watch.py), which race with the kernel."""


def render_unit(program: str) -> str:
    """Render the unit, which udev starts with the first persisted function (SYSTEMD_WANTS).

    Raises:
        Refusal: the path would need quoting.

    """
    return sealed(f"""\
# vfiomgr: removed with the last rule, by vfiomgr unbind --forget.
[Unit]
Description=Bind persisted PCI functions to their VFIO drivers, also after hot-plug
After=local-fs.target

[Service]
ExecStart={require_plain(program)} persist watch
Restart=on-failure
SuccessExitStatus=130
{SANDBOX}{_REAL_TIME}""")


def require_plain(program: str) -> str:
    """Check that the command of vfiomgr needs no quoting in units and shells.

    Raises:
        Refusal: it would need quoting.

    """
    if not _PLAIN.fullmatch(program):
        message = f"cannot write a systemd unit for {program!r}: unsupported characters"
        refuse(
            "program-path",
            program,
            message,
            "install vfiomgr at a path with only letters, digits and ._+/-",
        )
    return program

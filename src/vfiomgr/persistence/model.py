"""Persistent bindings, the initramfs, and the facet `host.files` of both.

Some hosts have a tool for the initramfs that reads a hook of vfiomgr. On image-based hosts, /usr
and the initramfs belong to a deployment, and a command of its manager changes the next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Literal, get_args

from vfiomgr.diagnostic import refuse
from vfiomgr.documents.jsonable import from_jsonable, to_jsonable
from vfiomgr.documents.text import TextFile, parse_json, sealed
from vfiomgr.errors import VfiomgrError
from vfiomgr.expressions import expression
from vfiomgr.host.owners import NodeAccess, NodeFact, NodeOwner
from vfiomgr.paths import RUNTIME, HostPath
from vfiomgr.pci.model import DeviceIdentity, PciAddress
from vfiomgr.value import Value

RULES = HostPath("/etc/udev/rules.d")
DRIVERCTL = HostPath("/etc/driverctl.d")
VERSION = "vfiomgr/v1"
_PREFIX, _SUFFIX = "05-vfiomgr-", ".rules"
"""udev sorts by name; this precedes 80-drivers.rules, which loads host drivers."""
_RECORD = "# vfiomgr-record: "
LINE = ", \\\n  "
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

    names = {"driver": binding.driver, "module": binding.module}
    require_plain_device(binding.device, "leave out --persist", **names)
    record = {"api_version": VERSION, **to_jsonable(binding)}
    return "\n".join(
        [
            f"# vfiomgr: bind {binding.address} to {binding.driver}.",
            f"# Remove with: vfiomgr unbind {binding.address} --forget-only",
            _RECORD + json.dumps(record),
            *map(LINE.join, _driver_rules(binding)),
            *map(LINE.join, _access_rules(binding)),
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
    if record["api_version"] != VERSION:
        message = f"api_version is {record['api_version']!r}"
        raise ValueError(message)
    fields = {name: value for name, value in record.items() if name != "api_version"}
    return from_jsonable(PersistedBinding, fields)


def require_plain_device(device: DeviceIdentity, remedy: str, **names: str) -> None:
    """Check that rules can contain the values of a device, and names of drivers and modules.

    Raises:
        Refusal: they cannot; rules have no escapes.
    """
    for what, value, pattern in (
        *((what, name, _DRIVER) for what, name in names.items()),
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
                f"{remedy}, and report this problem",
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
        *identity_matches(device, ""),
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
        *identity_matches(device, other),
        f'ATTR{{{other}driver_override}}="{driver}"',
    ]
    return own, others


def identity_matches(device: DeviceIdentity, prefix: str) -> list[str]:
    """One match per ID, with what precedes its name; a line applies only if all matches do."""
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
            *identity_matches(binding.device, f"[pci/{binding.address}]"),
        ],
        [
            'SUBSYSTEM=="vfio-dev"',
            f'KERNELS=="{binding.address}"',
            *identity_matches(binding.device, f"[pci/{binding.address}]"),
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


Manager = Literal["rpm-ostree", "bootc", "transactional-update"]
"""What deploys the initramfs of an image-based host."""
TOOLS: tuple[str, ...] = ("initramfs-tools", "dracut", "mkinitcpio", *get_args(Manager))

_DRACUT_HOOK = HostPath("/etc/dracut.conf.d/90-vfiomgr.conf")
_MKINITCPIO_HOOK = HostPath("/etc/mkinitcpio.conf.d/vfiomgr.conf")
HOOKS: dict[str, HostPath] = {
    "initramfs-tools": HostPath("/etc/initramfs-tools/hooks/vfiomgr"),
    "dracut": _DRACUT_HOOK,
    "transactional-update": _DRACUT_HOOK,
    "mkinitcpio": _MKINITCPIO_HOOK,
}
"""The file that the tool reads; those without an entry read none."""
COMMANDS: dict[str, tuple[str, ...]] = {
    "initramfs-tools": ("update-initramfs", "-u", "-k", "all"),
    "dracut": ("dracut", "--force", "--regenerate-all"),
    "mkinitcpio": ("mkinitcpio", "-P"),
    "rpm-ostree": ("rpm-ostree", "initramfs-etc", "--force-sync"),
    "transactional-update": ("transactional-update", "initrd"),
}
"""What rebuilds the initramfs. That of bootc is part of an image, which is built elsewhere.

rpm-ostree adds the files of /etc that it is told to track, without dracut: treefile.rs and
initramfs.rs of its source. transactional-update runs dracut in a new snapshot, which has the /etc
of the running system: sbin/transactional-update.in.
"""
VERIFIED = ("initramfs-tools", "dracut", "mkinitcpio")
"""Tools whose image for the running kernel is listed after a rebuild.

Others write it for a later boot, or to a path that their boot loader chooses.
"""

_HOOK = """\
#!/bin/sh
# vfiomgr: its rules, and the modules that they name, for update-initramfs.
case "$1" in
prereqs)
    echo udev
    exit 0
    ;;
esac
. /usr/share/initramfs-tools/hook-functions
for rules in /etc/udev/rules.d/05-vfiomgr-*.rules; do
    [ -e "$rules" ] || continue
    mkdir -p "$DESTDIR/etc/udev/rules.d"
    cp -p "$rules" "$DESTDIR/etc/udev/rules.d/"
    for module in $(sed -n 's/.*"kmod load \\([A-Za-z0-9_-]*\\)".*/\\1/p' "$rules"); do
        manual_add_modules "$module"
    done
done
"""


class Initramfs(Value):
    """The configuration of the host's initramfs tool; module names with `_` for `-`."""

    tool: str
    """One of `TOOLS`, or the name of another program: it is unknown what that includes."""
    modules: tuple[str, ...] = ()
    """Modules that it includes by name."""
    classes: tuple[str, ...] = ()
    """Prefixes of the PCI classes whose drivers it includes."""
    omitted: tuple[str, ...] = ()
    """Modules that it always excludes."""
    reads_fragments: bool = True
    """Whether the tool reads the directory for vfiomgr's hook."""
    configuration: str | None = None
    """The file that the preset of the running kernel names instead of mkinitcpio.conf."""
    lacks_modprobe: bool = False
    """Whether it omits /etc/modprobe.d: dracut with hostonly=no."""

    @property
    def is_known(self) -> bool:
        """Whether it is known what it includes, and how to add rules."""
        return self.tool in TOOLS

    def brings(self, module: str | None, class_code: str) -> bool:
        """Whether it includes the driver of a function, as far as is known."""
        name = (module or "").replace("-", "_")
        if not self.is_known:
            return True
        if name in self.omitted:
            return False
        return name in self.modules or class_code.startswith(self.classes or ("none",))


def hook_mode(tool: str) -> int:
    """The mode of the hook's file."""
    return 0o755 if tool == "initramfs-tools" else 0o644


def render_hook(tool: str, bindings: Iterable[PersistedBinding]) -> str:
    """Render the hook for these bindings."""
    if tool == "initramfs-tools":
        return sealed(_HOOK)
    is_for_dracut = HOOKS[tool] == _DRACUT_HOOK
    reader = "dracut" if is_for_dracut else "mkinitcpio"
    head = f"# vfiomgr: its rules, and the modules that they name, for {reader}.\n"
    if is_for_dracut:
        return sealed(head + dracut_lines(bindings))
    files, modules = _contents(bindings)
    return sealed(f"{head}FILES+=({files})\nMODULES+=({modules})\n")


def dracut_lines(bindings: Iterable[PersistedBinding]) -> str:
    """The lines of dracut.conf(5) that add the rules and their modules."""
    files, modules = _contents(bindings)
    return f'install_items+=" {files} "\nadd_drivers+=" {modules} "\n'


def _contents(bindings: Iterable[PersistedBinding]) -> tuple[str, str]:
    kept = sorted(bindings, key=lambda binding: binding.address)
    files = " ".join(rule_file(binding.address) for binding in kept)
    return files, " ".join(sorted({binding.module for binding in kept}))


class FileFacts(
    Value,
    dict=True,
    rename={"texts": "files", "system": "settings_system", "unkept": "unkept_files"},
):
    """What persists across reboots, and the owners of nodes."""

    texts: tuple[TextFile, ...] = ()
    """The files of vfiomgr below /etc, and those of driverctl."""
    nodes: tuple[NodeFact, ...] = ()
    initramfs: Initramfs | None = None
    """None if no supported tool is installed."""
    has_systemd: bool = False
    system: str = ""
    """A key of SYSTEMS; empty for systems that keep their settings in /etc."""
    unkept: str = ""
    """What shows that files in /etc cannot be written, or are lost at a reboot."""

    @cached_property
    def bindings(self) -> tuple[PersistedBinding, ...]:
        """The bindings in vfiomgr's rules, sorted by address."""
        texts = [file.text for file in self.texts if file.path.startswith(RULES)]
        found = [binding for binding in map(parse_rule, texts) if binding is not None]
        return tuple(sorted(found, key=lambda binding: binding.address))

    @cached_property
    def driverctl_overrides(self) -> tuple[DriverctlOverride, ...]:
        """The overrides of driverctl, sorted by address."""
        files = [file for file in self.texts if file.path.startswith(DRIVERCTL)]
        found = [entry for entry in map(parse_driverctl, files) if entry is not None]
        return tuple(sorted(found, key=lambda entry: entry.address))

    @cached_property
    def _access_by_node(self) -> dict[str, NodeAccess]:
        return {node.path: node.access for node in self.nodes}

    def binding(self, address: PciAddress) -> PersistedBinding | None:
        """The binding in vfiomgr's rule for an address."""
        return next((b for b in self.bindings if b.address == address), None)

    def text(self, path: str) -> str | None:
        """The text of a file of vfiomgr."""
        return next((file.text for file in self.texts if file.path == path), None)

    def access(self, path: str) -> NodeAccess | None:
        """Owner and mode of a node of VFIO."""
        return self._access_by_node.get(path)

"""What libvirt's errors mean: a code and a text of libvirt become a cause and a remedy.

Codes are those of include/libvirt/virterror.h; texts those of libvirt 9.0 to 12. What a daemon in
another language than English says, and what no row knows, is told in libvirt's own words.
"""

from __future__ import annotations

import re
import shlex
from enum import IntEnum

from vfiomgr.errors import InvalidDocument, LibvirtFailed, UnknownDevice, UsageError, VfiomgrError
from vfiomgr.value import Value


class Code(IntEnum):
    """virErrorNumber, as far as causes are known."""

    INTERNAL_ERROR = 1
    NO_SUPPORT = 3
    NO_CONNECT = 5
    INVALID_ARG = 8
    OPERATION_FAILED = 9
    NO_NAME = 21
    XML_ERROR = 27
    OPERATION_DENIED = 29
    XML_DETAIL = 35
    SYSTEM_ERROR = 38
    RPC = 39
    NO_DOMAIN = 42
    AUTH_FAILED = 45
    NO_NODE_DEVICE = 53
    OPERATION_INVALID = 55
    CONFIG_UNSUPPORTED = 67
    OPERATION_TIMEOUT = 68
    HOOK_SCRIPT_FAILED = 70
    ARGUMENT_UNSUPPORTED = 74
    AUTH_CANCELLED = 79
    NO_DOMAIN_METADATA = 80
    ACCESS_DENIED = 88
    XML_INVALID_SCHEMA = 92
    AUTH_UNAVAILABLE = 94
    DEVICE_MISSING = 99


_ANY = frozenset(Code)
_DOCUMENT = frozenset({Code.XML_ERROR, Code.NO_NAME})
_UNREACHED = frozenset({Code.SYSTEM_ERROR, Code.RPC, Code.INTERNAL_ERROR})
_DENIED = frozenset(
    {
        Code.OPERATION_DENIED,
        Code.ACCESS_DENIED,
        Code.AUTH_FAILED,
        Code.AUTH_CANCELLED,
        Code.AUTH_UNAVAILABLE,
    }
)
_STATE = frozenset({Code.OPERATION_INVALID})
_CONFIG = frozenset({Code.CONFIG_UNSUPPORTED})
_QEMU = frozenset({Code.INTERNAL_ERROR, Code.OPERATION_FAILED})
_MOST_WORDS = 600
_NAMES = frozenset({"subject", "name", "domain"})
"""Names that people choose: quoted where a hint tells a command."""


class _Row(Value):
    """One cause: codes and a pattern; message and hint take the groups of the pattern by name."""

    codes: frozenset[Code]
    pattern: str
    message: str
    hint: str
    error: type[VfiomgrError] = LibvirtFailed


_ROWS: tuple[_Row, ...] = (
    # the connection
    _Row(
        _UNREACHED,
        r"Failed to connect socket to '(?P<socket>[^']+)': (No such file|Connection refused)",
        "no libvirt daemon listens on {socket}",
        "start it (systemctl start libvirtd, or virtqemud), or name another with --connect URI",
    ),
    _Row(
        _UNREACHED,
        r"Failed to connect socket to '(?P<socket>[^']+)': Permission denied",
        "this user may not use the libvirt daemon on {socket}",
        "run as root, or as a member of the group libvirt",
    ),
    _Row(
        _UNREACHED,
        r"unable to connect to server at '(?P<server>[^']+)': (?P<why>.+)",
        "no libvirt daemon answers at {server}: {why}",
        "is it running, and does it listen there? virsh --connect URI version shows the same",
    ),
    _Row(
        _UNREACHED,
        r"Could not resolve hostname (?P<host>[^\s:]+)"
        r"|[Uu]nable to resolve address '(?P<name>[^']+)'",
        "the host {host}{name} of {subject} has no address that this one knows",
        "is its name right? getent hosts {host}{name} shows whether it is known",
    ),
    _Row(
        _UNREACHED,
        r"Cannot recv data: (?P<why>(?:ssh: |Host key verification|.*Permission denied)(?s:.+))",
        "ssh brought no connection to {subject}: {why}",
        "libvirt asks for no password: does ssh reach that host without one, as this user?",
    ),
    _Row(
        _UNREACHED,
        r"Cannot recv data|client socket is closed|End of file while reading data",
        "the libvirt daemon closed the connection: {text}",
        "see its log (journalctl -u libvirtd, or virtqemud), and run the command again",
    ),
    _Row(
        frozenset({Code.NO_CONNECT, Code.INVALID_ARG}),
        r"no connection driver available for (?P<uri>.+)|(?:failed to )?parse(?: connection)? URI",
        "libvirt has no driver for the URI {subject}: {text}",
        "--connect takes URIs like qemu:///system: https://libvirt.org/uri.html",
        UsageError,
    ),
    _Row(
        _DENIED,
        r"read only access prevents (?P<call>\w+)",
        "the connection is for reading alone, and libvirt refuses {call}",
        "connect as root, or as a member of the group libvirt",
    ),
    _Row(
        _DENIED,
        r"",
        "libvirt does not let this user do it: {text}",
        "run as root, as a member of the group libvirt, or have polkit allow it",
    ),
    # names
    _Row(
        frozenset({Code.NO_DOMAIN}),
        r"",
        "libvirt has no domain {subject}",
        "virsh list --all shows those it has; --connect names another libvirt",
        UsageError,
    ),
    _Row(
        frozenset({Code.NO_NODE_DEVICE}),
        r"",
        "libvirt knows no such device of the host: {text}",
        "virsh nodedev-list shows those it knows; its list follows udev, so run: udevadm settle",
        UnknownDevice,
    ),
    _Row(
        frozenset({Code.OPERATION_FAILED}),
        r"domain '(?P<name>[^']*)' already exists with uuid (?P<uuid>\S+)",
        "there is a domain {name} already, with the UUID {uuid}",
        "to change it, leave <uuid> out of {subject}, or make it {uuid}; else choose another name",
    ),
    _Row(
        frozenset({Code.OPERATION_FAILED}),
        r"domain '(?P<name>[^']*)' is already defined with uuid (?P<uuid>\S+)",
        "the UUID {uuid} is that of the domain {name}",
        "for a domain of its own leave <uuid> out of {subject}; to give {name} another name: "
        "virsh domrename {name} NEW",
    ),
    # documents
    _Row(
        frozenset({Code.XML_INVALID_SCHEMA}),
        r"",
        "this libvirt's schema does not accept {subject}: {text}",
        "something in it is misspelt, misplaced, or newer than this libvirt; "
        "vfiomgr check domain tells what of devices is too new for it",
        InvalidDocument,
    ),
    _Row(
        _DOCUMENT,
        r"Hostdev already exists in the domain configuration",
        "{subject} has the same device of the host twice",
        "leave one of its <hostdev> elements out",
        InvalidDocument,
    ),
    _Row(
        _DOCUMENT,
        r"Invalid PCI address (?P<address>\S+)\. slot must be <= 0",
        "the guest address {address} is behind a root port, where the only slot is 0",
        "write slot='0x00', or leave the guest <address> out",
        InvalidDocument,
    ),
    _Row(
        _DOCUMENT | {Code.INTERNAL_ERROR, Code.CONFIG_UNSUPPORTED},
        r"No more available PCI slots",
        "no PCI slot of the guest is left for the device",
        "a running guest needs a free root port: add <controller type='pci' "
        "model='pcie-root-port'/> to its definition, and start it anew",
    ),
    _Row(
        _DOCUMENT | {Code.CONFIG_UNSUPPORTED, Code.INTERNAL_ERROR},
        r"device at PCI address (?P<address>\S+) requires hotplug capability, "
        r"but the PCI controller with index='(?P<index>\d+)'",
        "the guest's PCI controller {index} takes no devices while it runs ({address})",
        "choose a root port without <target hotplug='off'/>, or attach with --config alone",
    ),
    _Row(
        _ANY,
        r"Only PCI device addresses with function=0 are supported",
        "a function other than 0 cannot be given to a running guest: {text}",
        "attach with --config alone, and start the guest anew",
    ),
    _Row(
        frozenset({Code.XML_DETAIL}),
        r"",
        "{subject} is no XML: {text}",
        "xmllint --noout FILE shows the place",
        InvalidDocument,
    ),
    _Row(
        _DOCUMENT,
        r"",
        "libvirt does not accept {subject}: {text}",
        "what each element may be: https://libvirt.org/formatdomain.html",
        InvalidDocument,
    ),
    # domains and devices
    _Row(
        _STATE,
        r"PCI device (?P<device>\S+) is in use by driver (?P<driver>\w+), domain (?P<domain>.+)",
        "{device} is with the domain {domain} ({driver}), which runs",
        "stop that domain, or: vfiomgr libvirt detach {domain} {device} --live",
    ),
    _Row(
        _STATE,
        r"mediated device (?P<device>\S+) is in use by driver (?P<driver>\w+), "
        r"domain (?P<domain>.+)",
        "the vGPU {device} is with the domain {domain} ({driver}), which runs",
        "stop that domain, or: vfiomgr libvirt detach {domain} {device} --live",
    ),
    _Row(
        _STATE,
        r"Unmanaged PCI device (?P<device>\S+) must be manually detached from the host",
        "{device} is on a driver that is none of VFIO to libvirt, and managed='no' leaves it there",
        "vfiomgr show {device} tells what makes it ready for guests; before libvirt 9.7.0 that is "
        "vfio-pci alone, no variant of it and no driver of a vendor",
    ),
    _Row(
        _STATE | {Code.OPERATION_FAILED, Code.CONFIG_UNSUPPORTED},
        r"device is already in the domain configuration|target .* already exists",
        "{subject} has the device already",
        "vfiomgr libvirt list --domain NAME shows what it has",
    ),
    _Row(
        _ANY,
        r"non unique alias detected: (?P<alias>\S+)",
        "{subject} has a device with the alias {alias} already",
        "vfiomgr libvirt list --domain NAME shows its devices; detach that one first, or give "
        "the <alias> of either another name",
    ),
    _Row(
        _STATE,
        r"domain (?:'[^']*' )?is not running",
        "{subject} is not running",
        "leave out --live, or start it with: virsh start NAME",
    ),
    _Row(
        _STATE,
        r"transient domains do not have any persistent config",
        "{subject} is transient: it has no definition that could be changed",
        "pass --live alone, or keep it with: virsh define FILE",
    ),
    _Row(
        _ANY,
        r"cannot hot unplug (?P<kind>\S+) device with multifunction PCI guest address",
        "a function of a multifunction device cannot be taken from a running guest",
        "pass --config alone: it is gone once the guest is started anew",
    ),
    _Row(
        frozenset({Code.DEVICE_MISSING}),
        r"mediated device '?(?P<uuid>[-0-9a-fA-F]{36})'? not found",
        "the vGPU {uuid} is not active",
        "vfiomgr vgpu start {uuid} makes one that is defined; vfiomgr vgpu list shows the active",
    ),
    _Row(
        frozenset({Code.DEVICE_MISSING, Code.OPERATION_FAILED}),
        r"device not found|not found|not present in domain configuration",
        "{subject} does not have the device: {text}",
        "vfiomgr libvirt list --domain NAME shows what it has",
    ),
    _Row(
        _CONFIG | {Code.ARGUMENT_UNSUPPORTED, Code.INTERNAL_ERROR},
        r"host doesn't support VFIO PCI passthrough"
        r"|VFIO device assignment is (?:currently )?not supported",
        "libvirt finds no VFIO on its host: the IOMMU is off, or vfio-pci is not loaded",
        "vfiomgr check names what is missing; modprobe vfio-pci, once the IOMMU is on",
    ),
    _Row(
        _CONFIG,
        r"does not support virt type 'kvm'",
        "libvirt's host has no KVM: {text}",
        "enable virtualisation in its firmware and load kvm_intel or kvm_amd; vfiomgr check",
    ),
    _Row(
        _CONFIG,
        r"graphics device is needed for attribute value 'display=on'",
        "display='on' of a vGPU needs a display of the guest to show it on",
        "add <graphics type='spice'/> (or vnc) to its <devices>, or take display='on' out",
        InvalidDocument,
    ),
    _Row(
        _CONFIG,
        r"per-device boot elements cannot be used together with os/boot",
        "<boot order> of a device and <boot dev> of <os> exclude each other",
        "take <boot dev> out of <os>, and give each bootable device an order",
        InvalidDocument,
    ),
    _Row(
        _CONFIG,
        r"ROM tuning is not supported when ROM is disabled",
        "<rom enabled='no'> excludes a bar and a file: {text}",
        "leave one of them out",
        InvalidDocument,
    ),
    _Row(
        frozenset({Code.OPERATION_TIMEOUT}),
        r"cannot acquire state change lock(?: \((?P<holder>[^)]*)\))?",
        "another operation on {subject} has not ended: {text}",
        "wait for it (a start, a migration, a detach), or end it with: virsh domjobabort NAME",
    ),
    _Row(
        _ANY,
        r"is already in the process of unplug",
        "{subject} was asked for the device a moment ago, and has not answered yet",
        "run the command again in a few seconds; it is released when the guest's system answers",
    ),
    # the start of a guest, and live attachment
    _Row(
        _QEMU,
        r"group (?P<group>\d+) is not viable",
        "IOMMU group {group} is not viable: another function in it is on a driver of the host",
        "vfiomgr groups names it; vfiomgr bind ADDRESS --with-group takes all",
    ),
    _Row(
        _QEMU,
        r"Unknown PCI header type '?127'?(?: for device '(?P<device>[^']*)')?",
        "the device does not answer: its configuration space reads as all ones",
        "vfiomgr reset ADDRESS; where that fails, only a power cycle of the host brings it back",
    ),
    _Row(
        _ANY,
        r"[Cc]annot limit locked memory|[Ff]ailed to adjust locked memory limit",
        "libvirt may not raise the limit of locked memory for the guest: {text}",
        "give the daemon CAP_SYS_RESOURCE, or raise its limit (LimitMEMLOCK= of its unit)",
    ),
    _Row(
        _QEMU,
        r"(?:VFIO_MAP_DMA|vfio_dma_map|vfio_container_dma_map).*(?:Cannot allocate memory|-12)",
        "the guest may not lock as much memory as its devices need: {text}",
        "take <hard_limit> out of its <memtune>, or raise it above its memory and 1 GiB",
    ),
    _Row(
        _QEMU,
        r"[Dd]evice or resource busy",
        "something else has the device open: {text}",
        "vfiomgr show ADDRESS names who holds it",
    ),
    _Row(
        frozenset({Code.HOOK_SCRIPT_FAILED}),
        r"",
        "a hook script of libvirt refused it: {text}",
        "the message of the script is the cause; vfiomgr's own is /etc/libvirt/hooks/qemu.d/"
        "50-vfiomgr",
    ),
    _Row(
        _QEMU,
        r"Unable to (?P<what>create|define|start|undefine|set autostart of) mediated device:? "
        r"(?P<why>(?s:.+))",
        "mdevctl, which libvirt calls, failed: {why}",
        "vfiomgr vgpu types shows what has room; is mdevctl installed on libvirt's host?",
    ),
    _Row(
        _QEMU,
        r"qemu unexpectedly closed the monitor:?\s*(?P<why>(?s:.*))",
        "QEMU ended at once: {why}",
        "vfiomgr check domain DOMAIN looks for causes; its log is /var/log/libvirt/qemu/NAME.log",
    ),
    _Row(
        frozenset({Code.NO_SUPPORT, Code.ARGUMENT_UNSUPPORTED}),
        r"",
        "this libvirt cannot do that: {text}",
        "it needs a later release, or another driver (--connect qemu:///system)",
    ),
)


def explain(code: int, text: str, subject: str) -> VfiomgrError:
    """What to tell of an error of libvirt; `subject` is the domain or the file that it is about."""
    words = _shortened(text)
    for row in _ROWS:
        found = re.search(row.pattern, text) if code in row.codes else None
        if found is not None:
            parts = {name: _shortened(part or "") for name, part in found.groupdict().items()}
            known = {"text": words, "subject": subject, **parts}
            told = {**known, **{name: shlex.quote(known[name]) for name in _NAMES & known.keys()}}
            return _error(row.error, code, row.message.format(**known), row.hint.format(**told))
    message = f"libvirt: {words or 'it failed without a word'} (error {code}, {subject})"
    return LibvirtFailed(message, "its log may tell more: journalctl -u libvirtd", code=code)


def _error(kind: type[VfiomgrError], code: int, message: str, hint: str) -> VfiomgrError:
    if kind is LibvirtFailed:
        return LibvirtFailed(message, hint, code=code)
    return kind(message, hint)


def _shortened(text: str) -> str:
    """On one line, and no essay."""
    words = " ".join(text.split())
    return words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]}…"

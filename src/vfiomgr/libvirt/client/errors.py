"""Translate libvirt's errors: code, domain and errno, then the text, become a cause and a remedy.

virReportSystemErrorFull of src/util/virerror.c keeps the errno. All errors are those that libvirt
9.0, 11.3 and 12.8 made (tests/unit/libvirt/errors_seen.json), or their sources are named beside the
tests of the table (test_client_errors.py).

A daemon translates its texts (LANG in its environment), this process does not: Python leaves
LC_MESSAGES at C. So rows without a pattern, and those whose pattern has only words of QEMU, names
and numbers, also match translated texts. Others need libvirt's words: most codes have many causes
in one domain. Errors that match no row keep libvirt's own words.
"""

from __future__ import annotations

import errno
import re
import shlex

from vfiomgr.errors import InvalidDocument, LibvirtFailed, UnknownDevice, UsageError, VfiomgrError
from vfiomgr.libvirt.client.error_codes import Code, ErrorDomain, ReportedError
from vfiomgr.value import Value

_RPC = frozenset({ErrorDomain.RPC})
_OF_QEMU = frozenset({ErrorDomain.QEMU})
LOGS = "journalctl -u libvirtd -u virtqemud"
"""The log of the daemon for QEMU, the single one or that of its own; unknown units are ignored."""
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
_SOCKET = r"(?P<socket>/[^\s']+-sock(?:-ro)?)\b"
"""A Unix socket of a daemon, in texts of any language: ENOENT and EACCES also have TLS and ssh."""
_MOST_WORDS = 600
_NAMES = frozenset({"subject", "name", "domain"})
"""Names that people choose: quoted where a hint names a command."""


class _Row(Value):
    """One cause; message and hint use the groups of the pattern by name."""

    codes: frozenset[Code]
    pattern: str
    message: str
    hint: str
    error: type[VfiomgrError] = LibvirtFailed
    domains: frozenset[ErrorDomain] = frozenset()
    """Empty if any part of libvirt reports it."""
    errnos: frozenset[int] = frozenset()
    """Empty if the cause does not depend on it."""

    def match(self, seen: ReportedError) -> re.Match[str] | None:
        """Match code, domain and errno first, the text second."""
        is_of = seen.code in self.codes and (not self.domains or seen.domain in self.domains)
        if not is_of or (self.errnos and seen.errno not in self.errnos):
            return None
        return re.search(self.pattern, seen.text)


_ROWS: tuple[_Row, ...] = (
    # the connection
    _Row(
        _UNREACHED,
        r"Failed to connect socket to '(?P<socket>[^']*/(?P<daemon>virt[a-z]+d)-sock[^']*)': "
        r"(No such file|Connection refused)",
        "no libvirt daemon listens on {socket}",
        "systemctl start {daemon}.socket, or pass another --connect URI",
        domains=_RPC,
    ),
    _Row(
        _UNREACHED,
        r"Failed to connect socket to '(?P<socket>[^']+)': (No such file|Connection refused)",
        "no libvirt daemon listens on {socket}",
        "systemctl start libvirtd (or virtqemud), or pass another --connect URI",
        domains=_RPC,
    ),
    _Row(
        _UNREACHED,
        r"Failed to connect socket to '(?P<socket>[^']+)': Permission denied",
        "no permission to use the libvirt daemon on {socket}",
        "run as root, or as a member of the group libvirt",
        domains=_RPC,
    ),
    _Row(
        _UNREACHED,
        r"unable to connect to server at '(?P<server>[^']+)': (?P<why>.+)",
        "cannot connect to libvirt at {server}: {why}",
        "check that it runs and listens there: virsh --connect URI version",
        domains=_RPC,
    ),
    _Row(
        _UNREACHED,
        r"Could not resolve hostname (?P<host>[^\s:]+)"
        r"|[Uu]nable to resolve address '(?P<name>[^']+)'",
        "cannot resolve host {host}{name} of {subject}",
        "check the name: getent hosts {host}{name}",
        domains=_RPC,
    ),
    _Row(
        _UNREACHED,
        r"Cannot recv data: (?P<why>(?:ssh: |Host key verification|.*Permission denied)(?s:.+))",
        "cannot connect to {subject} with ssh: {why}",
        "make sure that ssh connects to that host as this user without a password",
        domains=_RPC,
    ),
    _Row(
        _UNREACHED,
        r"Cannot (recv|write) data|client socket is closed|End of file while reading data",
        "the libvirt daemon closed the connection: {text}",
        f"see its log ({LOGS}), then run the command again",
        domains=_RPC,
    ),
    _Row(
        _UNREACHED,
        r"Cannot read (?P<what>[^']+) '(?P<file>[^']+)'",
        "cannot connect to {subject} with TLS: {text}",
        "put the {what} at {file}, readable for this user (https://libvirt.org/kbase/tlscerts.html)"
        ", or connect without TLS: qemu:///system, qemu+ssh://HOST/system",
        domains=_RPC,
    ),
    _Row(
        frozenset({Code.SYSTEM_ERROR}),
        _SOCKET,
        "no libvirt daemon listens on {socket}: {text}",
        "systemctl start libvirtd (or virtqemud), or pass another --connect URI",
        domains=_RPC,
        errnos=frozenset({errno.ENOENT, errno.ECONNREFUSED}),
    ),
    _Row(
        frozenset({Code.SYSTEM_ERROR}),
        _SOCKET,
        "no permission to use the libvirt daemon on {socket}: {text}",
        "run as root, or as a member of the group libvirt",
        domains=_RPC,
        errnos=frozenset({errno.EACCES}),
    ),
    _Row(
        _UNREACHED,
        r"",
        "the connection to libvirt failed: {text}",
        f"see the log of the daemon ({LOGS}), then run the command again",
        domains=_RPC,
    ),
    _Row(
        frozenset({Code.NO_CONNECT, Code.INVALID_ARG}),
        r"no connection driver available for (?P<uri>.+)|(?:failed to )?parse(?: connection)? URI"
        r"|transport in URL not recogni[sz]ed",
        "no libvirt driver for URI {subject}: {text}",
        "use a URI such as qemu:///system: https://libvirt.org/uri.html",
        UsageError,
    ),
    _Row(
        _DENIED,
        r"read only access prevents (?P<call>\w+)",
        "cannot call {call}: the connection is read-only",
        "connect as root, or as a member of the group libvirt",
    ),
    _Row(
        _DENIED,
        r"",
        "libvirt denies this user the operation: {text}",
        "run as root, as a member of the group libvirt, or allow it in polkit",
    ),
    # names
    _Row(
        frozenset({Code.NO_DOMAIN}),
        r"",
        "no such domain: {subject}",
        "virsh list --all shows the domains; --connect selects another libvirt",
        UsageError,
    ),
    _Row(
        frozenset({Code.NO_NODE_DEVICE}),
        r"",
        "libvirt has no such host device: {text}",
        "virsh nodedev-list shows the devices; update the list with: udevadm settle",
        UnknownDevice,
    ),
    _Row(
        frozenset({Code.OPERATION_FAILED}),
        r"domain '(?P<name>[^']*)' already exists with uuid (?P<uuid>\S+)",
        "domain {name} already exists, with UUID {uuid}",
        "to change it, omit <uuid> in {subject} or set it to {uuid}; otherwise choose another name",
    ),
    _Row(
        frozenset({Code.OPERATION_FAILED}),
        r"domain '(?P<name>[^']*)' is already defined with uuid (?P<uuid>\S+)",
        "UUID {uuid} belongs to domain {name}",
        "for a new domain omit <uuid> in {subject}; to rename {name}: virsh domrename {name} NEW",
    ),
    # documents
    _Row(
        frozenset({Code.XML_INVALID_SCHEMA}),
        r"",
        "libvirt's schema rejects {subject}: {text}",
        "check for misspelled, misplaced or newer elements; for devices: vfiomgr check domain",
        InvalidDocument,
    ),
    _Row(
        _DOCUMENT,
        r"Hostdev already exists in the domain configuration",
        "{subject} contains the same host device twice",
        "remove one of its <hostdev> elements",
        InvalidDocument,
    ),
    _Row(
        _DOCUMENT,
        r"Invalid PCI address (?P<address>\S+)\. slot must be <= 0",
        "guest address {address} is behind a root port, which has only slot 0",
        "write slot='0x00', or omit the guest <address>",
        InvalidDocument,
    ),
    _Row(
        _DOCUMENT | {Code.INTERNAL_ERROR, Code.CONFIG_UNSUPPORTED},
        r"No more available PCI slots",
        "no PCI slot of the guest is free for the device",
        "add <controller type='pci' model='pcie-root-port'/> to the definition and restart the "
        "guest",
    ),
    _Row(
        _DOCUMENT | {Code.CONFIG_UNSUPPORTED, Code.INTERNAL_ERROR},
        r"device at PCI address (?P<address>\S+) requires hotplug capability, "
        r"but the PCI controller with index='(?P<index>\d+)'",
        "PCI controller {index} of the guest does not support hot-plug ({address})",
        "choose a root port without <target hotplug='off'/>, or attach with --config only",
    ),
    _Row(
        _ANY,
        r"Only PCI device addresses with function=0 are supported",
        "cannot attach a function other than 0 to a running guest: {text}",
        "attach with --config only, and restart the guest",
    ),
    _Row(
        frozenset({Code.XML_DETAIL}),
        r"",
        "{subject} is not valid XML: {text}",
        "find the place with: xmllint --noout FILE",
        InvalidDocument,
    ),
    _Row(
        _DOCUMENT,
        r"",
        "libvirt rejects {subject}: {text}",
        "see https://libvirt.org/formatdomain.html for each element",
        InvalidDocument,
    ),
    # domains and devices
    _Row(
        _STATE,
        r"PCI device (?P<device>\S+) is in use by driver (?P<driver>\w+), domain (?P<domain>.+)",
        "{device} is in use by the running domain {domain} ({driver})",
        "stop that domain, or run: vfiomgr libvirt detach {domain} {device} --live",
    ),
    _Row(
        _STATE,
        r"mediated device (?P<device>\S+) is in use by driver (?P<driver>\w+), "
        r"domain (?P<domain>.+)",
        "vGPU {device} is in use by the running domain {domain} ({driver})",
        "stop that domain, or run: vfiomgr libvirt detach {domain} {device} --live",
    ),
    _Row(
        _STATE,
        r"Unmanaged PCI device (?P<device>\S+) must be manually detached from the host",
        "{device} is not on a driver that libvirt accepts for VFIO, and managed='no' does not "
        "change that",
        "vfiomgr show {device} shows how to make it available to guests; libvirt before 9.7.0 "
        "accepts only vfio-pci, not its variants or vendor drivers",
    ),
    _Row(
        _STATE | {Code.OPERATION_FAILED, Code.CONFIG_UNSUPPORTED},
        r"device is already in the domain configuration|target .* already exists",
        "{subject} already has the device",
        "vfiomgr libvirt list --domain NAME shows what it has",
    ),
    _Row(
        _ANY,
        r"non unique alias detected: (?P<alias>\S+)",
        "{subject} already has a device with alias {alias}",
        "list its devices with: vfiomgr libvirt list --domain NAME; detach that device first, "
        "or change the <alias> of one",
    ),
    _Row(
        _STATE,
        r"domain (?:'[^']*' )?is not running",
        "domain {subject} is not running",
        "omit --live, or start it: virsh start NAME",
    ),
    _Row(
        _STATE,
        r"transient domains do not have any persistent config",
        "{subject} is transient: it has no definition to change",
        "pass only --live, or define it: virsh define FILE",
    ),
    _Row(
        _ANY,
        r"cannot hot unplug (?P<kind>\S+) device with multifunction PCI guest address",
        "cannot detach a function of a multifunction device from a running guest",
        "pass only --config; the change takes effect when the guest is restarted",
    ),
    _Row(
        frozenset({Code.DEVICE_MISSING}),
        r"(?P<uuid>[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})",
        "vGPU {uuid} is not active",
        "start it if it is defined: vfiomgr vgpu start {uuid}; list active vGPUs: vfiomgr vgpu "
        "list",
        domains=frozenset({ErrorDomain.NONE}),
    ),
    _Row(
        frozenset({Code.DEVICE_MISSING, Code.OPERATION_FAILED}),
        r"device not found|not found|not present in domain configuration",
        "{subject} does not have the device: {text}",
        "vfiomgr libvirt list --domain NAME shows what it has",
    ),
    _Row(
        frozenset({Code.DEVICE_MISSING}),
        r"",
        "{subject} does not have the device: {text}",
        "vfiomgr libvirt list --domain NAME shows what it has",
        domains=_OF_QEMU,
    ),
    _Row(
        _CONFIG | {Code.ARGUMENT_UNSUPPORTED, Code.INTERNAL_ERROR},
        r"host doesn't support VFIO PCI passthrough"
        r"|host doesn't support passthrough of host PCI devices"
        r"|VFIO (?:PCI )?device assignment is (?:currently )?not supported"
        r"|Mediated host device assignment requires VFIO support",
        "libvirt finds no VFIO support on its host: the IOMMU is off, or vfio-pci is not loaded",
        "vfiomgr check shows what is missing; if the IOMMU is on: modprobe vfio-pci",
    ),
    _Row(
        _CONFIG | {Code.ARGUMENT_UNSUPPORTED, Code.INTERNAL_ERROR},
        r"IOMMUFD is not supported by host kernel",
        "the domain uses iommufd, but libvirt's host has no /dev/iommu",
        "modprobe iommufd, or boot a kernel with CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV; or "
        "remove iommufd from the domain: VFIO groups work without it",
    ),
    _Row(
        _CONFIG,
        r"does not support virt type 'kvm'",
        "libvirt's host does not support KVM: {text}",
        "enable virtualization in the firmware setup and load kvm_intel or kvm_amd; vfiomgr check",
    ),
    _Row(
        _CONFIG,
        r"graphics device is needed for attribute value 'display=on'",
        "display='on' of a vGPU requires graphics in the guest",
        "add <graphics type='spice'/> (or vnc) to its <devices>, or remove display='on'",
        InvalidDocument,
    ),
    _Row(
        _CONFIG,
        r"per-device boot elements cannot be used together with os/boot",
        "a device has <boot order>, but <os> has <boot dev>: only one of them is allowed",
        "remove <boot dev> from <os>, and set an order for each bootable device",
        InvalidDocument,
    ),
    _Row(
        _CONFIG,
        r"ROM tuning is not supported when ROM is disabled",
        "<rom enabled='no'> does not allow a bar or a file: {text}",
        "remove one of them",
        InvalidDocument,
    ),
    _Row(
        frozenset({Code.OPERATION_TIMEOUT}),
        r"cannot acquire state change lock(?: \((?P<holder>[^)]*)\))?",
        "another operation on {subject} is still running: {text}",
        "wait until it ends (a start, a migration, a detach), or abort it: virsh domjobabort NAME",
    ),
    _Row(
        _ANY,
        r"is already in the process of unplug",
        "{subject} has not answered a previous request to release the device",
        "run the command again in a few seconds; the guest's system must answer",
    ),
    # the start of a guest, and live attachment
    _Row(
        _QEMU,
        r"group (?P<group>\d+) is not viable",
        "IOMMU group {group} is not viable: another function in it is on a host driver",
        "vfiomgr groups shows it; vfiomgr bind ADDRESS --with-group binds all of them",
        domains=_OF_QEMU,
    ),
    _Row(
        _QEMU,
        r"Unknown PCI header type '?127'?(?: for device '(?P<device>[^']*)')?",
        "the device does not respond: its configuration space reads as all ones",
        "vfiomgr reset ADDRESS; if that fails, power-cycle the host",
    ),
    _Row(
        _ANY,
        r"[Cc]annot limit locked memory|[Ff]ailed to adjust locked memory limit",
        "cannot raise the locked memory limit of the guest: {text}",
        "give the daemon CAP_SYS_RESOURCE, or raise its limit (LimitMEMLOCK= in its unit)",
    ),
    _Row(
        _QEMU,
        r"(?:VFIO_MAP_DMA|IOMMU_IOAS_MAP|vfio_dma_map|vfio_container_dma_map)"
        r".*(?:Cannot allocate memory|-12)",
        "the guest may not lock as much memory as its devices need: {text}",
        "remove <hard_limit> from its <memtune>, or raise it above the guest's memory plus 1 GiB",
        domains=_OF_QEMU,
    ),
    _Row(
        _QEMU,
        r"[Dd]evice or resource busy",
        "the device is in use: {text}",
        "vfiomgr show ADDRESS shows what uses it",
        domains=_OF_QEMU,
    ),
    _Row(
        frozenset({Code.HOOK_SCRIPT_FAILED}),
        r"",
        "a libvirt hook script refused the operation: {text}",
        "see the message of the script; vfiomgr's script is /etc/libvirt/hooks/qemu.d/50-vfiomgr",
    ),
    _Row(
        _QEMU,
        r"Unable to (?:(?:create|define|start|undefine|modify) mediated device|set autostart on)"
        r"(?: '[^']*')?:? (?P<why>(?s:.+))",
        "mdevctl (called by libvirt) failed: {why}",
        "vfiomgr vgpu list --types shows free capacity; check that mdevctl is installed on "
        "libvirt's host",
    ),
    _Row(
        _QEMU,
        r"Process exited prior to exec|\blibvirt: [^:]+: ",
        "libvirt could not prepare the process of QEMU: {text}",
        "see /var/log/libvirt/qemu/NAME.log; for devices: vfiomgr check domain DOMAIN",
        domains=_OF_QEMU,
    ),
    _Row(
        _QEMU,
        r"(?:(?:qemu|QEMU) unexpectedly closed the monitor|process exited while connecting to "
        r"monitor)(?: \(vm='[^']*'\))?[:\s]*$",
        "QEMU exited immediately, without a message",
        "vfiomgr check domain DOMAIN looks for causes; see /var/log/libvirt/qemu/NAME.log",
        domains=_OF_QEMU,
    ),
    _Row(
        _QEMU,
        r"(?:(?:qemu|QEMU) unexpectedly closed the monitor(?: \(vm='[^']*'\))?"
        r"|process exited while connecting to monitor):?\s*(?P<why>(?s:.+))",
        "QEMU exited immediately: {why}",
        "vfiomgr check domain DOMAIN looks for causes; see /var/log/libvirt/qemu/NAME.log",
        domains=_OF_QEMU,
    ),
    _Row(
        _QEMU,
        r"(?P<why>(?:\d{4}-\d\d-\d\dT[\d:.]+Z )?\bqemu(?:-[-\w]+)?: (?s:.+))",
        "QEMU exited immediately: {why}",
        "vfiomgr check domain DOMAIN looks for causes; see /var/log/libvirt/qemu/NAME.log",
        domains=_OF_QEMU,
    ),
    _Row(
        frozenset({Code.NO_SUPPORT, Code.ARGUMENT_UNSUPPORTED}),
        r"",
        "libvirt does not support the operation: {text}",
        "use a later release, or another driver (--connect qemu:///system)",
    ),
)


def explain(seen: ReportedError, subject: str) -> VfiomgrError:
    """The error for an error of libvirt; `subject` is the domain or file that it is about."""
    words = _shortened(seen.text)
    for row in _ROWS:
        found = row.match(seen)
        if found is not None:
            parts = {name: _shortened(part or "") for name, part in found.groupdict().items()}
            known = {"text": words, "subject": subject, **parts}
            told = {**known, **{name: shlex.quote(known[name]) for name in _NAMES & known.keys()}}
            message, hint = row.message.format(**known), row.hint.format(**told)
            return _error(row.error, seen.code, message, hint)
    message = f"libvirt: {words or 'unknown error'} (error {seen.code}, {subject})"
    return LibvirtFailed(message, _where_to_look(seen.domain), code=seen.code)


def _where_to_look(domain: int) -> str:
    if domain == ErrorDomain.QEMU:
        return f"see /var/log/libvirt/qemu/NAME.log of the guest, and libvirt's log: {LOGS}"
    if domain == ErrorDomain.NODEDEV:
        return "see its log: journalctl -u libvirtd -u virtnodedevd"
    return f"see its log: {LOGS}"


def _error(kind: type[VfiomgrError], code: int, message: str, hint: str) -> VfiomgrError:
    if kind is LibvirtFailed:
        return LibvirtFailed(message, hint, code=code)
    return kind(message, hint)


def _shortened(text: str) -> str:
    """The text on one line, shortened."""
    words = " ".join(text.split())
    return words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]}…"

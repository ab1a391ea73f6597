"""Each row of causes: what libvirt says, and what vfiomgr makes of it."""

from __future__ import annotations

import re

import libvirt
import pytest

from vfiomgr.errors import InvalidDocument, LibvirtFailed, UnknownDevice, UsageError, VfiomgrError
from vfiomgr.libvirt.client import errors as client_errors
from vfiomgr.libvirt.client.errors import Code, explain

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"

# code, libvirt's text, the kind of error, a part of the message, a part of the hint
ROWS: list[tuple[Code, str, type[VfiomgrError], str, str]] = [
    (
        Code.SYSTEM_ERROR,
        "Failed to connect socket to '/var/run/libvirt/libvirt-sock': No such file or directory",
        LibvirtFailed,
        "no libvirt daemon listens on /var/run/libvirt/libvirt-sock",
        "systemctl start libvirtd",
    ),
    (
        Code.SYSTEM_ERROR,
        "Failed to connect socket to '/var/run/libvirt/libvirt-sock': Permission denied",
        LibvirtFailed,
        "this user may not use the libvirt daemon",
        "group libvirt",
    ),
    (
        Code.SYSTEM_ERROR,
        "unable to connect to server at '127.0.0.1:16509': Connection refused",
        LibvirtFailed,
        "no libvirt daemon answers at 127.0.0.1:16509: Connection refused",
        "does it listen",
    ),
    (
        Code.SYSTEM_ERROR,
        "Cannot recv data: Connection reset by peer",
        LibvirtFailed,
        "closed the connection",
        "journalctl",
    ),
    (
        Code.SYSTEM_ERROR,
        "Cannot recv data: ssh: Could not resolve hostname nohost.invalid: Name is not known",
        LibvirtFailed,
        "the host nohost.invalid of win has no address",
        "getent hosts nohost.invalid",
    ),
    (
        Code.SYSTEM_ERROR,
        "Unable to resolve address 'nohost.invalid' service '16509': Name or service not known",
        LibvirtFailed,
        "the host nohost.invalid of win has no address",
        "getent hosts nohost.invalid",
    ),
    (
        Code.SYSTEM_ERROR,
        "Cannot recv data: Host key verification failed.: Connection reset by peer",
        LibvirtFailed,
        "ssh brought no connection to win: Host key verification failed",
        "without one, as this user",
    ),
    (
        Code.SYSTEM_ERROR,
        "Cannot recv data: root@node7: Permission denied (publickey).: Connection reset by peer",
        LibvirtFailed,
        "ssh brought no connection to win: root@node7: Permission denied",
        "without one, as this user",
    ),
    (
        Code.NO_CONNECT,
        "no connection driver available for qemux:///system",
        UsageError,
        "no driver for the URI win",
        "https://libvirt.org/uri.html",
    ),
    (
        Code.OPERATION_DENIED,
        "operation forbidden: read only access prevents virDomainDefineXMLFlags",
        LibvirtFailed,
        "for reading alone, and libvirt refuses virDomainDefineXMLFlags",
        "connect as root",
    ),
    (
        Code.AUTH_UNAVAILABLE,
        "authentication unavailable: no polkit agent available",
        LibvirtFailed,
        "does not let this user",
        "polkit",
    ),
    (Code.NO_DOMAIN, "Domain not found", UsageError, "no domain win", "virsh list --all"),
    (
        Code.NO_NODE_DEVICE,
        "Node device not found: no node device with matching name 'pci_0000_65_00_0'",
        UnknownDevice,
        "pci_0000_65_00_0",
        "udevadm settle",
    ),
    (
        Code.OPERATION_FAILED,
        f"operation failed: domain 'win' already exists with uuid {UUID}",
        LibvirtFailed,
        f"a domain win already, with the UUID {UUID}",
        "leave <uuid> out of win",
    ),
    (
        Code.OPERATION_FAILED,
        f"operation failed: domain 'win' is already defined with uuid {UUID}",
        LibvirtFailed,
        f"the UUID {UUID} is that of the domain win",
        "virsh domrename win NEW",
    ),
    (
        Code.CONFIG_UNSUPPORTED,
        "unsupported configuration: non unique alias detected: ua-vfio-0000-01-00-0",
        LibvirtFailed,
        "win has a device with the alias ua-vfio-0000-01-00-0 already",
        "detach that one first",
    ),
    (
        Code.XML_INVALID_SCHEMA,
        (
            "XML document failed to validate against schema: Unable to validate doc against "
            "/usr/share/libvirt/schemas/domain.rng\nExtra element devices in interleave"
        ),
        InvalidDocument,
        "this libvirt's schema does not accept win: XML document failed",
        "misspelt, misplaced, or newer",
    ),
    (
        Code.XML_ERROR,
        "XML error: Hostdev already exists in the domain configuration",
        InvalidDocument,
        "win has the same device of the host twice",
        "leave one",
    ),
    (
        Code.XML_ERROR,
        "XML error: Invalid PCI address 0000:01:02.0. slot must be <= 0",
        InvalidDocument,
        "0000:01:02.0 is behind a root port",
        "slot='0x00'",
    ),
    (
        Code.INTERNAL_ERROR,
        "internal error: No more available PCI slots",
        LibvirtFailed,
        "no PCI slot of the guest is left",
        "model='pcie-root-port'",
    ),
    (
        Code.XML_ERROR,
        (
            "XML error: The device at PCI address 0000:02:00.0 requires hotplug capability, "
            "but the PCI controller with index='2' doesn't support hotplug"
        ),
        LibvirtFailed,
        "PCI controller 2 takes no devices while it runs",
        "hotplug='off'",
    ),
    (
        Code.CONFIG_UNSUPPORTED,
        "unsupported configuration: Only PCI device addresses with function=0 are supported",
        LibvirtFailed,
        "a function other than 0 cannot be given to a running guest",
        "--config alone",
    ),
    (
        Code.XML_DETAIL,
        "(domain_definition):1: Couldn't find end of Start Tag domain line 1\n<domain\n-------^",
        InvalidDocument,
        "win is no XML: (domain_definition):1: Couldn't find end",
        "xmllint",
    ),
    (
        Code.NO_NAME,
        "missing name information",
        InvalidDocument,
        "does not accept win: missing name",
        "formatdomain",
    ),
    (
        Code.OPERATION_INVALID,
        (
            "Requested operation is not valid: PCI device 0000:65:00.0 is in use by driver QEMU, "
            "domain lin"
        ),
        LibvirtFailed,
        "0000:65:00.0 is with the domain lin (QEMU), which runs",
        "vfiomgr libvirt detach lin 0000:65:00.0 --live",
    ),
    (
        Code.OPERATION_INVALID,
        (
            f"Requested operation is not valid: mediated device {UUID} is in use by driver QEMU, "
            "domain lin"
        ),
        LibvirtFailed,
        f"the vGPU {UUID} is with the domain lin",
        "vfiomgr libvirt detach lin",
    ),
    (
        Code.OPERATION_INVALID,
        (
            "Requested operation is not valid: Unmanaged PCI device 0000:65:00.0 must be manually "
            "detached from the host"
        ),
        LibvirtFailed,
        "0000:65:00.0 is on a driver that is none of VFIO to libvirt",
        "vfiomgr show 0000:65:00.0 tells",
    ),
    (
        Code.OPERATION_INVALID,
        "Requested operation is not valid: device is already in the domain configuration",
        LibvirtFailed,
        "win has the device already",
        "libvirt list",
    ),
    (
        Code.OPERATION_INVALID,
        "Requested operation is not valid: domain is not running",
        LibvirtFailed,
        "win is not running",
        "--live",
    ),
    (
        Code.OPERATION_INVALID,
        "Requested operation is not valid: transient domains do not have any persistent config",
        LibvirtFailed,
        "win is transient",
        "--live alone",
    ),
    (
        Code.OPERATION_FAILED,
        (
            "operation failed: cannot hot unplug hostdev device with multifunction PCI guest "
            "address: 0000:08:00.0"
        ),
        LibvirtFailed,
        "a function of a multifunction device cannot be taken",
        "--config alone",
    ),
    (
        Code.INTERNAL_ERROR,
        (
            "internal error: unable to execute QEMU command 'device_del': Device hostdev0 is "
            "already in the process of unplug"
        ),
        LibvirtFailed,
        "win was asked for the device a moment ago",
        "again in a few seconds",
    ),
    (
        Code.DEVICE_MISSING,
        f"device not found: mediated device '{UUID}' not found",
        LibvirtFailed,
        f"the vGPU {UUID} is not active",
        f"vfiomgr vgpu start {UUID}",
    ),
    (
        Code.DEVICE_MISSING,
        "device not found: device not present in domain configuration",
        LibvirtFailed,
        "win does not have the device",
        "libvirt list",
    ),
    (
        Code.CONFIG_UNSUPPORTED,
        "unsupported configuration: host doesn't support VFIO PCI passthrough",
        LibvirtFailed,
        "no VFIO on its host",
        "vfiomgr check",
    ),
    (
        Code.ARGUMENT_UNSUPPORTED,
        "argument unsupported: VFIO device assignment is currently not supported on this system",
        LibvirtFailed,
        "no VFIO on its host",
        "modprobe vfio-pci",
    ),
    (
        Code.CONFIG_UNSUPPORTED,
        (
            "unsupported configuration: Emulator '/usr/bin/qemu-kvm' does not support virt "
            "type 'kvm'"
        ),
        LibvirtFailed,
        "no KVM",
        "kvm_intel",
    ),
    (
        Code.CONFIG_UNSUPPORTED,
        (
            "unsupported configuration: graphics device is needed for attribute value 'display=on' "
            "in <hostdev>"
        ),
        InvalidDocument,
        "display='on' of a vGPU",
        "<graphics type='spice'/>",
    ),
    (
        Code.CONFIG_UNSUPPORTED,
        (
            "unsupported configuration: per-device boot elements cannot be used together with "
            "os/boot elements"
        ),
        InvalidDocument,
        "exclude each other",
        "<boot dev>",
    ),
    (
        Code.CONFIG_UNSUPPORTED,
        "unsupported configuration: ROM tuning is not supported when ROM is disabled",
        InvalidDocument,
        "<rom enabled='no'>",
        "leave one",
    ),
    (
        Code.OPERATION_TIMEOUT,
        (
            "Timed out during operation: cannot acquire state change lock (held by "
            "monitor=remoteDispatchDomainCreate)"
        ),
        LibvirtFailed,
        "another operation on win has not ended",
        "virsh domjobabort",
    ),
    (
        Code.INTERNAL_ERROR,
        (
            "internal error: qemu unexpectedly closed the monitor: -device vfio-pci: "
            "vfio 0000:65:00.0: group 25 is not viable\nPlease ensure all devices within the "
            "iommu_group are bound to their vfio bus driver."
        ),
        LibvirtFailed,
        "IOMMU group 25 is not viable",
        "--with-group",
    ),
    (
        Code.INTERNAL_ERROR,
        "internal error: Unknown PCI header type '127' for device '0000:65:00.0'",
        LibvirtFailed,
        "does not answer",
        "vfiomgr reset",
    ),
    (
        Code.INTERNAL_ERROR,
        "cannot limit locked memory of process 4711 to 3221225472: Operation not permitted",
        LibvirtFailed,
        "limit of locked memory",
        "CAP_SYS_RESOURCE",
    ),
    (
        Code.INTERNAL_ERROR,
        (
            "internal error: qemu unexpectedly closed the monitor: vfio_dma_map(0x55, 0x0, 0x8000, "
            "0x7f) = -12 (Cannot allocate memory)"
        ),
        LibvirtFailed,
        "may not lock as much memory",
        "<hard_limit>",
    ),
    (
        Code.INTERNAL_ERROR,
        (
            "internal error: unable to execute QEMU command 'device_add': vfio: failed to "
            "open /dev/vfio/25: Device or resource busy"
        ),
        LibvirtFailed,
        "something else has the device open",
        "vfiomgr show",
    ),
    (
        Code.HOOK_SCRIPT_FAILED,
        (
            "Hook script execution failed: internal error: Child process (hooks/qemu win "
            "prepare begin -) unexpected exit status 4: vfiomgr: refused: 0000:65:00.0 is in use"
        ),
        LibvirtFailed,
        "vfiomgr: refused: 0000:65:00.0 is in use",
        "50-vfiomgr",
    ),
    (
        Code.INTERNAL_ERROR,
        "internal error: Unable to start mediated device: Could not write to create: No space left",
        LibvirtFailed,
        "mdevctl, which libvirt calls, failed: Could not write to create",
        "vfiomgr vgpu types",
    ),
    (
        Code.INTERNAL_ERROR,
        "internal error: qemu unexpectedly closed the monitor: 2026-01-01 qemu-system-x86_64: boo",
        LibvirtFailed,
        "QEMU ended at once: 2026-01-01 qemu-system-x86_64: boo",
        "vfiomgr check domain",
    ),
    (
        Code.NO_SUPPORT,
        "this function is not supported by the connection driver: virDomainAttachDeviceFlags",
        LibvirtFailed,
        "this libvirt cannot do that: this function is not supported",
        "later release",
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0].name}: {row[3][:40]}")
def test_an_error_of_libvirt_names_its_cause_and_remedy(
    row: tuple[Code, str, type[VfiomgrError], str, str],
) -> None:
    code, text, kind, message, hint = row
    told = explain(code, text, "win")
    assert type(told) is kind
    assert message in told.message
    assert hint in told.hint
    assert told.hint
    assert "\n" not in told.message


def test_every_row_is_what_some_text_finds() -> None:
    """So that none is hidden by one above it."""
    expected = set(range(len(client_errors._ROWS)))
    found = {number for code, text, *_ in ROWS for number in [_first_row(code, text)]}
    assert found == expected


def _first_row(code: Code, text: str) -> int:
    return next(
        number
        for number, row in enumerate(client_errors._ROWS)
        if code in row.codes and re.search(row.pattern, text)
    )


def test_an_unknown_error_is_told_in_libvirts_own_words() -> None:
    told = explain(Code.INTERNAL_ERROR, "interner Fehler:\n  das Gerät brennt", "win")
    assert isinstance(told, LibvirtFailed)
    assert told.message == "libvirt: interner Fehler: das Gerät brennt (error 1, win)"
    assert told.code == Code.INTERNAL_ERROR


def test_a_text_with_braces_is_no_format() -> None:
    assert "{text}" in explain(Code.NO_SUPPORT, "cannot {text} {0}", "win{x}").message


@pytest.mark.parametrize("code", Code, ids=lambda code: code.name)
def test_the_codes_are_libvirts(code: Code) -> None:
    assert getattr(libvirt, f"VIR_ERR_{code.name}") == code


def test_names_are_quoted_in_hints_alone() -> None:
    text = f"operation failed: domain 'a b' is already defined with uuid {UUID}"
    error = explain(Code.OPERATION_FAILED, text, "x.xml")
    assert error.message.endswith("is that of the domain a b")
    assert "virsh domrename 'a b' NEW" in error.hint

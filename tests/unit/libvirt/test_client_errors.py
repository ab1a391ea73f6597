"""Each row of causes: what libvirt says, and what vfiomgr makes of it."""

from __future__ import annotations

import re

import libvirt
import pytest

from tests.unit.libvirt import errors_seen
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
        "no permission to use the libvirt daemon on",
        "group libvirt",
    ),
    (
        Code.SYSTEM_ERROR,
        "unable to connect to server at '127.0.0.1:16509': Connection refused",
        LibvirtFailed,
        "cannot connect to libvirt at 127.0.0.1:16509: Connection refused",
        "check that it runs and listens there: virsh --connect URI version",
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
        "cannot resolve host nohost.invalid of win",
        "getent hosts nohost.invalid",
    ),
    (
        Code.SYSTEM_ERROR,
        "Unable to resolve address 'nohost.invalid' service '16509': Name or service not known",
        LibvirtFailed,
        "cannot resolve host nohost.invalid of win",
        "getent hosts nohost.invalid",
    ),
    (
        Code.SYSTEM_ERROR,
        "Cannot recv data: Host key verification failed.: Connection reset by peer",
        LibvirtFailed,
        "cannot connect to win with ssh: Host key verification failed",
        "make sure that ssh connects to that host as this user without a password",
    ),
    (
        Code.SYSTEM_ERROR,
        "Cannot recv data: root@node7: Permission denied (publickey).: Connection reset by peer",
        LibvirtFailed,
        "cannot connect to win with ssh: root@node7: Permission denied",
        "make sure that ssh connects to that host as this user without a password",
    ),
    (
        Code.NO_CONNECT,
        "no connection driver available for qemux:///system",
        UsageError,
        "no libvirt driver for URI",
        "https://libvirt.org/uri.html",
    ),
    (
        Code.INVALID_ARG,
        "invalid argument: remote_open: transport in URL not recognised (should be tls|unix|ssh)",
        UsageError,
        "no libvirt driver for URI",
        "https://libvirt.org/uri.html",
    ),
    (
        Code.OPERATION_DENIED,
        "operation forbidden: read only access prevents virDomainDefineXMLFlags",
        LibvirtFailed,
        "cannot call virDomainDefineXMLFlags: the connection is read-only",
        "connect as root",
    ),
    (
        Code.AUTH_UNAVAILABLE,
        "authentication unavailable: no polkit agent available",
        LibvirtFailed,
        "libvirt denies this user the operation:",
        "polkit",
    ),
    (Code.NO_DOMAIN, "Domain not found", UsageError, "no such domain: win", "virsh list --all"),
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
        f"domain win already exists, with UUID {UUID}",
        "; otherwise choose another name",
    ),
    (
        Code.OPERATION_FAILED,
        f"operation failed: domain 'win' is already defined with uuid {UUID}",
        LibvirtFailed,
        f"UUID {UUID} belongs to domain win",
        "virsh domrename win NEW",
    ),
    (
        Code.CONFIG_UNSUPPORTED,
        "unsupported configuration: non unique alias detected: ua-vfio-0000-01-00-0",
        LibvirtFailed,
        "win already has a device with alias ua-vfio-0000-01-00-0",
        (
            "list its devices with: vfiomgr libvirt list --domain NAME; detach that device first, "
            "or change the <alias> of one"
        ),
    ),
    (
        Code.XML_INVALID_SCHEMA,
        (
            "XML document failed to validate against schema: Unable to validate doc against "
            "/usr/share/libvirt/schemas/domain.rng\nExtra element devices in interleave"
        ),
        InvalidDocument,
        "libvirt's schema rejects win: XML document failed",
        "check for misspelled, misplaced or newer elements; for devices: vfiomgr check domain",
    ),
    (
        Code.XML_ERROR,
        "XML error: Hostdev already exists in the domain configuration",
        InvalidDocument,
        "win contains the same host device twice",
        "remove one of its <hostdev> elements",
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
        "no PCI slot of the guest is free for the device",
        "model='pcie-root-port'",
    ),
    (
        Code.XML_ERROR,
        (
            "XML error: The device at PCI address 0000:02:00.0 requires hotplug capability, "
            "but the PCI controller with index='2' doesn't support hotplug"
        ),
        LibvirtFailed,
        "PCI controller 2 of the guest does not support hot-plug (",
        "hotplug='off'",
    ),
    (
        Code.CONFIG_UNSUPPORTED,
        "unsupported configuration: Only PCI device addresses with function=0 are supported",
        LibvirtFailed,
        "cannot attach a function other than 0 to a running guest:",
        "--config only",
    ),
    (
        Code.XML_DETAIL,
        "(domain_definition):1: Couldn't find end of Start Tag domain line 1\n<domain\n-------^",
        InvalidDocument,
        "win is not valid XML: (domain_definition):1: Couldn't find end",
        "xmllint",
    ),
    (
        Code.NO_NAME,
        "missing name information",
        InvalidDocument,
        "libvirt rejects win: missing name",
        "formatdomain",
    ),
    (
        Code.OPERATION_INVALID,
        (
            "Requested operation is not valid: PCI device 0000:65:00.0 is in use by driver QEMU, "
            "domain lin"
        ),
        LibvirtFailed,
        "0000:65:00.0 is in use by the running domain lin (QEMU)",
        "vfiomgr libvirt detach lin 0000:65:00.0 --live",
    ),
    (
        Code.OPERATION_INVALID,
        (
            f"Requested operation is not valid: mediated device {UUID} is in use by driver QEMU, "
            "domain lin"
        ),
        LibvirtFailed,
        f"vGPU {UUID} is in use by the running domain lin",
        "vfiomgr libvirt detach lin",
    ),
    (
        Code.OPERATION_INVALID,
        (
            "Requested operation is not valid: Unmanaged PCI device 0000:65:00.0 must be manually "
            "detached from the host"
        ),
        LibvirtFailed,
        (
            "0000:65:00.0 is not on a driver that libvirt accepts for VFIO, and managed='no' does "
            "not change that"
        ),
        "vfiomgr show 0000:65:00.0 shows",
    ),
    (
        Code.OPERATION_INVALID,
        "Requested operation is not valid: device is already in the domain configuration",
        LibvirtFailed,
        "win already has the device",
        "libvirt list",
    ),
    (
        Code.OPERATION_INVALID,
        "Requested operation is not valid: domain is not running",
        LibvirtFailed,
        "domain win is not running",
        "--live",
    ),
    (
        Code.OPERATION_INVALID,
        "Requested operation is not valid: transient domains do not have any persistent config",
        LibvirtFailed,
        "win is transient",
        "pass only --live, or define it: virsh define FILE",
    ),
    (
        Code.OPERATION_FAILED,
        (
            "operation failed: cannot hot unplug hostdev device with multifunction PCI guest "
            "address: 0000:08:00.0"
        ),
        LibvirtFailed,
        "cannot detach a function of a multifunction device from a running guest",
        "pass only --config",
    ),
    (
        Code.INTERNAL_ERROR,
        (
            "internal error: unable to execute QEMU command 'device_del': Device hostdev0 is "
            "already in the process of unplug"
        ),
        LibvirtFailed,
        "win has not answered a previous request to release the device",
        "again in a few seconds",
    ),
    (
        Code.DEVICE_MISSING,
        f"device not found: mediated device '{UUID}' not found",
        LibvirtFailed,
        f"vGPU {UUID} is not active",
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
        "libvirt finds no VFIO support on its host",
        "vfiomgr check",
    ),
    (
        Code.ARGUMENT_UNSUPPORTED,
        "argument unsupported: VFIO device assignment is currently not supported on this system",
        LibvirtFailed,
        "libvirt finds no VFIO support on its host",
        "modprobe vfio-pci",
    ),
    (
        Code.CONFIG_UNSUPPORTED,
        (
            "unsupported configuration: Emulator '/usr/bin/qemu-kvm' does not support virt "
            "type 'kvm'"
        ),
        LibvirtFailed,
        "does not support KVM",
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
        "a device has <boot order>, but <os> has <boot dev>: only one of them is allowed",
        "<boot dev>",
    ),
    (
        Code.CONFIG_UNSUPPORTED,
        "unsupported configuration: ROM tuning is not supported when ROM is disabled",
        InvalidDocument,
        "<rom enabled='no'>",
        "remove one of them",
    ),
    (
        Code.OPERATION_TIMEOUT,
        (
            "Timed out during operation: cannot acquire state change lock (held by "
            "monitor=remoteDispatchDomainCreate)"
        ),
        LibvirtFailed,
        "another operation on win is still running:",
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
        "does not respond",
        "vfiomgr reset",
    ),
    (
        Code.INTERNAL_ERROR,
        "cannot limit locked memory of process 4711 to 3221225472: Operation not permitted",
        LibvirtFailed,
        "cannot raise the locked memory limit of the guest:",
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
        "the device is in use:",
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
        "mdevctl (called by libvirt) failed: Could not write to create",
        "vfiomgr vgpu list --types",
    ),
    (
        Code.INTERNAL_ERROR,
        "internal error: qemu unexpectedly closed the monitor: 2026-01-01 qemu-system-x86_64: boo",
        LibvirtFailed,
        "QEMU exited immediately: 2026-01-01 qemu-system-x86_64: boo",
        "vfiomgr check domain",
    ),
    (
        Code.INTERNAL_ERROR,
        "internal error: QEMU unexpectedly closed the monitor (vm='win'): 2026-01-01 boo",
        LibvirtFailed,
        "QEMU exited immediately: 2026-01-01 boo",
        "vfiomgr check domain",
    ),
    (
        Code.CONFIG_UNSUPPORTED,
        "unsupported configuration: host doesn't support passthrough of host PCI devices",
        LibvirtFailed,
        "libvirt finds no VFIO support on its host",
        "vfiomgr check",
    ),
    (
        Code.CONFIG_UNSUPPORTED,
        "unsupported configuration: VFIO PCI device assignment is not supported by the host",
        LibvirtFailed,
        "libvirt finds no VFIO support on its host",
        "modprobe vfio-pci",
    ),
    (
        Code.CONFIG_UNSUPPORTED,
        "unsupported configuration: IOMMUFD is not supported by host kernel",
        LibvirtFailed,
        "the domain uses iommufd, but libvirt's host has no /dev/iommu",
        "modprobe iommufd",
    ),
    (
        Code.INTERNAL_ERROR,
        "internal error: Unable to set autostart on 'mdev_f715f63c': Device is not defined",
        LibvirtFailed,
        "mdevctl (called by libvirt) failed: Device is not defined",
        "check that mdevctl is installed",
    ),
    (
        Code.INTERNAL_ERROR,
        "internal error: Process exited prior to exec: libvirt: error : cannot set groups",
        LibvirtFailed,
        "libvirt could not prepare the process of QEMU: internal error: Process exited prior",
        "see /var/log/libvirt/qemu/NAME.log",
    ),
    (
        Code.INTERNAL_ERROR,
        "internal error: process exited while connecting to monitor: qemu: -nonsense",
        LibvirtFailed,
        "QEMU exited immediately: qemu: -nonsense",
        "vfiomgr check domain",
    ),
    (
        Code.CONFIG_UNSUPPORTED,
        "unsupported configuration: Mediated host device assignment requires VFIO support",
        LibvirtFailed,
        "libvirt finds no VFIO support on its host",
        "modprobe vfio-pci",
    ),
    (
        Code.SYSTEM_ERROR,
        "Cannot write data: Broken pipe",
        LibvirtFailed,
        "closed the connection",
        "journalctl",
    ),
    (
        Code.SYSTEM_ERROR,
        "Failed to connect socket to '/var/run/libvirt/virtqemud-sock': No such file or directory",
        LibvirtFailed,
        "no libvirt daemon listens on /var/run/libvirt/virtqemud-sock",
        "systemctl start virtqemud.socket",
    ),
    (
        Code.NO_SUPPORT,
        "this function is not supported by the connection driver: virDomainAttachDeviceFlags",
        LibvirtFailed,
        "libvirt does not support the operation: this function is not supported",
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


NOT_MADE = {
    "{device} is in use by the running domain {domain} ({driver})": (
        "9.0.0, tests/lab/test_libvirt_attach.py; src/hypervisor/virhostdev.c"
    ),
    "vGPU {device} is in use by the running domain {domain} ({driver})": (
        "src/util/virmdev.c of 9.0.0, the same in 12.8.0"
    ),
    "{device} is not on a driver that libvirt accepts for VFIO, and managed='no' does not change "
    "that": "9.0.0, tests/lab/test_libvirt_preflight.py; src/hypervisor/virhostdev.c",
    "IOMMU group {group} is not viable: another function in it is on a host driver": (
        "QEMU's text: hw/vfio/common.c of 7.2, container.c of 10.0, container-legacy.c of 11.1"
    ),
    "the device does not respond: its configuration space reads as all ones": (
        "src/util/virpci.c of 9.0.0 and 11.3.0, the same in 12.8.0"
    ),
    "the guest may not lock as much memory as its devices need: {text}": (
        "QEMU's text: hw/vfio/common.c of 7.2 and 10.0, listener.c of 11.1"
    ),
    "the device is in use: {text}": "the kernel's EBUSY after QEMU's words, hw/vfio/container.c",
    "mdevctl (called by libvirt) failed: {why}": (
        "src/node_device/node_device_driver.c of 9.0.0 and 11.3.0, the same in 12.8.0"
    ),
}
"""Rows, by their message, whose texts need real devices, and where these texts stand."""


def test_each_row_is_what_a_real_libvirt_said_or_its_source_is_named() -> None:
    seen = {errors_seen.row_of(seen) for of in errors_seen.SEEN.values() for seen in of.values()}
    rows = client_errors._ROWS
    assert {rows[n].message for n in range(len(rows)) if n not in seen} == NOT_MADE.keys()


@pytest.mark.parametrize("release", errors_seen.SEEN)
def test_what_a_real_libvirt_said_has_a_cause(release: str) -> None:
    for name, (code, text) in errors_seen.SEEN[release].items():
        told = explain(code, text, "win")
        assert not told.message.startswith("libvirt: "), name
        assert told.hint


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
    assert error.message.endswith("belongs to domain a b")
    assert "virsh domrename 'a b' NEW" in error.hint

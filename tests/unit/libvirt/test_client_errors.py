"""Each row of causes: what libvirt says, and what vfiomgr makes of it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import libvirt
import pytest

from tests.unit.libvirt import errors_seen
from vfiomgr.errors import InvalidDocument, LibvirtFailed, UnknownDevice, UsageError, VfiomgrError
from vfiomgr.libvirt.client import errors as client_errors
from vfiomgr.libvirt.client.errors import Code, ErrorDomain, ReportedError, explain

if TYPE_CHECKING:
    from pathlib import Path

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"

OTHER = libvirt.VIR_FROM_STREAMS
"""A domain that no row names: those that are tested with it match by code and text in any."""

# libvirt's error, the kind of error, a part of the message, a part of the hint
ROWS: list[tuple[ReportedError, type[VfiomgrError], str, str]] = [
    (
        ReportedError(
            Code.SYSTEM_ERROR,
            "Failed to connect socket to '/var/run/libvirt/libvirt-sock': No such file or "
            "directory",
            ErrorDomain.RPC,
        ),
        LibvirtFailed,
        "no libvirt daemon listens on /var/run/libvirt/libvirt-sock",
        "systemctl start libvirtd",
    ),
    (
        ReportedError(
            Code.SYSTEM_ERROR,
            "Failed to connect socket to '/var/run/libvirt/libvirt-sock': Permission denied",
            ErrorDomain.RPC,
        ),
        LibvirtFailed,
        "no permission to use the libvirt daemon on",
        "group libvirt",
    ),
    (
        ReportedError(
            Code.SYSTEM_ERROR,
            "unable to connect to server at '127.0.0.1:16509': Connection refused",
            ErrorDomain.RPC,
        ),
        LibvirtFailed,
        "cannot connect to libvirt at 127.0.0.1:16509: Connection refused",
        "check that it runs and listens there: virsh --connect URI version",
    ),
    (
        ReportedError(
            Code.SYSTEM_ERROR, "Cannot recv data: Connection reset by peer", ErrorDomain.RPC
        ),
        LibvirtFailed,
        "closed the connection",
        "journalctl",
    ),
    (
        ReportedError(
            Code.SYSTEM_ERROR,
            "Cannot recv data: ssh: Could not resolve hostname nohost.invalid: Name is not known",
            ErrorDomain.RPC,
        ),
        LibvirtFailed,
        "cannot resolve host nohost.invalid of win",
        "getent hosts nohost.invalid",
    ),
    (
        ReportedError(
            Code.SYSTEM_ERROR,
            "Unable to resolve address 'nohost.invalid' service '16509': Name or service not known",
            ErrorDomain.RPC,
        ),
        LibvirtFailed,
        "cannot resolve host nohost.invalid of win",
        "getent hosts nohost.invalid",
    ),
    (
        ReportedError(
            Code.SYSTEM_ERROR,
            "Cannot recv data: Host key verification failed.: Connection reset by peer",
            ErrorDomain.RPC,
        ),
        LibvirtFailed,
        "cannot connect to win with ssh: Host key verification failed",
        "make sure that ssh connects to that host as this user without a password",
    ),
    (
        ReportedError(
            Code.SYSTEM_ERROR,
            "Cannot recv data: root@node7: Permission denied (publickey).: Connection "
            "reset by peer",
            ErrorDomain.RPC,
        ),
        LibvirtFailed,
        "cannot connect to win with ssh: root@node7: Permission denied",
        "make sure that ssh connects to that host as this user without a password",
    ),
    (
        ReportedError(
            Code.SYSTEM_ERROR,
            "Cannot read CA certificate '/etc/pki/CA/cacert.pem': No such file or directory",
            ErrorDomain.RPC,
            errno.ENOENT,
        ),
        LibvirtFailed,
        "cannot connect to win with TLS: Cannot read CA certificate '/etc/pki/CA/cacert.pem': No",
        "put the CA certificate at /etc/pki/CA/cacert.pem, readable for this user",
    ),
    (
        ReportedError(
            Code.SYSTEM_ERROR,
            "Cannot read private key '/root/.pki/libvirt/clientkey.pem': Permission denied",
            ErrorDomain.RPC,
            errno.EACCES,
        ),
        LibvirtFailed,
        "cannot connect to win with TLS: Cannot read private key",
        "put the private key at /root/.pki/libvirt/clientkey.pem, readable for this user",
    ),
    (
        ReportedError(Code.NO_CONNECT, "no connection driver available for qemux:///system", OTHER),
        UsageError,
        "no libvirt driver for URI",
        "https://libvirt.org/uri.html",
    ),
    (
        ReportedError(
            Code.INVALID_ARG,
            "invalid argument: remote_open: transport in URL not recognised (should be "
            "tls|unix|ssh)",
            OTHER,
        ),
        UsageError,
        "no libvirt driver for URI",
        "https://libvirt.org/uri.html",
    ),
    (
        ReportedError(
            Code.OPERATION_DENIED,
            "operation forbidden: read only access prevents virDomainDefineXMLFlags",
            OTHER,
        ),
        LibvirtFailed,
        "cannot call virDomainDefineXMLFlags: the connection is read-only",
        "connect as root",
    ),
    (
        ReportedError(
            Code.AUTH_UNAVAILABLE, "authentication unavailable: no polkit agent available", OTHER
        ),
        LibvirtFailed,
        "libvirt denies this user the operation:",
        "polkit",
    ),
    (
        ReportedError(Code.NO_DOMAIN, "Domain not found", OTHER),
        UsageError,
        "no such domain: win",
        "virsh list --all",
    ),
    (
        ReportedError(
            Code.NO_NODE_DEVICE,
            "Node device not found: no node device with matching name 'pci_0000_65_00_0'",
            OTHER,
        ),
        UnknownDevice,
        "pci_0000_65_00_0",
        "udevadm settle",
    ),
    (
        ReportedError(
            Code.OPERATION_FAILED,
            f"operation failed: domain 'win' already exists with uuid {UUID}",
            OTHER,
        ),
        LibvirtFailed,
        f"domain win already exists, with UUID {UUID}",
        "; otherwise choose another name",
    ),
    (
        ReportedError(
            Code.OPERATION_FAILED,
            f"operation failed: domain 'win' is already defined with uuid {UUID}",
            OTHER,
        ),
        LibvirtFailed,
        f"UUID {UUID} belongs to domain win",
        "virsh domrename win NEW",
    ),
    (
        ReportedError(
            Code.CONFIG_UNSUPPORTED,
            "unsupported configuration: non unique alias detected: ua-vfio-0000-01-00-0",
            OTHER,
        ),
        LibvirtFailed,
        "win already has a device with alias ua-vfio-0000-01-00-0",
        (
            "list its devices with: vfiomgr libvirt list --domain NAME; detach that device first, "
            "or change the <alias> of one"
        ),
    ),
    (
        ReportedError(
            Code.XML_INVALID_SCHEMA,
            "XML document failed to validate against schema: Unable to validate doc against "
            "/usr/share/libvirt/schemas/domain.rng\nExtra element devices in interleave",
            OTHER,
        ),
        InvalidDocument,
        "libvirt's schema rejects win: XML document failed",
        "check for misspelled, misplaced or newer elements; for devices: vfiomgr check domain",
    ),
    (
        ReportedError(
            Code.XML_ERROR, "XML error: Hostdev already exists in the domain configuration", OTHER
        ),
        InvalidDocument,
        "win contains the same host device twice",
        "remove one of its <hostdev> elements",
    ),
    (
        ReportedError(
            Code.XML_ERROR, "XML error: Invalid PCI address 0000:01:02.0. slot must be <= 0", OTHER
        ),
        InvalidDocument,
        "0000:01:02.0 is behind a root port",
        "slot='0x00'",
    ),
    (
        ReportedError(Code.INTERNAL_ERROR, "internal error: No more available PCI slots", OTHER),
        LibvirtFailed,
        "no PCI slot of the guest is free for the device",
        "model='pcie-root-port'",
    ),
    (
        ReportedError(
            Code.XML_ERROR,
            "XML error: The device at PCI address 0000:02:00.0 requires hotplug capability, "
            "but the PCI controller with index='2' doesn't support hotplug",
            OTHER,
        ),
        LibvirtFailed,
        "PCI controller 2 of the guest does not support hot-plug (",
        "hotplug='off'",
    ),
    (
        ReportedError(
            Code.CONFIG_UNSUPPORTED,
            "unsupported configuration: Only PCI device addresses with function=0 are supported",
            OTHER,
        ),
        LibvirtFailed,
        "cannot attach a function other than 0 to a running guest:",
        "--config only",
    ),
    (
        ReportedError(
            Code.XML_DETAIL,
            "(domain_definition):1: Couldn't find end of Start Tag domain line "
            "1\n<domain\n-------^",
            OTHER,
        ),
        InvalidDocument,
        "win is not valid XML: (domain_definition):1: Couldn't find end",
        "xmllint",
    ),
    (
        ReportedError(Code.NO_NAME, "missing name information", OTHER),
        InvalidDocument,
        "libvirt rejects win: missing name",
        "formatdomain",
    ),
    (
        ReportedError(
            Code.OPERATION_INVALID,
            "Requested operation is not valid: PCI device 0000:65:00.0 is in use by driver QEMU, "
            "domain lin",
            OTHER,
        ),
        LibvirtFailed,
        "0000:65:00.0 is in use by the running domain lin (QEMU)",
        "vfiomgr libvirt detach lin 0000:65:00.0 --live",
    ),
    (
        ReportedError(
            Code.OPERATION_INVALID,
            f"Requested operation is not valid: mediated device {UUID} is in use by driver QEMU, "
            "domain lin",
            OTHER,
        ),
        LibvirtFailed,
        f"vGPU {UUID} is in use by the running domain lin",
        "vfiomgr libvirt detach lin",
    ),
    (
        ReportedError(
            Code.OPERATION_INVALID,
            "Requested operation is not valid: Unmanaged PCI device 0000:65:00.0 must be manually "
            "detached from the host",
            OTHER,
        ),
        LibvirtFailed,
        (
            "0000:65:00.0 is not on a driver that libvirt accepts for VFIO, and managed='no' does "
            "not change that"
        ),
        "vfiomgr show 0000:65:00.0 shows",
    ),
    (
        ReportedError(
            Code.OPERATION_INVALID,
            "Requested operation is not valid: device is already in the domain configuration",
            OTHER,
        ),
        LibvirtFailed,
        "win already has the device",
        "libvirt list",
    ),
    (
        ReportedError(
            Code.OPERATION_INVALID, "Requested operation is not valid: domain is not running", OTHER
        ),
        LibvirtFailed,
        "domain win is not running",
        "--live",
    ),
    (
        ReportedError(
            Code.OPERATION_INVALID,
            "Requested operation is not valid: transient domains do not have any persistent config",
            OTHER,
        ),
        LibvirtFailed,
        "win is transient",
        "pass only --live, or define it: virsh define FILE",
    ),
    (
        ReportedError(
            Code.OPERATION_FAILED,
            "operation failed: cannot hot unplug hostdev device with multifunction PCI guest "
            "address: 0000:08:00.0",
            OTHER,
        ),
        LibvirtFailed,
        "cannot detach a function of a multifunction device from a running guest",
        "pass only --config",
    ),
    (
        ReportedError(
            Code.INTERNAL_ERROR,
            "internal error: unable to execute QEMU command 'device_del': Device hostdev0 is "
            "already in the process of unplug",
            ErrorDomain.QEMU,
        ),
        LibvirtFailed,
        "win has not answered a previous request to release the device",
        "again in a few seconds",
    ),
    (
        ReportedError(
            Code.DEVICE_MISSING,
            f"device not found: mediated device '{UUID}' not found",
            ErrorDomain.NONE,
        ),
        LibvirtFailed,
        f"vGPU {UUID} is not active",
        f"vfiomgr vgpu start {UUID}",
    ),
    (
        ReportedError(
            Code.DEVICE_MISSING,
            "device not found: device not present in domain configuration",
            ErrorDomain.QEMU,
        ),
        LibvirtFailed,
        "win does not have the device",
        "libvirt list",
    ),
    (
        ReportedError(
            Code.CONFIG_UNSUPPORTED,
            "unsupported configuration: host doesn't support VFIO PCI passthrough",
            OTHER,
        ),
        LibvirtFailed,
        "libvirt finds no VFIO support on its host",
        "vfiomgr check",
    ),
    (
        ReportedError(
            Code.ARGUMENT_UNSUPPORTED,
            "argument unsupported: VFIO device assignment is currently not supported on "
            "this system",
            OTHER,
        ),
        LibvirtFailed,
        "libvirt finds no VFIO support on its host",
        "modprobe vfio-pci",
    ),
    (
        ReportedError(
            Code.CONFIG_UNSUPPORTED,
            "unsupported configuration: Emulator '/usr/bin/qemu-kvm' does not support virt "
            "type 'kvm'",
            OTHER,
        ),
        LibvirtFailed,
        "does not support KVM",
        "kvm_intel",
    ),
    (
        ReportedError(
            Code.CONFIG_UNSUPPORTED,
            "unsupported configuration: graphics device is needed for attribute value 'display=on' "
            "in <hostdev>",
            OTHER,
        ),
        InvalidDocument,
        "display='on' of a vGPU",
        "<graphics type='spice'/>",
    ),
    (
        ReportedError(
            Code.CONFIG_UNSUPPORTED,
            "unsupported configuration: per-device boot elements cannot be used together with "
            "os/boot elements",
            OTHER,
        ),
        InvalidDocument,
        "a device has <boot order>, but <os> has <boot dev>: only one of them is allowed",
        "<boot dev>",
    ),
    (
        ReportedError(
            Code.CONFIG_UNSUPPORTED,
            "unsupported configuration: ROM tuning is not supported when ROM is disabled",
            OTHER,
        ),
        InvalidDocument,
        "<rom enabled='no'>",
        "remove one of them",
    ),
    (
        ReportedError(
            Code.OPERATION_TIMEOUT,
            "Timed out during operation: cannot acquire state change lock (held by "
            "monitor=remoteDispatchDomainCreate)",
            OTHER,
        ),
        LibvirtFailed,
        "another operation on win is still running:",
        "virsh domjobabort",
    ),
    (
        ReportedError(
            Code.INTERNAL_ERROR,
            "internal error: qemu unexpectedly closed the monitor: -device vfio-pci: "
            "vfio 0000:65:00.0: group 25 is not viable\nPlease ensure all devices within the "
            "iommu_group are bound to their vfio bus driver.",
            ErrorDomain.QEMU,
        ),
        LibvirtFailed,
        "IOMMU group 25 is not viable",
        "vfiomgr bind 0000:65:00.0 --with-group",
    ),
    (
        ReportedError(
            Code.INTERNAL_ERROR,
            "internal error: Unknown PCI header type '127' for device '0000:65:00.0'",
            OTHER,
        ),
        LibvirtFailed,
        "does not respond",
        "vfiomgr reset 0000:65:00.0;",
    ),
    (
        ReportedError(
            Code.INTERNAL_ERROR,
            "cannot limit locked memory of process 4711 to 3221225472: Operation not permitted",
            OTHER,
        ),
        LibvirtFailed,
        "cannot raise the locked memory limit of the guest:",
        "CAP_SYS_RESOURCE",
    ),
    (
        ReportedError(
            Code.INTERNAL_ERROR,
            "internal error: qemu unexpectedly closed the monitor: vfio_dma_map(0x55, 0x0, 0x8000, "
            "0x7f) = -12 (Cannot allocate memory)",
            ErrorDomain.QEMU,
        ),
        LibvirtFailed,
        "may not lock as much memory",
        "<hard_limit>",
    ),
    (
        ReportedError(
            Code.INTERNAL_ERROR,
            "internal error: unable to execute QEMU command 'device_add': vfio: failed to "
            "open /dev/vfio/25: Device or resource busy",
            ErrorDomain.QEMU,
        ),
        LibvirtFailed,
        "the device is in use:",
        "vfiomgr show ADDRESS shows",
    ),
    (
        ReportedError(
            Code.HOOK_SCRIPT_FAILED,
            "Hook script execution failed: internal error: Child process (hooks/qemu win "
            "prepare begin -) unexpected exit status 4: vfiomgr: refused: 0000:65:00.0 is in use",
            OTHER,
        ),
        LibvirtFailed,
        "vfiomgr: refused: 0000:65:00.0 is in use",
        "50-vfiomgr",
    ),
    (
        ReportedError(
            Code.INTERNAL_ERROR,
            "internal error: Unable to start mediated device: Could not write to create: "
            "No space left",
            ErrorDomain.NODEDEV,
        ),
        LibvirtFailed,
        "mdevctl (called by libvirt) failed: Could not write to create",
        "vfiomgr vgpu list --types",
    ),
    (
        ReportedError(
            Code.INTERNAL_ERROR,
            "internal error: qemu unexpectedly closed the monitor: 2026-01-01 "
            "qemu-system-x86_64: boo",
            ErrorDomain.QEMU,
        ),
        LibvirtFailed,
        "QEMU exited immediately: 2026-01-01 qemu-system-x86_64: boo",
        "vfiomgr check domain",
    ),
    (
        ReportedError(
            Code.INTERNAL_ERROR,
            "internal error: QEMU unexpectedly closed the monitor (vm='win'): 2026-01-01 boo",
            ErrorDomain.QEMU,
        ),
        LibvirtFailed,
        "QEMU exited immediately: 2026-01-01 boo",
        "vfiomgr check domain",
    ),
    (
        ReportedError(
            Code.CONFIG_UNSUPPORTED,
            "unsupported configuration: host doesn't support passthrough of host PCI devices",
            OTHER,
        ),
        LibvirtFailed,
        "libvirt finds no VFIO support on its host",
        "vfiomgr check",
    ),
    (
        ReportedError(
            Code.CONFIG_UNSUPPORTED,
            "unsupported configuration: VFIO PCI device assignment is not supported by the host",
            OTHER,
        ),
        LibvirtFailed,
        "libvirt finds no VFIO support on its host",
        "modprobe vfio-pci",
    ),
    (
        ReportedError(
            Code.CONFIG_UNSUPPORTED,
            "unsupported configuration: IOMMUFD is not supported by host kernel",
            OTHER,
        ),
        LibvirtFailed,
        "the domain uses iommufd, but libvirt's host has no /dev/iommu",
        "modprobe iommufd",
    ),
    (
        ReportedError(
            Code.INTERNAL_ERROR,
            "internal error: Unable to set autostart on 'mdev_f715f63c': Device is not defined",
            ErrorDomain.NODEDEV,
        ),
        LibvirtFailed,
        "mdevctl (called by libvirt) failed: Device is not defined",
        "check that mdevctl is installed",
    ),
    (
        ReportedError(
            Code.INTERNAL_ERROR,
            "internal error: Process exited prior to exec: libvirt: error : cannot set groups",
            ErrorDomain.QEMU,
        ),
        LibvirtFailed,
        "libvirt could not prepare the process of QEMU: internal error: Process exited prior",
        "see /var/log/libvirt/qemu/NAME.log",
    ),
    (
        ReportedError(
            Code.INTERNAL_ERROR,
            "internal error: process exited while connecting to monitor: qemu: -nonsense",
            ErrorDomain.QEMU,
        ),
        LibvirtFailed,
        "QEMU exited immediately: qemu: -nonsense",
        "vfiomgr check domain",
    ),
    (
        ReportedError(
            Code.CONFIG_UNSUPPORTED,
            "unsupported configuration: Mediated host device assignment requires VFIO support",
            OTHER,
        ),
        LibvirtFailed,
        "libvirt finds no VFIO support on its host",
        "modprobe vfio-pci",
    ),
    (
        ReportedError(
            Code.CONFIG_UNSUPPORTED,
            "unsupported configuration: spice graphics are not supported with this QEMU",
            OTHER,
        ),
        LibvirtFailed,
        "this QEMU has no SPICE",
        "qemu-system-modules-spice",
    ),
    (
        ReportedError(Code.SYSTEM_ERROR, "Cannot write data: Broken pipe", ErrorDomain.RPC),
        LibvirtFailed,
        "closed the connection",
        "journalctl",
    ),
    (
        ReportedError(
            Code.SYSTEM_ERROR,
            "Failed to connect socket to '/var/run/libvirt/virtqemud-sock': No such file "
            "or directory",
            ErrorDomain.RPC,
        ),
        LibvirtFailed,
        "no libvirt daemon listens on /var/run/libvirt/virtqemud-sock",
        "systemctl start virtqemud.socket",
    ),
    (
        ReportedError(
            Code.INTERNAL_ERROR,
            "internal error: QEMU unexpectedly closed the monitor (vm='win'): ",
            ErrorDomain.QEMU,
        ),
        LibvirtFailed,
        "QEMU exited immediately, without a message",
        "see /var/log/libvirt/qemu/NAME.log",
    ),
    (
        ReportedError(
            Code.INTERNAL_ERROR,
            "internal error: qemu unexpectedly closed the monitor",
            ErrorDomain.QEMU,
        ),
        LibvirtFailed,
        "QEMU exited immediately, without a message",
        "vfiomgr check domain",
    ),
    (
        ReportedError(
            Code.INTERNAL_ERROR,
            "internal error: process exited while connecting to monitor: "
            "2026-01-01T00:00:00.000000Z qemu-system-x86_64: IOMMU_IOAS_MAP failed: Cannot "
            "allocate memory",
            ErrorDomain.QEMU,
        ),
        LibvirtFailed,
        "may not lock as much memory",
        "<hard_limit>",
    ),
    # translated: from the catalogues of libvirt-l10n 9.0, with what libvirt does not translate
    (
        ReportedError(
            Code.INTERNAL_ERROR,
            "Interner Fehler: QEMU hat den Monitor unerwartet geschlossen: "
            "2026-01-01T00:00:00.000000Z qemu-system-x86_64: -device vfio-pci: boo",
            ErrorDomain.QEMU,
        ),
        LibvirtFailed,
        "QEMU exited immediately: 2026-01-01T00:00:00.000000Z qemu-system-x86_64: -device vfio-pci",
        "vfiomgr check domain",
    ),
    (
        ReportedError(
            Code.INTERNAL_ERROR,
            "内部エラー: qemu が予期せずモニターを閉じました: qemu-kvm: -nonsense: invalid option",
            ErrorDomain.QEMU,
        ),
        LibvirtFailed,
        "QEMU exited immediately: qemu-kvm: -nonsense",
        "vfiomgr check domain",
    ),
    (
        ReportedError(
            Code.INTERNAL_ERROR,
            "внутренняя ошибка: Процесс завершил работу до exec: libvirt:  ошибка : boo",
            ErrorDomain.QEMU,
        ),
        LibvirtFailed,
        "libvirt could not prepare the process of QEMU",
        "see /var/log/libvirt/qemu/NAME.log",
    ),
    (
        ReportedError(
            Code.DEVICE_MISSING, f"设备未找到: 中介设备 '{UUID}' 未找到", ErrorDomain.NONE
        ),
        LibvirtFailed,
        f"vGPU {UUID} is not active",
        f"vfiomgr vgpu start {UUID}",
    ),
    (
        ReportedError(Code.DEVICE_MISSING, f"nie odnaleziono urządzenia: {UUID}", ErrorDomain.QEMU),
        LibvirtFailed,
        "win does not have the device",
        "libvirt list",
    ),
    (
        ReportedError(
            Code.SYSTEM_ERROR,
            "Socket-Erstellung zu '/run/libvirt/virtqemud-sock' fehlgeschlagen",
            ErrorDomain.RPC,
            errno.ENOENT,
        ),
        LibvirtFailed,
        "no libvirt daemon listens on /run/libvirt/virtqemud-sock: Socket-Erstellung",
        "systemctl start libvirtd (or virtqemud)",
    ),
    (
        ReportedError(
            Code.SYSTEM_ERROR,
            "Socket-Erstellung zu '/run/libvirt/virtqemud-sock' fehlgeschlagen",
            ErrorDomain.RPC,
            errno.EACCES,
        ),
        LibvirtFailed,
        "no permission to use the libvirt daemon on /run/libvirt/virtqemud-sock: Socket-",
        "group libvirt",
    ),
    *(
        (
            ReportedError(
                Code.SYSTEM_ERROR,
                "CA-Zertifikat '/etc/pki/CA/cacert.pem' kann nicht gelesen werden",
                ErrorDomain.RPC,
                number,
            ),
            LibvirtFailed,
            "the connection to libvirt failed: CA-Zertifikat",
            "journalctl -u libvirtd -u virtqemud",
        )
        for number in (errno.ENOENT, errno.EACCES)
    ),
    (
        ReportedError(Code.INTERNAL_ERROR, "client socket is nicht offen", ErrorDomain.RPC),
        LibvirtFailed,
        "the connection to libvirt failed: client socket is nicht offen",
        "journalctl -u libvirtd -u virtqemud",
    ),
    (
        ReportedError(
            Code.NO_SUPPORT,
            "this function is not supported by the connection driver: virDomainAttachDeviceFlags",
            OTHER,
        ),
        LibvirtFailed,
        "libvirt does not support the operation: this function is not supported",
        "later release",
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{Code(row[0].code).name}: {row[2][:40]}")
def test_an_error_of_libvirt_names_its_cause_and_remedy(
    row: tuple[ReportedError, type[VfiomgrError], str, str],
) -> None:
    seen, kind, message, hint = row
    told = explain(seen, "win")
    assert type(told) is kind
    assert message in told.message
    assert hint in told.hint
    assert told.hint
    assert "\n" not in told.message
    assert not told.message.endswith(":")


def test_every_row_is_what_some_text_finds() -> None:
    """So that none is hidden by one above it."""
    expected = set(range(len(client_errors.causes())))
    assert {errors_seen.row_of(seen) for seen, *_ in ROWS} == expected


@pytest.mark.parametrize(
    "row",
    [
        row
        for row in ROWS
        if client_errors.causes()[errors_seen.row_of(row[0]) or 0].domain is not None
    ],
    ids=lambda row: row[0].text[-40:],
)
def test_an_error_from_another_part_of_libvirt_is_not_taken_for_it(
    row: tuple[ReportedError, type[VfiomgrError], str, str],
) -> None:
    seen, _, message, _ = row
    elsewhere = ReportedError(seen.code, seen.text, OTHER, seen.errno)
    number = errors_seen.row_of(elsewhere)
    assert number is None or number > (errors_seen.row_of(seen) or 0)
    assert number is not None or message not in explain(elsewhere, "win").message


TRANSLATED = "what the row above it with libvirt's words is made of, in another language"
NOT_MADE = {
    "this QEMU has no SPICE": "11.3.0 of Debian 13 without the module of QEMU",
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
        "QEMU's text: hw/vfio/common.c of 7.2 and 10.0, listener.c of 11.1; backends/iommufd.c as "
        "it was added: later releases only have the former"
    ),
    "the device is in use: {text}": "the kernel's EBUSY after QEMU's words, hw/vfio/container.c",
    "QEMU exited immediately, without a message": (
        "qemuProcessReportLogError in src/qemu/qemu_process.c of 9.0.0 and 12.8.0, with a log that "
        "is empty"
    ),
    "QEMU exited immediately: {why}": f"{TRANSLATED}, and QEMU's own line",
    "{subject} does not have the device: {text}": TRANSLATED,
    "no libvirt daemon listens on {socket}: {text}": TRANSLATED,
    "no permission to use the libvirt daemon on {socket}: {text}": TRANSLATED,
    "cannot connect to {subject} with TLS: {text}": (
        "9.0.0 without certificates; virNetTLSContextCheckCertFile in src/rpc/virnettlscontext.c"
    ),
    "the connection to libvirt failed: {text}": (
        "src/rpc/virnetclient.c, whose domain is VIR_FROM_RPC: closed or out of step"
    ),
    "mdevctl (called by libvirt) failed: {why}": (
        "src/node_device/node_device_driver.c of 9.0.0 and 11.3.0, the same in 12.8.0"
    ),
}
"""Rows, by their message, whose texts need real devices, and where these texts stand."""


def test_each_row_is_what_a_real_libvirt_said_or_its_source_is_named() -> None:
    seen = {errors_seen.row_of(seen) for of in errors_seen.SEEN.values() for seen in of.values()}
    rows = client_errors.causes()
    assert {rows[n].message for n in range(len(rows)) if n not in seen} == NOT_MADE.keys()


@pytest.mark.parametrize("release", errors_seen.SEEN)
def test_what_a_real_libvirt_said_has_a_cause(release: str) -> None:
    for name, seen in errors_seen.SEEN[release].items():
        told = explain(seen, "win")
        assert not told.message.startswith("libvirt: "), name
        assert told.hint


def test_a_table_that_is_gone_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package may be upgraded or removed while a command runs."""
    monkeypatch.setattr(client_errors, "files", lambda _package: tmp_path)
    seen = ReportedError(Code.NO_DOMAIN, "Domain not found", ErrorDomain.QEMU)
    client_errors.causes.cache_clear()
    told = explain(seen, "win")
    (tmp_path / "errors.toml").write_text('rows = [{message = "{later}", hint = "", codes = []}]')
    later = explain(seen, "win")
    client_errors.causes.cache_clear()
    for error in (told, later):
        assert isinstance(error, LibvirtFailed)
        assert error.message == "libvirt: Domain not found (error 42, win)"


def test_an_unknown_error_is_told_in_libvirts_own_words() -> None:
    text = "interner Fehler:\n  das Gerät brennt"
    told = explain(ReportedError(Code.INTERNAL_ERROR, text, OTHER), "win")
    assert isinstance(told, LibvirtFailed)
    assert told.message == "libvirt: interner Fehler: das Gerät brennt (error 1, win)"
    assert told.code == Code.INTERNAL_ERROR


@pytest.mark.parametrize(
    ("domain", "place"),
    [
        (OTHER, "journalctl -u libvirtd -u virtqemud"),
        (ErrorDomain.QEMU, "/var/log/libvirt/qemu/NAME.log"),
        (ErrorDomain.QEMU, "journalctl -u libvirtd -u virtqemud"),
        (ErrorDomain.NODEDEV, "journalctl -u libvirtd -u virtnodedevd"),
    ],
)
def test_the_log_of_an_unknown_error_is_that_of_the_part_that_reports_it(
    domain: int, place: str
) -> None:
    assert place in explain(ReportedError(Code.INTERNAL_ERROR, "boo", domain), "win").hint


def test_libvirt_does_not_translate_the_errors_of_this_process() -> None:
    """It asks gettext, which asks for the locale of messages: Python only sets that of ctype."""
    program = (
        "import locale; from click.testing import CliRunner; from vfiomgr.main.program import cli\n"
        "CliRunner().invoke(cli, ['libvirt', 'list', '-c', 'nothing:///'])\n"
        "print(locale.setlocale(locale.LC_MESSAGES))"
    )
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert answer.stdout == "C\n"


def test_a_text_with_braces_is_no_format() -> None:
    seen = ReportedError(Code.NO_SUPPORT, "cannot {text} {0}")
    assert "{text}" in explain(seen, "win{x}").message


@pytest.mark.parametrize("code", Code, ids=lambda code: code.name)
def test_the_codes_are_libvirts(code: Code) -> None:
    assert getattr(libvirt, f"VIR_ERR_{code.name}") == code


@pytest.mark.parametrize("domain", ErrorDomain, ids=lambda domain: domain.name)
def test_the_domains_are_libvirts(domain: ErrorDomain) -> None:
    assert getattr(libvirt, f"VIR_FROM_{domain.name}") == domain


def test_names_are_quoted_in_hints_alone() -> None:
    text = f"operation failed: domain 'a b' is already defined with uuid {UUID}"
    error = explain(ReportedError(Code.OPERATION_FAILED, text), "x.xml")
    assert error.message.endswith("belongs to domain a b")
    assert "virsh domrename 'a b' NEW" in error.hint

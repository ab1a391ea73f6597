"""Rules about what a machine or its security policy denies devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.check.model import command_line
from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.expressions import expression
from vfiomgr.host.kernel import parameters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.check.model import Readiness
    from vfiomgr.snapshot.model import HostSnapshot

_HIDE = "xen-pciback.hide"
_HIDDEN = expression(r"\(([^()]*)\)")
_FUNCTION = expression(r"(?i)(?:[0-9a-f]{1,4}:)?[0-9a-f]{1,2}:[0-9a-f]{1,2}\.(?:[0-7]|\*)")
_XEN_CMDLINE = "/opt/xensource/libexec/xen-cmdline"


def hidden_addresses(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report addresses in xen-pciback.hide= that pciback does not accept (pcistub_init)."""
    for one in parameters(host.kernel.command_line, _HIDE):
        given = _HIDDEN.findall(one.value)
        wrong = [each for each in given if not _FUNCTION.fullmatch(each)]
        if not wrong:
            continue
        value = "".join(f"({_corrected(each)})" for each in given)
        is_server = facts.distribution is not None and facts.distribution.id == "xenenterprise"
        yield finding(
            "xen-hide-invalid",
            "warning",
            f"{_HIDE}= has an invalid address: {', '.join(wrong)}",
            (f"/proc/cmdline: {one.word}",),
            "pciback stops at the first invalid address: that function and the next ones stay with "
            "dom0",
            (
                f'{_XEN_CMDLINE} --set-dom0 "{_HIDE}={value}"'
                if is_server
                else f"write {_HIDE}={value}{command_line(host)}"
            )
            + ", and reboot",
        )


def _corrected(address: str) -> str:
    """With one colon where there are several, and with the domain."""
    bus = ":".join(filter(None, address.split(":")))
    return bus if bus.count(":") > 1 else f"0000:{bus}"


def selinux_denials(_host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report what SELinux denied to programs that start guests or containers."""
    for one in facts.denials:
        policy = "the policy of the confined program (container-selinux, selinux-policy)"
        if "virt_launcher" in one.context:
            policy = "KubeVirt to a later release, whose policy virt_launcher allows it"
        yield finding(
            "selinux-access",
            "warning",
            f"SELinux denied {one.program}: {one.what}",
            (f"/var/log/audit/audit.log: {one.line}", "/sys/fs/selinux/enforce: 1"),
            "owner and mode of the file do not matter then",
            f"update {policy}; or allow it in a module of your own: ausearch -m avc -c "
            f"{one.program} | audit2allow -M local, then semodule -i local.pp",
        )


_OF_BMC = ("102b", "1a03")
"""Vendors of the graphics of BMCs: Matrox and ASPEED."""
_BY_DEFAULT = "the IOMMU is on by default in this kernel (CONFIG_INTEL_IOMMU_DEFAULT_ON)"


def iommu_blocks_host(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report functions of the host whose DMA VT-d blocks, which a mode of the IOMMU avoids."""
    logged = [one for one in facts.kernel_log or () if one.name == "dmar-fault" and one.address]
    known = [(host.device_named(one.address), one) for one in logged]
    own = [(device, one) for device, one in known if device and not device.is_for_guests]
    words = [w for w in host.kernel.words if w.startswith(("intel_iommu=on", "iommu=", "iommu.p"))]
    if not own or "iommu=pt" in words or "iommu.passthrough=1" in words:
        return
    is_bare = not any(
        d.is_graphics_or_accelerator and d.vendor_id not in _OF_BMC for d in host.devices
    )
    only = " (this host has no GPU but that of its BMC)" if is_bare else ""
    switch = "remove intel_iommu=on" if words else "add intel_iommu=off"
    yield finding(
        "iommu-blocks-host",
        "warning",
        f"the IOMMU blocks memory accesses of the host's own device: {own[0][0]}",
        (
            *(f"kernel log: {one.text}" for _, one in own),
            f"/proc/cmdline: {' '.join(words) or 'no intel_iommu= and no iommu='}",
        ),
        "the firmware does not describe all memory that the device uses, or its driver is wrong"
        + ("" if words else f", and {_BY_DEFAULT}"),
        f"update the firmware, and add iommu=pt, which maps all memory for devices of the host; if "
        f"no device is for guests{only}, {switch}{command_line(host)}; then reboot",
    )

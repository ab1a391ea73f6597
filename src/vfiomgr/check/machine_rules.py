"""Rules about what a machine or its security policy denies devices."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vfiomgr.check.model import Readiness, command_line
from vfiomgr.diagnostic import Diagnostic, warning
from vfiomgr.expressions import expression
from vfiomgr.host.kernel import parameters

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

_HIDE = "xen-pciback.hide"
_HIDDEN = expression(r"\(([^()]*)\)")
_FUNCTION = expression(
    r"(?i)(?:(?:0x)?0*[0-9a-f]{1,4}:)?(?:0x)?0*[0-9a-f]{1,2}:"
    r"(?:\*\.\*|(?:0x)?0*[01]?[0-9a-f]\.(?:(?:0x)?0*[0-7]|\*))"
)
_XEN_CMDLINE = "/opt/xensource/libexec/xen-cmdline"


def hidden_addresses(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report addresses in xen-pciback.hide= that pciback does not accept (pcistub_init)."""
    for one in parameters(host.kernel.command_line, _HIDE):
        given = _HIDDEN.findall(one.value)
        wrong = [each for each in given if not _FUNCTION.fullmatch(each)]
        if not wrong:
            continue
        right = [_corrected(each) for each in given]
        value = "".join(f"({each})" for each in right)
        write = f"write {_HIDE}={value}{command_line(host)}"
        if not all(_FUNCTION.fullmatch(each) for each in right):
            write = f"write each function as (DDDD:BB:DD.F){command_line(host)}"
        elif facts.distribution is not None and facts.distribution.id == "xenenterprise":
            write = f'{_XEN_CMDLINE} --set-dom0 "{_HIDE}={value}"'
        yield warning(
            "xen-hide-invalid",
            f"{_HIDE}= has an invalid address: {', '.join(wrong)}",
            (f"/proc/cmdline: {one.word}",),
            "pciback stops at the first invalid address: that function and the next ones stay with "
            "dom0",
            f"{write}, and reboot",
        )


def _corrected(address: str) -> str:
    """With one colon where there are several, and with the domain."""
    bus = ":".join(filter(None, address.split(":")))
    return bus if bus.count(":") > 1 else f"0000:{bus}"


def balloons(_host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report guests of Proxmox whose balloon gives nothing back, because VFIO pins the memory."""
    if facts.ballooned:
        ids = [line.partition(".conf:")[0].rpartition("/")[2] for line in facts.ballooned]
        yield warning(
            "balloon",
            f"the balloon has no effect in guests with PCI devices: {', '.join(ids)}",
            facts.ballooned,
            "VFIO pins all memory of such a guest at its start, for DMA of the device (also of a "
            "virtual function or vGPU): the host gets none of it back",
            f"switch the balloon off, and give the guest a fixed size: qm set {ids[0]} --balloon 0",
        )


def selinux_denials(_host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report what SELinux denied to programs that start guests or containers."""
    for one in facts.denials or ():
        policy = "the policy of the confined program (container-selinux, selinux-policy)"
        if "virt_launcher" in one.context:
            policy = "KubeVirt to a later release, whose policy virt_launcher allows it"
        yield warning(
            "selinux-access",
            f"SELinux denied {one.program}: {one.what}",
            (f"/var/log/audit/audit.log: {one.line}", "/sys/fs/selinux/enforce: 1"),
            "owner and mode of the file do not matter then",
            f"update {policy}; or allow it in a module of your own: ausearch -m avc -c "
            f"{shlex.quote(one.program)} | audit2allow -M local, then semodule -i local.pp",
        )


_OF_BMC = ("102b", "1a03")
"""Vendors of the graphics of BMCs: Matrox and ASPEED."""
_IOMMU_WORD = expression(r"(?:intel_iommu|iommu|iommu\.passthrough)=")
_IS_ON = expression(r"intel_iommu=(?:\S*,)?on(?:,|$)")
_IS_MODE = expression(r"iommu=(?:\S*,)?(?:no)?pt(?:,|$)|iommu\.passthrough=")
_MAPS_ALL = expression(r"iommu=(?:\S*,)?pt(?:,|$)|iommu\.passthrough=(?:1|[yY]|on)")
"""Of the words about passthrough the last counts (arch/x86/kernel/pci-dma.c: iommu_setup)."""
_BY_DEFAULT = "the IOMMU is on by default in this kernel (CONFIG_INTEL_IOMMU_DEFAULT_ON)"


def iommu_blocks_host(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report functions of the host whose DMA VT-d blocks, which a mode of the IOMMU avoids."""
    logged = [one for one in facts.kernel_log or () if one.name == "dmar-fault" and one.address]
    used = {one.address for one in facts.kernel_log or () if "vfio" in one.text}
    known = [(host.device_named(one.address), one) for one in logged if one.address not in used]
    own = [(d, one) for d, one in known if d and not (d.is_for_guests or host.origin(d))]
    words = [word for word in host.kernel.words if _IOMMU_WORD.match(word)]
    modes, switches = ([w for w in words if e.match(w)] for e in (_IS_MODE, _IS_ON))
    if not own or (modes and _MAPS_ALL.match(modes[-1])):
        return
    is_bare = not any(
        d.is_graphics_or_accelerator and d.vendor_id not in _OF_BMC for d in host.devices
    )
    only = " (this host has no GPU but that of its BMC)" if is_bare else ""
    yield warning(
        "iommu-blocks-host",
        f"the IOMMU blocks memory accesses of the host's own device: {own[0][0]}",
        (
            *(f"kernel log: {one.text}" for _, one in own),
            f"/proc/cmdline: {' '.join(words) or 'no intel_iommu= and no iommu='}",
        ),
        "the firmware does not describe all memory that the device uses, or its driver is wrong"
        + ("" if switches else f", and {_BY_DEFAULT}"),
        f"update the firmware, and {_set('iommu=pt', modes)}, which maps all memory for devices of "
        f"the host; if no device is for guests{only}, {_set('intel_iommu=off', switches)}"
        f"{command_line(host)}; then reboot",
    )


def _set(word: str, instead: list[str]) -> str:
    return f"replace {' '.join(instead)} with {word}" if instead else f"add {word}"

"""Remedies with the commands of the host's distribution and its installed tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vfiomgr.check.model import Distribution, Readiness
    from vfiomgr.snapshot.model import HostSnapshot

_GRUB = "edit GRUB_CMDLINE_LINUX in /etc/default/grub"
_COMMAND_LINE = {  # the first that is there
    "rpm-ostree": "rpm-ostree kargs --append=WORD, or --delete=WORD",
    "kernelstub": "kernelstub --add-options WORD, or --delete-options WORD",
    "grubby": "grubby --update-kernel=ALL --args=WORD, or --remove-args=WORD",
    "/etc/kernel/cmdline": "edit /etc/kernel/cmdline, then run kernel-install add for each kernel",
    "update-grub": f"{_GRUB}, then run update-grub",
    "grub2-mkconfig": f"{_GRUB}, then run grub2-mkconfig -o /boot/grub2/grub.cfg",
    "grub-mkconfig": f"{_GRUB}, then run grub-mkconfig -o /boot/grub/grub.cfg",
    "bootctl": "edit the options line of the entries in loader/entries on the boot partition",
}
_INITRAMFS = {
    "update-initramfs": "update-initramfs -u -k all",
    "dracut": "dracut --force --regenerate-all",
    "mkinitcpio": "mkinitcpio -P",
}
_FEDORA = "dnf install kernel-modules-{release}"
_SUSE = "zypper install kernel-{flavour}"
_PACKAGES = {
    "debian": "apt-get install linux-image-{flavour}",
    "ubuntu": "apt-get install linux-modules-extra-{release}",
    "fedora": _FEDORA,
    "rhel": _FEDORA,
    "centos": _FEDORA,
    "rocky": _FEDORA,
    "almalinux": _FEDORA,
    "sles": _SUSE,
    "opensuse-leap": _SUSE,
    "opensuse-tumbleweed": _SUSE,
    "arch": "pacman -S linux",
}
"""The package with all modules of a kernel, by ID of os-release; small kernels lack some modules.

The flavour is the last part of a release: 6.1.0-18-cloud-amd64, 6.4.0-150600.21-default.
"""
_DEBIAN_FLAVOURS = frozenset(
    {"686", "amd64", "arm64", "armmp", "loong64", "powerpc64le", "riscv64", "s390x"}
)
"""Releases of Debian's own kernels; for others the package is unknown."""
_PROXMOX_RELEASE = "-pve"
_PROXMOX_PACKAGE = "apt-get install proxmox-default-kernel"
_PROXMOX = {"proxmox-boot-tool", "/etc/kernel/cmdline"}


def command_line(facts: Readiness | None) -> str:
    """How to change the kernel command line on this host; empty if unknown."""
    distribution = facts.distribution if facts else None
    if distribution is None:
        return ""
    how = _command_line(distribution)
    return f" (on {distribution.name}: {how})" if how else ""


def _command_line(distribution: Distribution) -> str | None:
    if _PROXMOX.issubset(distribution.tools):
        return "edit /etc/kernel/cmdline, then run proxmox-boot-tool refresh"
    return _first(_COMMAND_LINE, distribution)


def rebuild_initramfs(facts: Readiness) -> str:
    """How to include modprobe.d in the initramfs."""
    distribution = facts.distribution
    command = _first(_INITRAMFS, distribution) if distribution else None
    return f"run {command}" if command else "rebuild the initramfs"


def install_modules(host: HostSnapshot, facts: Readiness) -> str:
    """How to install modules that the running kernel's packages lack."""
    command = _package(facts.distribution, host.kernel_release or "")
    by = f": {command}" if command else ""
    return f"install the package with this kernel's additional modules, or a generic kernel{by}"


def _package(distribution: Distribution | None, release: str) -> str | None:
    """The command that installs the package; None if the package or its tool is unknown."""
    if distribution is None or not release:
        return None
    command = _PACKAGES.get(distribution.id, "")
    flavour = release.rpartition("-")[2]
    if distribution.id == "debian" and flavour not in _DEBIAN_FLAVOURS:
        command = _PROXMOX_PACKAGE if release.endswith(_PROXMOX_RELEASE) else ""
    if command.partition(" ")[0] not in distribution.tools:
        return None
    return command.format(release=release, flavour=flavour)


def _first(table: dict[str, str], distribution: Distribution) -> str | None:
    return next((text for tool, text in table.items() if tool in distribution.tools), None)

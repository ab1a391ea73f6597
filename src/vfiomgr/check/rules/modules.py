"""Rules about kernel features: vfio-pci, containers, iommufd, driver_override."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.check.rules import remedy
from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.paths import PCI_DEVICES, PCI_DRIVERS, VFIO_CDEVS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.check.model import KernelModule, Readiness
    from vfiomgr.snapshot.model import HostSnapshot

_NO_LOADING = ("/bin/false", "/bin/true", "/usr/bin/false", "/usr/bin/true")
_OTHERS_MAY = 0o006
_DRIVER = "vfio-pci"
_IOMMUFD_NEED = "QEMU's iommufd backend needs them; VFIO groups do not"


def vfio_pci(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report whether vfio-pci is available."""
    module = facts.module("vfio_pci")
    why = "passthrough needs vfio-pci or a variant of it"
    if module.is_present or _DRIVER in host.pci_drivers:
        evidence = (_present(module, host), *_settings_at_boot(facts))
        yield finding("vfio-pci", "ok", "vfio-pci is available", evidence, why)
    elif lacking := tuple(_lacking_vfio_pci(host, facts)):
        title = "this kernel has no vfio-pci"
        fix = remedy.install_modules(host, facts)
        yield finding("vfio-pci", "blocker", title, lacking, why, fix)
    elif stopped := [s for s in facts.settings("install", "vfio_pci") if _is_stopped(s.arguments)]:
        title = "modprobe is configured not to load vfio-pci"
        fix = "remove that line, or load it once: modprobe --ignore-install vfio-pci"
        yield finding("vfio-pci", "blocker", title, tuple(map(str, stopped)), why, fix)
    elif module.state == "available" and facts.has_modprobe is False:
        evidence = (f"modules.dep of {host.kernel_release} lists vfio_pci", "modprobe: not found")
        title = "vfio-pci is not loaded, and modprobe was not found"
        fix = "configure the system to load vfio-pci at boot"
        yield finding("vfio-pci", "blocker", title, evidence, why, fix)
    elif module.state == "available":
        evidence = (f"modules.dep of {host.kernel_release} lists vfio_pci",)
        title = "vfio-pci is available; vfiomgr bind loads it"
        yield finding("vfio-pci", "ok", title, evidence, why)


def _lacking_vfio_pci(host: HostSnapshot, facts: Readiness) -> Iterator[str]:
    if facts.module("vfio_pci").state == "missing":
        yield _missing("vfio_pci", host)
    if facts.config.get("VFIO_PCI") == "n":
        yield from _option(facts, "VFIO_PCI")


def _is_stopped(command: str) -> bool:
    return command.split(" ", 1)[0] in _NO_LOADING


def _present(module: KernelModule, host: HostSnapshot) -> str:
    if module.state == "built-in":
        return f"modules.builtin of {host.kernel_release} lists {module.name}"
    return f"{PCI_DRIVERS}/{_DRIVER}" if module.state is None else f"/sys/module/{module.name}"


def _missing(name: str, host: HostSnapshot) -> str:
    return f"neither modules.dep nor modules.builtin of {host.kernel_release} lists {name}"


def _option(facts: Readiness, option: str) -> tuple[str, ...]:
    value = facts.config.get(option)
    if value is None:
        return ()
    shown = f"CONFIG_{option} is not set" if value == "n" else f"CONFIG_{option}={value}"
    return (f"{facts.config_source}: {shown}",)


def _settings_at_boot(facts: Readiness) -> tuple[str, ...]:
    return tuple(str(s) for s in facts.settings("options", "vfio_pci"))


def iommu_backend(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report a kernel without vfio_iommu_type1 and iommufd, the only backends on x86."""
    names = ("vfio_iommu_type1", "iommufd")
    if host.cpu_vendor is None or any(facts.module(n).state != "missing" for n in names):
        return
    yield finding(
        "iommu-backend",
        "blocker",
        "VFIO cannot map a guest's memory",
        tuple(_missing(name, host) for name in names),
        "VFIO needs one of the two to map the addresses of a guest's device",
        remedy.install_modules(host, facts),
    )


def driver_override(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report kernels before 3.16, which bind only by PCI IDs."""
    if facts.has_driver_override is False:
        yield finding(
            "driver-override",
            "warning",
            "functions have no driver_override",
            (f"{PCI_DEVICES}/*/driver_override: none of {len(host.devices)} functions has it",),
            "without it a driver binds all functions with the same PCI IDs",
            "boot a newer kernel",
        )


def iommufd(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report whether iommufd and VFIO character devices are available."""
    if any(_lacking_vfio_pci(host, facts)):
        return
    lacking = tuple(_lacking_iommufd(host, facts)) or tuple(_lacking_cdev(host, facts))
    if lacking:
        title = "this kernel has VFIO groups, but no iommufd with VFIO character devices"
        fix = "no action if you use VFIO groups; otherwise boot a kernel with both options"
        yield finding("iommufd", "info", title, lacking, _IOMMUFD_NEED, fix)
        return
    module = facts.module("iommufd")
    if facts.config.get("VFIO_DEVICE_CDEV") == "y" and module.state in ("built-in", "loaded"):
        evidence = (*_option(facts, "IOMMUFD"), *_option(facts, "VFIO_DEVICE_CDEV"))
        title = "iommufd and VFIO character devices are available"
        yield finding("iommufd", "ok", title, evidence, _IOMMUFD_NEED)


def _lacking_iommufd(host: HostSnapshot, facts: Readiness) -> Iterator[str]:
    if facts.node("/dev/iommu") is None and facts.module("iommufd").state == "missing":
        yield _missing("iommufd", host)
        yield from _option(facts, "IOMMUFD")


def _lacking_cdev(host: HostSnapshot, facts: Readiness) -> Iterator[str]:
    """Functions on VFIO without a character device, or the kernel option that is not set."""
    if facts.config.get("VFIO_DEVICE_CDEV") == "n":
        yield from _option(facts, "VFIO_DEVICE_CDEV")
    for device in (d for d in host.devices if d.is_on_vfio and not d.vfio_cdev):
        if device.vfio_device is None:
            yield f"{device.address} is on {device.driver}, but has no directory vfio-dev"
        elif facts.has_dev:
            place = f"{VFIO_CDEVS}/{device.vfio_device}"
            yield f"{device.address} has vfio-dev/{device.vfio_device}, but no {place}"


def container_node(_host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report a mode of /dev/vfio/vfio stricter than the kernel's 0666."""
    node = facts.node("/dev/vfio/vfio")
    if node is None or node.mode & _OTHERS_MAY == _OTHERS_MAY:
        return
    yield finding(
        "container-node",
        "info",
        f"not every user can open {node.path}",
        (f"{node.path}: mode {node.mode:04o}, owner {node.owner}",),
        "an unprivileged QEMU needs it in addition to its group node; the kernel's default is "
        "0666, which gives no access to devices",
        f"if an unprivileged QEMU fails to open it, remove the udev rule that names {node.path}",
    )

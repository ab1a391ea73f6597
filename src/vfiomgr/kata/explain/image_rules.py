"""Rules about the files and settings of a Kata guest, and how containers get its devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.check import platform_rules
from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.kata.explain.image import (
    DEFAULT_ROOTFS_TYPE,
    FILE_SYSTEMS,
    GuestFile,
    GuestImage,
)
from vfiomgr.kata.model import is_cdi_gpu
from vfiomgr.kata.settings import VFIO_MODES
from vfiomgr.passthrough.guards import iommu_unread, isolation
from vfiomgr.pci.model import PciDevice
from vfiomgr.rules.runner import RuleSet, register, rule
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.rules.report import Report


_VFIO = "vfio"
_INSIDE = (
    "contents of the image: driver, agent and hooks (boot it with a debug console, or mount it "
    "with losetup -P)"
)


class GuestContext(Value):
    """A guest, the devices that it gets, and its host."""

    image: GuestImage
    devices: Sequence[PciDevice] = ()
    """Without any, the rules are about any GPU."""
    host: HostSnapshot | None = None


def _isolation(context: GuestContext) -> Iterator[Diagnostic]:
    """The findings of `vfiomgr check` about the IOMMU, and devices without an IOMMU group."""
    host = context.host
    if host is None:
        return
    yield from (found for found in platform_rules.iommu(host) if found.severity != "ok")
    for device in context.devices:
        for found in isolation(host, device):
            why = "VFIO requires that an IOMMU isolates the function"
            yield replace(found, why=why)


def _settings(context: GuestContext) -> Iterator[Diagnostic]:
    """Kata rejects a configuration with a value that it does not accept."""
    image = context.image
    why = "Kata refuses the entire configuration"
    for key, value in image.mistyped:
        title, remedy = f"{key} is {value}", f"correct {key}, or remove it"
        yield finding("guest-setting", "blocker", title, (image.source,), why, remedy)
    if image.vfio_mode not in VFIO_MODES:
        yield finding(
            "guest-setting",
            "blocker",
            f"invalid vfio_mode: {image.vfio_mode!r}",
            (f"{image.source}: vfio_mode = {image.vfio_mode}",),
            why,
            f"write {' or '.join(VFIO_MODES)}",
        )


def _files(context: GuestContext) -> Iterator[Diagnostic]:
    """Every named file must exist."""
    image = context.image
    why = "Kata cannot start a guest without it"
    for file in image.files:
        evidence = (f"{image.source}: {file.key} = {file.path}",)
        if file.resolved is None:
            yield finding(
                "guest-file",
                "blocker",
                f"the guest's {file.key} does not exist",
                evidence,
                why,
                f"install the package of {file.path}, or name another {file.key}",
            )
        elif not file.is_regular:
            title = f"the guest's {file.key} is not a regular file"
            remedy = f"set {file.key} to the path of a file"
            yield finding("guest-file", "blocker", title, evidence, why, remedy)
        elif not file.size:
            title = f"the guest's {file.key} is empty"
            yield finding("guest-file", "blocker", title, evidence, why, "install it again")
        else:
            yield finding("guest-file", "ok", f"the guest's {file.key} exists", evidence, why)
    if image.file("kernel") is None and not image.mistyped:
        evidence = (f"{image.source}: no kernel in [hypervisor.{image.hypervisor}]",)
        remedy = "set kernel to the path of one, e.g. that of Kata's own configurations"
        yield finding("guest-file", "blocker", "the guest has no kernel", evidence, why, remedy)


def _root(context: GuestContext) -> Iterator[Diagnostic]:
    """An image or an initrd, but not both (getAssetPath and validation in config.go)."""
    image = context.image
    names = [key for key in ("image", "initrd") if image.file(key) is not None]
    if len(names) == 1 or (not names and image.mistyped):
        return
    section = f"[hypervisor.{image.hypervisor}]"
    title = "the guest has an image and an initrd" if names else "the guest has no root file system"
    yield finding(
        "guest-root",
        "blocker",
        title,
        (f"{image.source}: {section} has {' and '.join(names) or 'neither image nor initrd'}",),
        "Kata needs exactly one of them",
        "remove one of them" if names else "set image to the path of one",
    )


def _file_system(context: GuestContext) -> Iterator[Diagnostic]:
    """The guest's kernel mounts its root only with the configured file system."""
    image = context.image
    file = image.file("image")
    if file is None or file.file_system is None:
        return
    told = image.rootfs_type or DEFAULT_ROOTFS_TYPE
    shown = "" if image.rootfs_type else " (the default)"
    evidence = (
        f"{image.source}: rootfs_type = {told}{shown}",
        f"{file.resolved}: {file.file_system} in its first partition",
    )
    why = "the guest kernel panics if it cannot mount its root (rootfstype=)"
    if told == file.file_system:
        title = f"rootfs_type matches the image: {told}"
        yield finding("rootfs-type", "ok", title, evidence, why)
        return
    title = f"the image is {file.file_system}, but rootfs_type is {told}"
    remedy = f'write rootfs_type = "{file.file_system}"'
    yield finding("rootfs-type", "blocker", title, evidence, why, remedy)


def _unknown_file_system(context: GuestContext) -> Iterator[str]:
    image = context.image
    file = image.file("image")
    if file is None or not (file.resolved and file.is_regular and file.size) or file.file_system:
        return
    told = image.rootfs_type or DEFAULT_ROOTFS_TYPE
    yield (
        f"the file system of {file.resolved}: none of {', '.join(FILE_SYSTEMS)} found, but "
        f"rootfs_type is {told}"
    )


def _driver(context: GuestContext) -> Iterator[Diagnostic]:
    """The guest needs the device's driver, unless containers get VFIO nodes."""
    image, devices = context.image, context.devices
    root, kernel = image.root, image.file("kernel")
    if image.vfio_mode == _VFIO or root is None or kernel is None:
        return
    evidence = (_named(image, root), _named(image, kernel))
    nvidia = [device for device in devices if is_cdi_gpu(device)]
    why = "containers in the guest need a driver in the guest kernel"
    if root.is_for_nvidia and kernel.is_for_nvidia:
        title = "image and kernel are for NVIDIA GPUs, by their names"
        yield finding("guest-driver", "ok", title, evidence, why)
    elif root.is_for_nvidia or kernel.is_for_nvidia:
        title = "image and kernel are of different builds, by their names"
        yield finding(
            "guest-driver",
            "warning",
            title,
            evidence,
            "the NVIDIA modules of the image only work with the kernel that they were built for",
            "use both from one build: vmlinux-nvidia-gpu and kata-containers-nvidia-gpu.img",
        )
    elif nvidia or not devices:
        shown = ", ".join(str(device) for device in nvidia) or "NVIDIA's GPUs"
        yield finding(
            "guest-driver",
            "warning" if nvidia else "info",
            f"image and kernel have no driver for {shown}, by their names",
            evidence,
            why,
            "use Kata's build for GPUs (kata-containers-nvidia-gpu.img and vmlinux-nvidia-gpu), "
            "or your own image with driver and toolkit",
        )
    others = [device for device in devices if device not in nvidia]
    if others:
        shown = ", ".join(str(device) for device in others)
        yield finding(
            "guest-driver",
            "info",
            f"the guest needs a driver for {shown}",
            evidence,
            why,
            "add it to the guest's kernel or image; lspci -k in the guest shows the available "
            "drivers",
        )


def _containers(context: GuestContext) -> Iterator[Diagnostic]:
    """How a container in the guest gets the device nodes of the driver."""
    image, devices = context.image, context.devices
    root = image.root
    if image.vfio_mode == _VFIO or root is None:
        return
    hooks = image.guest_hook_path
    evidence = (_named(image, root), f"{image.source}: guest_hook_path = {hooks or 'not set'}")
    others = [device for device in devices if not is_cdi_gpu(device)]
    if others and not hooks:
        shown = ", ".join(str(device) for device in others)
        yield finding(
            "guest-nodes",
            "info",
            f"containers get no device nodes for {shown} automatically",
            evidence,
            "Kata uses the guest's CDI only for NVIDIA display functions; for other PCI devices "
            "of the guest, containers get no device nodes",
            "add a hook to the image that adds them (guest_hook_path/prestart), or run the "
            "container privileged in its guest",
        )
    needs_hook = not root.is_for_nvidia and (not devices or len(others) < len(devices))
    if needs_hook and not hooks:
        yield finding(
            "guest-nodes",
            "info" if not devices else "warning",
            "neither the image nor a hook gives containers the GPU",
            evidence,
            "Kata's build for GPUs uses the guest's CDI (NVRC and nvidia-ctk in the image); "
            "other images need NVIDIA's container toolkit and its hook",
            'set guest_hook_path = "/usr/share/oci/hooks", with the toolkit\'s hook in its '
            "prestart",
        )
    elif hooks:
        title = f"the guest's agent runs the hooks below {hooks}"
        why = "the hooks are in the image: prestart, poststart and poststop below that directory"
        yield finding("guest-nodes", "ok", title, evidence, why)


def _named(image: GuestImage, file: GuestFile) -> str:
    leads = f" -> {file.resolved}" if file.resolved not in (None, file.path) else ""
    return f"{image.source}: {file.key} = {file.path}{leads}"


def _unknown(context: GuestContext) -> Iterator[str]:
    yield from _unknown_file_system(context)
    yield from () if context.host is None else iommu_unread(context.host)


RULES: RuleSet[GuestContext] = register(
    RuleSet(
        "a Kata guest",
        rules=(
            rule(_settings, "guest-setting"),
            rule(_files, "guest-file"),
            rule(_root, "guest-root"),
            rule(_file_system, "rootfs-type"),
            rule(_driver, "guest-driver"),
            rule(_containers, "guest-nodes"),
            rule(_isolation, "iommu", "no-group"),
        ),
        not_checked=(lambda _context: (_INSIDE,),),
        unknown=(_unknown,),
    )
)


def check_guest_image(
    image: GuestImage, devices: Sequence[PciDevice] = (), host: HostSnapshot | None = None
) -> Report:
    """Findings about a guest, blockers first; without devices, for any GPU."""
    return RULES.run(GuestContext(image, devices, host))

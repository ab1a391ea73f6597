"""Whether the guest that a configuration boots can use a device: driver, toolkit, hooks.

What is inside an image is not looked at: names, file systems and the configuration tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.model.kata_image import DEFAULT_ROOTFS_TYPE, FILE_SYSTEMS
from vfiomgr.model.kata_settings import VFIO_MODES
from vfiomgr.model.readiness import SEVERITIES, Finding, Report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.model.kata_image import GuestFile, GuestImage
    from vfiomgr.model.pci import PciDevice

_NVIDIA = "10de"
_DISPLAY = "03"
_VFIO = "vfio"
_INSIDE = (
    "what is inside the image: driver, agent and hooks; boot it with a debug console, or mount it "
    "(losetup -P)"
)


def check_guest_image(image: GuestImage, devices: Sequence[PciDevice] = ()) -> Report:
    """What is found of a guest, the gravest first; without devices, what any GPU would need."""
    found = [
        *_settings(image),
        *_files(image),
        *_root(image),
        *_file_system(image),
        *_driver(image, devices),
        *_containers(image, devices),
    ]
    return Report(
        tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))),
        (*_unknown_file_system(image), _INSIDE),
    )


def _settings(image: GuestImage) -> Iterator[Finding]:
    """Kata reads no part of a configuration with a value that it cannot take."""
    why = "Kata refuses the whole configuration"
    for text in image.mistyped:
        key = text.partition(" is ")[0]
        remedy = f"correct {key}, or leave it out"
        yield Finding("guest-setting", "blocker", text, (image.source,), why, remedy)
    if image.vfio_mode not in VFIO_MODES:
        yield Finding(
            "guest-setting",
            "blocker",
            f"vfio_mode is {image.vfio_mode!r}",
            (f"{image.source}: vfio_mode = {image.vfio_mode}",),
            why,
            f"write {' or '.join(VFIO_MODES)}",
        )


def _files(image: GuestImage) -> Iterator[Finding]:
    """Every file that is named has to be there."""
    why = "Kata starts no guest without it"
    for file in image.files:
        evidence = (f"{image.source}: {file.key} = {file.path}",)
        if file.resolved is None:
            yield Finding(
                "guest-file",
                "blocker",
                f"the guest's {file.key} is not there",
                evidence,
                why,
                f"install what holds {file.path}, or name another {file.key}",
            )
        elif not file.is_regular:
            title = f"the guest's {file.key} is no regular file"
            remedy = f"name the file itself: {file.key} = …"
            yield Finding("guest-file", "blocker", title, evidence, why, remedy)
        elif not file.size:
            title = f"the guest's {file.key} is empty"
            yield Finding("guest-file", "blocker", title, evidence, why, "install it again")
        else:
            yield Finding("guest-file", "ok", f"the guest's {file.key} is there", evidence, why)
    if image.file("kernel") is None and not image.mistyped:
        evidence = (f"{image.source}: no kernel below [hypervisor.{image.hypervisor}]",)
        remedy = "name one: kernel = …"
        yield Finding("guest-file", "blocker", "the guest has no kernel", evidence, why, remedy)


def _root(image: GuestImage) -> Iterator[Finding]:
    """An image or an initrd: one of both (getAssetPath and validation in config.go)."""
    names = [key for key in ("image", "initrd") if image.file(key) is not None]
    if len(names) == 1 or (not names and image.mistyped):
        return
    section = f"[hypervisor.{image.hypervisor}]"
    title = "the guest has an image and an initrd" if names else "the guest has no root file system"
    yield Finding(
        "guest-root",
        "blocker",
        title,
        (f"{image.source}: {section} names {' and '.join(names) or 'neither image nor initrd'}",),
        "Kata takes one of the two, and no guest with both or none",
        "leave one of them out" if names else "name an image: image = …",
    )


def _file_system(image: GuestImage) -> Iterator[Finding]:
    """The guest's kernel is told the file system of its root, and mounts no other."""
    file = image.file("image")
    if file is None or file.file_system is None:
        return
    told = image.rootfs_type or DEFAULT_ROOTFS_TYPE
    shown = "" if image.rootfs_type else " (the default)"
    evidence = (
        f"{image.source}: rootfs_type = {told}{shown}",
        f"{file.resolved}: {file.file_system} in its first partition",
    )
    why = "the guest's kernel panics over a root that it cannot mount (rootfstype=)"
    if told == file.file_system:
        title = f"rootfs_type is the image's: {told}"
        yield Finding("rootfs-type", "ok", title, evidence, why)
        return
    title = f"the image is {file.file_system}, and the guest is told {told}"
    remedy = f'rootfs_type = "{file.file_system}"'
    yield Finding("rootfs-type", "blocker", title, evidence, why, remedy)


def _unknown_file_system(image: GuestImage) -> Iterator[str]:
    file = image.file("image")
    if file is None or not (file.resolved and file.is_regular and file.size) or file.file_system:
        return
    told = image.rootfs_type or DEFAULT_ROOTFS_TYPE
    yield (
        f"the file system of {file.resolved}, in which none of {', '.join(FILE_SYSTEMS)} is found; "
        f"the guest is told {told}"
    )


def _driver(image: GuestImage, devices: Sequence[PciDevice]) -> Iterator[Finding]:
    """Where a container gets no nodes of VFIO, the guest needs the device's driver."""
    root, kernel = image.root, image.file("kernel")
    if image.vfio_mode == _VFIO or root is None or kernel is None:
        return
    evidence = (_named(image, root), _named(image, kernel))
    nvidia = [device for device in devices if is_cdi_gpu(device)]
    why = "a container in the guest uses what the guest's kernel has a driver for"
    if root.is_for_nvidia and kernel.is_for_nvidia:
        title = "image and kernel are those for NVIDIA's GPUs, by their names"
        yield Finding("guest-driver", "ok", title, evidence, why)
    elif root.is_for_nvidia or kernel.is_for_nvidia:
        title = "image and kernel are not of one build, by their names"
        yield Finding(
            "guest-driver",
            "warning",
            title,
            evidence,
            "NVIDIA's modules are in the image, and are for the kernel that they were built with",
            "take both from one build: vmlinux-nvidia-gpu and kata-containers-nvidia-gpu.img",
        )
    elif nvidia or not devices:
        shown = ", ".join(str(device) for device in nvidia) or "NVIDIA's GPUs"
        yield Finding(
            "guest-driver",
            "warning" if nvidia else "info",
            f"image and kernel have no driver for {shown}, by their names",
            evidence,
            why,
            "take Kata's build for GPUs (kata-containers-nvidia-gpu.img and vmlinux-nvidia-gpu), "
            "or an image of your own with driver and toolkit",
        )
    others = [device for device in devices if device not in nvidia]
    if others:
        shown = ", ".join(str(device) for device in others)
        yield Finding(
            "guest-driver",
            "info",
            f"the guest needs a driver for {shown}",
            evidence,
            why,
            "build it into the guest's kernel or image; lspci -k in the guest shows which it has",
        )


def _containers(image: GuestImage, devices: Sequence[PciDevice]) -> Iterator[Finding]:
    """How a container in the guest comes by the nodes of the guest's driver."""
    root = image.root
    if image.vfio_mode == _VFIO or root is None:
        return
    hooks = image.guest_hook_path
    evidence = (_named(image, root), f"{image.source}: guest_hook_path = {hooks or 'not set'}")
    others = [device for device in devices if not is_cdi_gpu(device)]
    if others and not hooks:
        shown = ", ".join(str(device) for device in others)
        yield Finding(
            "guest-nodes",
            "info",
            f"no container gets nodes for {shown} by itself",
            evidence,
            "Kata asks the guest's CDI for NVIDIA's display functions alone; all else is a PCI "
            "device of the guest, whose nodes a container does not have",
            "give the image a hook (guest_hook_path/prestart) that adds them, or run the container "
            "privileged in its guest",
        )
    needs_hook = not root.is_for_nvidia and (not devices or len(others) < len(devices))
    if needs_hook and not hooks:
        yield Finding(
            "guest-nodes",
            "info" if not devices else "warning",
            "neither the image nor a hook gives containers the GPU",
            evidence,
            "in Kata's build for GPUs the guest's CDI does (NVRC and nvidia-ctk in the image); "
            "other images need NVIDIA's container toolkit and its hook",
            'guest_hook_path = "/usr/share/oci/hooks", with the toolkit\'s hook in its prestart',
        )
    elif hooks:
        title = f"the guest's agent runs the hooks below {hooks}"
        why = "they lie in the image: prestart, poststart and poststop below that directory"
        yield Finding("guest-nodes", "ok", title, evidence, why)


def is_cdi_gpu(device: PciDevice) -> bool:
    """Whether Kata asks the guest's CDI for it (annotateContainerWithVFIOMetadata)."""
    return device.vendor_id == _NVIDIA and device.class_code.startswith(_DISPLAY)


def _named(image: GuestImage, file: GuestFile) -> str:
    leads = f" -> {file.resolved}" if file.resolved not in (None, file.path) else ""
    return f"{image.source}: {file.key} = {file.path}{leads}"

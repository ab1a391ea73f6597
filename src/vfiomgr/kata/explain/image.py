"""The files that a Kata guest boots, and what can be seen in them."""

from __future__ import annotations

import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.check import platform_rules
from vfiomgr.diagnostic import Diagnostic, Severity, finding, info, problem, warning
from vfiomgr.kata.facts import VFIO_MODES
from vfiomgr.kata.model import is_cdi_gpu
from vfiomgr.passthrough.isolation import iommu_unread, isolation
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciDevice
from vfiomgr.rules.runner import Report, RuleSet, register, rule
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

DEFAULT_ROOTFS_TYPE = "ext4"
"""Kata's default (defaultRootfsType, config-settings.go)."""
_SECTOR = 512
_SIGNATURE = b"\x55\xaa"
_FIRST_PARTITION = 0x1BE
_EROFS = (1024, bytes.fromhex("e2e1f5e0"))
_EXT = (1024 + 56, b"\x53\xef")
_XFS = (0, b"XFSB")
FILE_SYSTEMS = {"erofs": _EROFS, "ext4": _EXT, "xfs": _XFS}
"""The places of superblock numbers, for the file systems of the image builder."""
_SUPERBLOCK = 2048
ReadPart = Callable[[int, int], bytes]
"""Bytes of an image from an offset on; fewer at its end."""


class GuestFile(Value):
    """A file of the configuration."""

    key: str
    """`kernel`, `image` or `initrd`."""
    path: str
    resolved: str | None
    """The target of its links; None if the file does not exist."""
    size: int = 0
    file_system: str | None = None
    """The file system of an image's first partition; None if unknown."""
    is_regular: bool = True

    @property
    def is_for_nvidia(self) -> bool:
        """Whether it is for NVIDIA GPUs, by the naming of Kata's own builds."""
        return "nvidia" in f"{self.path} {self.resolved or ''}".lower()


class GuestImage(Value):
    """The files and settings of a guest."""

    source: str
    """The configuration."""
    hypervisor: str
    files: tuple[GuestFile, ...]
    rootfs_type: str | None
    """As configured; None for the default."""
    guest_hook_path: str
    vfio_mode: str
    mistyped: tuple[tuple[str, str], ...] = ()
    """Keys with values of a wrong type, and what these are: `3, not a string`."""

    def file(self, key: str) -> GuestFile | None:
        """The file of a key; None if it is not set."""
        return next((file for file in self.files if file.key == key), None)

    @property
    def root(self) -> GuestFile | None:
        """The file with the guest's root file system."""
        return self.file("image") or self.file("initrd")


def file_system_of(read: ReadPart) -> str | None:
    """The file system of an image: in its first partition, or in the image without partitions.

    tools/osbuilder/image-builder/image_builder.sh: an MS-DOS partition table at the start leads to
    the root, even if a second one, for DAX, follows 2 MiB later.
    """
    start = _partition_start(read(0, _SECTOR))
    superblock = read(start, _SUPERBLOCK)
    for name, (offset, magic) in FILE_SYSTEMS.items():
        if superblock[offset : offset + len(magic)] == magic:
            return name
    return None


def _partition_start(sector: bytes) -> int:
    """The offset of the first partition in bytes; 0 without a partition table."""
    entry = sector[_FIRST_PARTITION : _FIRST_PARTITION + 16]
    if sector[-2:] != _SIGNATURE or len(sector) < _SECTOR or not entry[4]:
        return 0
    (first,) = struct.unpack_from("<I", entry, 8)
    return int(first) * _SECTOR


def read_guest_file(tree: HostTree, key: str, path: str) -> GuestFile:
    """The state of a file; for an image with its file system."""
    resolved = tree.resolve(HostPath(path)) if path.startswith("/") else None
    status = None if resolved is None else tree.status(resolved)
    if resolved is None or status is None:
        return GuestFile(key, path, None)
    is_regular = stat.S_ISREG(status.st_mode)
    kind = None
    if key == "image" and is_regular:
        kind = file_system_of(lambda start, length: tree.read_part(resolved, start, length))
    return GuestFile(key, path, str(resolved), status.st_size, kind, is_regular)


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
    faults: tuple[Diagnostic, ...] = ()
    """Those of the release with its configuration."""
    waits_for_cdi: bool = False
    """Whether the guest's agent starts a container with a GPU only with a CDI specification."""


def _isolation(context: GuestContext) -> Iterator[Diagnostic]:
    """The findings of `vfiomgr check` about the IOMMU, and devices without an IOMMU group."""
    host = context.host
    if host is not None:
        yield from (found for found in platform_rules.iommu(host) if found.severity != "ok")
        for device in context.devices:
            for found in isolation(host, device):
                yield replace(found, why="VFIO requires that an IOMMU isolates the function")


def without_kvm(host: HostSnapshot | None) -> Iterator[Diagnostic]:
    """The finding of `vfiomgr check` about KVM, without which Kata starts no guest."""
    if host is not None and host.readiness is not None:
        for found in platform_rules.kvm(host, host.readiness):
            yield replace(found, severity="blocker", why="Kata starts no guest without KVM")


def _settings(context: GuestContext) -> Iterator[Diagnostic]:
    """Kata rejects a configuration with a value that it does not accept."""
    image = context.image
    why = "Kata refuses the entire configuration"
    for key, value in image.mistyped:
        title, remedy = f"{key} is {value}", f"correct {key}, or remove it"
        yield problem("guest-setting", title, (image.source,), why, remedy)
    if image.vfio_mode not in VFIO_MODES:
        yield problem(
            "guest-setting",
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
        severity: Severity = "blocker"
        if file.resolved is None:
            state = "does not exist"
            remedy = f"install the package of {file.path}, or name another {file.key}"
        elif not file.is_regular:
            state, remedy = "is not a regular file", f"set {file.key} to the path of a file"
        elif not file.size:
            state, remedy = "is empty", "install it again"
        else:
            severity, state, remedy = "ok", "exists", ""
        title = f"the guest's {file.key} {state}"
        yield finding("guest-file", severity, title, evidence, why, remedy)
    if image.file("kernel") is None and not image.mistyped:
        evidence = (f"{image.source}: no kernel in [hypervisor.{image.hypervisor}]",)
        remedy = "set kernel to the path of one, e.g. that of Kata's own configurations"
        yield problem("guest-file", "the guest has no kernel", evidence, why, remedy)


def _root(context: GuestContext) -> Iterator[Diagnostic]:
    """An image or an initrd, but not both (getAssetPath and validation in config.go)."""
    image = context.image
    names = [key for key in ("image", "initrd") if image.file(key) is not None]
    if len(names) == 1 or (not names and image.mistyped):
        return
    section = f"[hypervisor.{image.hypervisor}]"
    title = "the guest has an image and an initrd" if names else "the guest has no root file system"
    yield problem(
        "guest-root",
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
    yield problem("rootfs-type", title, evidence, why, remedy)


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
        yield warning(
            "guest-driver",
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
    others = ", ".join(str(device) for device in devices if device not in nvidia)
    if others:
        yield info(
            "guest-driver",
            f"the guest needs a driver for {others}",
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
        yield info(
            "guest-nodes",
            f"containers get no device nodes for {shown} automatically",
            evidence,
            "Kata uses the guest's CDI only for NVIDIA display functions; for other PCI devices "
            "of the guest, containers get no device nodes",
            "add a hook to the image that adds them (guest_hook_path/prestart), or run the "
            "container privileged in its guest",
        )
    needs_hook = not root.is_for_nvidia and (not devices or len(others) < len(devices))
    if needs_hook and context.waits_for_cdi:
        yield finding(
            "guest-nodes",
            "info" if not devices else "warning",
            "the image has no CDI specification of the guest for the GPU, by its name",
            evidence,
            "the agent waits for a CDI specification that the guest writes, and then refuses the "
            "container (agent.cdi_timeout only waits longer; hooks do not replace it)",
            "use Kata's build for GPUs, whose NVRC writes it, or an image with NVIDIA's driver and "
            "toolkit that does",
        )
    elif needs_hook and not hooks:
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
    image = context.image
    file = image.file("image")
    if file and file.resolved and file.is_regular and file.size and not file.file_system:
        told = image.rootfs_type or DEFAULT_ROOTFS_TYPE
        yield (
            f"the file system of {file.resolved}: none of {', '.join(FILE_SYSTEMS)} found, but "
            f"rootfs_type is {told}"
        )
    yield from () if context.host is None else iommu_unread(context.host)


RULES: RuleSet[GuestContext] = register(
    RuleSet(
        "a Kata guest",
        rules=(
            rule(lambda context: without_kvm(context.host), "kvm"),
            rule(
                lambda context: context.faults,
                "kata-hypervisor",
                "kata-sandbox-cgroup",
                "vfio-node-in-container",
                "kata-early-hotplug",
                "kata-hypervisor-devices",
                "kata-address-spaces",
            ),
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
    image: GuestImage,
    devices: Sequence[PciDevice] = (),
    host: HostSnapshot | None = None,
    faults: tuple[Diagnostic, ...] = (),
    *,
    waits_for_cdi: bool = False,
) -> Report:
    """Findings about a guest, blockers first; without devices, for any GPU."""
    context = GuestContext(image, devices, host, faults, waits_for_cdi)
    return RULES.run(context)

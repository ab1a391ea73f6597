"""What a Kata guest boots: the files that its configuration names, and what is seen of them."""

from __future__ import annotations

import stat
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from vfiomgr.check.model import Report
from vfiomgr.diagnostic import SEVERITIES, Diagnostic, finding, refuse, refuse_if_any
from vfiomgr.kata.model import is_cdi_gpu
from vfiomgr.kata.settings import VFIO_MODES
from vfiomgr.passthrough.guards import bridge
from vfiomgr.paths import HostPath
from vfiomgr.value import Value
from vfiomgr.vgpu.guest_device import is_uuid

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu


DEFAULT_ROOTFS_TYPE = "ext4"
"""What Kata takes where the configuration does not say (defaultRootfsType, config-settings.go)."""
_SECTOR = 512
_SIGNATURE = b"\x55\xaa"
_FIRST_PARTITION = 0x1BE
_EROFS = (1024, bytes.fromhex("e2e1f5e0"))
_EXT = (1024 + 56, b"\x53\xef")
_XFS = (0, b"XFSB")
FILE_SYSTEMS = {"erofs": _EROFS, "ext4": _EXT, "xfs": _XFS}
"""Where the superblocks of those that the image builder makes have their numbers."""
_SUPERBLOCK = 2048
ReadPart = Callable[[int, int], bytes]
"""The bytes of an image from a place on; fewer where it ends."""


class GuestFile(Value):
    """A file that the configuration names."""

    key: str
    """`kernel`, `image` or `initrd`."""
    path: str
    resolved: str | None
    """Where its links lead; None where there is no such file."""
    size: int = 0
    file_system: str | None = None
    """Of an image: that of its first partition; None where it is not known."""
    is_regular: bool = True

    @property
    def is_for_nvidia(self) -> bool:
        """Whether its name says so: Kata's own builds for GPUs have it in theirs."""
        return "nvidia" in f"{self.path} {self.resolved or ''}".lower()


class GuestImage(Value):
    """What the guest of a configuration is made of."""

    source: str
    """The configuration."""
    hypervisor: str
    files: tuple[GuestFile, ...]
    rootfs_type: str | None
    """As it is set; None for the default."""
    guest_hook_path: str
    vfio_mode: str
    mistyped: tuple[tuple[str, str], ...] = ()
    """Keys with values of a wrong type, and what these are: `3, and no text`."""

    def file(self, key: str) -> GuestFile | None:
        """The file of a key; None where the configuration names none."""
        return next((file for file in self.files if file.key == key), None)

    @property
    def root(self) -> GuestFile | None:
        """What holds the guest's root file system."""
        return self.file("image") or self.file("initrd")


def file_system_of(read: ReadPart) -> str | None:
    """The file system of an image: in its first partition, or of the whole where it has none.

    tools/osbuilder/image-builder/image_builder.sh: a table of MS-DOS at the start leads to the root
    also where a second one, for DAX, is 2 MiB behind it.
    """
    start = _partition_start(read(0, _SECTOR))
    superblock = read(start, _SUPERBLOCK)
    for name, (offset, magic) in FILE_SYSTEMS.items():
        if superblock[offset : offset + len(magic)] == magic:
            return name
    return None


def _partition_start(sector: bytes) -> int:
    """Where the first partition begins, in bytes; 0 where there is no table."""
    entry = sector[_FIRST_PARTITION : _FIRST_PARTITION + 16]
    if sector[-2:] != _SIGNATURE or len(sector) < _SECTOR or not entry[4]:
        return 0
    (first,) = struct.unpack_from("<I", entry, 8)
    return int(first) * _SECTOR


def read_guest_file(tree: HostTree, key: str, path: str) -> GuestFile:
    """What is there of a file; of an image also its file system."""
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


def _settings(image: GuestImage) -> Iterator[Diagnostic]:
    """Kata reads no part of a configuration with a value that it cannot take."""
    why = "Kata refuses the whole configuration"
    for key, value in image.mistyped:
        title, remedy = f"{key} is {value}", f"correct {key}, or leave it out"
        yield finding("guest-setting", "blocker", title, (image.source,), why, remedy)
    if image.vfio_mode not in VFIO_MODES:
        yield finding(
            "guest-setting",
            "blocker",
            f"vfio_mode is {image.vfio_mode!r}",
            (f"{image.source}: vfio_mode = {image.vfio_mode}",),
            why,
            f"write {' or '.join(VFIO_MODES)}",
        )


def _files(image: GuestImage) -> Iterator[Diagnostic]:
    """Every file that is named has to be there."""
    why = "Kata starts no guest without it"
    for file in image.files:
        evidence = (f"{image.source}: {file.key} = {file.path}",)
        if file.resolved is None:
            yield finding(
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
            yield finding("guest-file", "blocker", title, evidence, why, remedy)
        elif not file.size:
            title = f"the guest's {file.key} is empty"
            yield finding("guest-file", "blocker", title, evidence, why, "install it again")
        else:
            yield finding("guest-file", "ok", f"the guest's {file.key} is there", evidence, why)
    if image.file("kernel") is None and not image.mistyped:
        evidence = (f"{image.source}: no kernel below [hypervisor.{image.hypervisor}]",)
        remedy = "name one: kernel = …"
        yield finding("guest-file", "blocker", "the guest has no kernel", evidence, why, remedy)


def _root(image: GuestImage) -> Iterator[Diagnostic]:
    """An image or an initrd: one of both (getAssetPath and validation in config.go)."""
    names = [key for key in ("image", "initrd") if image.file(key) is not None]
    if len(names) == 1 or (not names and image.mistyped):
        return
    section = f"[hypervisor.{image.hypervisor}]"
    title = "the guest has an image and an initrd" if names else "the guest has no root file system"
    yield finding(
        "guest-root",
        "blocker",
        title,
        (f"{image.source}: {section} names {' and '.join(names) or 'neither image nor initrd'}",),
        "Kata takes one of the two, and no guest with both or none",
        "leave one of them out" if names else "name an image: image = …",
    )


def _file_system(image: GuestImage) -> Iterator[Diagnostic]:
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
        yield finding("rootfs-type", "ok", title, evidence, why)
        return
    title = f"the image is {file.file_system}, and the guest is told {told}"
    remedy = f'rootfs_type = "{file.file_system}"'
    yield finding("rootfs-type", "blocker", title, evidence, why, remedy)


def _unknown_file_system(image: GuestImage) -> Iterator[str]:
    file = image.file("image")
    if file is None or not (file.resolved and file.is_regular and file.size) or file.file_system:
        return
    told = image.rootfs_type or DEFAULT_ROOTFS_TYPE
    yield (
        f"the file system of {file.resolved}, in which none of {', '.join(FILE_SYSTEMS)} is found; "
        f"the guest is told {told}"
    )


def _driver(image: GuestImage, devices: Sequence[PciDevice]) -> Iterator[Diagnostic]:
    """Where a container gets no nodes of VFIO, the guest needs the device's driver."""
    root, kernel = image.root, image.file("kernel")
    if image.vfio_mode == _VFIO or root is None or kernel is None:
        return
    evidence = (_named(image, root), _named(image, kernel))
    nvidia = [device for device in devices if is_cdi_gpu(device)]
    why = "a container in the guest uses what the guest's kernel has a driver for"
    if root.is_for_nvidia and kernel.is_for_nvidia:
        title = "image and kernel are those for NVIDIA's GPUs, by their names"
        yield finding("guest-driver", "ok", title, evidence, why)
    elif root.is_for_nvidia or kernel.is_for_nvidia:
        title = "image and kernel are not of one build, by their names"
        yield finding(
            "guest-driver",
            "warning",
            title,
            evidence,
            "NVIDIA's modules are in the image, and are for the kernel that they were built with",
            "take both from one build: vmlinux-nvidia-gpu and kata-containers-nvidia-gpu.img",
        )
    elif nvidia or not devices:
        shown = ", ".join(str(device) for device in nvidia) or "NVIDIA's GPUs"
        yield finding(
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
        yield finding(
            "guest-driver",
            "info",
            f"the guest needs a driver for {shown}",
            evidence,
            why,
            "build it into the guest's kernel or image; lspci -k in the guest shows which it has",
        )


def _containers(image: GuestImage, devices: Sequence[PciDevice]) -> Iterator[Diagnostic]:
    """How a container in the guest comes by the nodes of the guest's driver."""
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
            f"no container gets nodes for {shown} by itself",
            evidence,
            "Kata asks the guest's CDI for NVIDIA's display functions alone; all else is a PCI "
            "device of the guest, whose nodes a container does not have",
            "give the image a hook (guest_hook_path/prestart) that adds them, or run the container "
            "privileged in its guest",
        )
    needs_hook = not root.is_for_nvidia and (not devices or len(others) < len(devices))
    if needs_hook and not hooks:
        yield finding(
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
        yield finding("guest-nodes", "ok", title, evidence, why)


def _named(image: GuestImage, file: GuestFile) -> str:
    leads = f" -> {file.resolved}" if file.resolved not in (None, file.path) else ""
    return f"{image.source}: {file.key} = {file.path}{leads}"


ISSUE = "kata-containers/kata-containers#10681"


def refuse_mediated(host: HostSnapshot, name: str, otherwise: str = "") -> None:
    """Make sure that a name is not that of a mediated device.

    Raises:
        Refusal: it is; the hint is what works instead, and `otherwise` after it.

    """
    vgpu = host.vgpu(name)
    if vgpu is not None and vgpu.uuid is not None:
        hint = instead_of(host, vgpu) + otherwise
        refuse("kata-mediated", vgpu.name, why_not(vgpu), hint)
    if vgpu is None and is_uuid(name):
        message = f"{name.lower()}: Kata attaches no mediated device ({ISSUE})"
        libvirt = f"vfiomgr libvirt hostdev {name.lower()}"
        hint = f"name a PCI function (vfiomgr list); a VM of libvirt's can have it: {libvirt}"
        refuse("kata-mediated", name.lower(), message, hint + otherwise)


def devices_named(host: HostSnapshot, names: Iterable[str]) -> tuple[PciDevice, ...]:
    """The functions of these addresses.

    Raises:
        Refusal: one is a bridge or a mediated device.
        UsageError: there is none of that name.

    """
    names = tuple(names)
    for name in names:
        refuse_mediated(host, name)
    found = tuple(host.device(host.parse_address(name)) for name in names)
    refuse_if_any([o for device in found for o in bridge(host, device)], frozenset())
    return found


def why_not(vgpu: Vgpu) -> str:
    """What becomes of it: the Go runtime loses or mistakes its address, the other finds no PCI."""
    return (
        f"{vgpu} is a mediated device of {vgpu.parent}, and Kata cannot attach one: the Go runtime "
        f"passes a wrong address or the whole parent, runtime-rs finds no PCI device ({ISSUE})"
    )


def instead_of(host: HostSnapshot, vgpu: Vgpu) -> str:
    """What works on this host."""
    return "; or ".join(_ways(host, vgpu))


def _ways(host: HostSnapshot, vgpu: Vgpu) -> Iterator[str]:
    yield f"give it to a VM of libvirt's: vfiomgr libvirt hostdev {vgpu.name}"
    gpu = _gpu_of(host, vgpu)
    if gpu is not None:
        yield f"give Kata the whole GPU {gpu.address}: {_steps(host, gpu)}"
    vendors = [p.name for p in host.vgpu_parents if p.family == "vendor-vfio"]
    free = [name for name in vendors if host.vgpu(name) is None]
    if vendors:
        create = f"vfiomgr vgpu create --parent {(free or vendors)[0]} --type …"
        yield f"give Kata a vGPU that is a virtual function: {create}"


def _gpu_of(host: HostSnapshot, vgpu: Vgpu) -> PciDevice | None:
    """The physical GPU; None where the parent is no PCI function."""
    name = _gpu_name(host, vgpu)
    return next((device for device in host.devices if str(device.address) == name), None)


def _gpu_name(host: HostSnapshot, vgpu: Vgpu) -> str:
    return next((p.gpu for p in host.vgpu_parents if p.name == vgpu.parent), vgpu.parent)


def _steps(host: HostSnapshot, gpu: PciDevice) -> str:
    """What frees a GPU of its vGPUs and gives it to VFIO, in order."""
    name = str(gpu.address)
    vgpus = [vgpu.name for vgpu in host.vgpus if _gpu_name(host, vgpu) == name]
    steps = [f"vfiomgr vgpu remove {' '.join(vgpus)}"]
    if any(device.physical_function == gpu.address for device in host.devices):
        steps.append(f"vfiomgr sriov set {name} 0")
    return ", ".join([*steps, f"vfiomgr bind {name}"])

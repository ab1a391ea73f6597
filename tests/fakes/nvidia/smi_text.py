"""What nvidia-smi prints of GPUs: its columns, and its spelling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.fakes.nvidia.cards import InstanceProfile, VgpuKind
    from tests.fakes.nvidia.gpus import Gpu
    from tests.fakes.nvidia.rules import GpuInstance, Modes

VERSION = "550.144.02"
_COLUMN = 42
_CLASSES = {"A": "NVS", "B": "NVS", "C": "Compute", "Q": "Quadro"}


def lines(rows: Iterable[str]) -> str:
    """What is printed, a row each."""
    return "".join(f"{row}\n" for row in rows)


def bus_id(gpu: Gpu) -> str:
    """The address with eight digits of domain, in capitals."""
    address = PciAddress.parse(gpu.address)
    return f"{address.domain:08X}:{address.bus:02X}:{address.device:02X}.{address.function}"


def supported(value: object) -> str:
    """The negative holds the positive."""
    return "Supported" if value else "Not Supported"


def enabled(value: object) -> str:
    """Of modes."""
    return "Enabled" if value else "Disabled"


def mig_mode(gpu: Gpu, modes: Modes) -> str:
    """N/A where the GPU has no MIG at all."""
    return enabled(modes.is_mig) if gpu.card.profiles else "N/A"


def line(depth: int, key: str, value: object = None) -> str:
    """`key : value` with its colon where all have it; a heading has no value."""
    start = " " * 4 * depth + key
    return start if value is None else f"{start:<{_COLUMN}}: {value}"


def log_head(count: int) -> Iterator[str]:
    """The beginning of `nvidia-smi -q`."""
    yield ""
    yield "==============NVSMI LOG=============="
    yield ""
    yield line(0, "Timestamp", "Thu Nov 20 21:43:18 2025")
    yield line(0, "Driver Version", VERSION)
    yield line(0, "CUDA Version", "Not Found")
    yield line(0, "vGPU Driver Capability")
    yield line(2, "Heterogenous Multi-vGPU", supported(value=True))
    yield ""
    yield line(0, "Attached GPUs", count)


def log_of(gpu: Gpu, modes: Modes, *, is_persistent: bool) -> Iterator[str]:
    """One GPU of `nvidia-smi -q`, as far as it matters here."""
    card = gpu.card
    yield f"GPU {bus_id(gpu)}"
    yield line(1, "Product Name", card.name)
    yield line(1, "Product Architecture", card.architecture)
    yield line(1, "Persistence Mode", enabled(is_persistent))
    yield line(1, "vGPU Device Capability")
    yield line(2, "Fractional Multi-vGPU", supported(value=True))
    yield line(2, "Heterogeneous Time-Slice Profiles", supported(value=True))
    yield line(2, "Heterogeneous Time-Slice Sizes", supported(card.mixes_sizes))
    yield line(1, "MIG Mode")
    yield line(2, "Current", mig_mode(gpu, modes))
    yield line(2, "Pending", mig_mode(gpu, modes))
    yield line(1, "GPU UUID", gpu.uuid)
    yield line(1, "GPU Virtualization Mode")
    yield line(2, "Virtualization Mode", "Host VGPU")
    yield line(2, "Host VGPU Mode", "Non SR-IOV" if gpu.family == "mdev" else "SR-IOV")
    mixed = card.mixes_sizes and not modes.is_mig
    yield line(2, "vGPU Heterogeneous Mode", enabled(modes.is_heterogeneous) if mixed else "N/A")
    yield line(1, "PCI")
    yield line(2, "Device Id", f"0x{card.device.upper()}10DE")
    yield line(2, "Bus Id", bus_id(gpu))
    yield line(1, "FB Memory Usage")
    yield line(2, "Total", f"{card.memory} MiB")


def kind_of(kind: VgpuKind) -> Iterator[str]:
    """One type of `nvidia-smi vgpu -s -v`."""
    is_backed = kind.profile is not None
    width, _, height = kind.resolution.partition("x")
    yield line(1, "vGPU Type ID", f"{kind.number:#x}")
    yield line(2, "Name", kind.name)
    yield line(2, "Class", _CLASSES[kind.series])
    yield line(2, "GPU Instance Profile ID", kind.profile if is_backed else "N/A")
    yield line(2, "Max Instances", kind.max_instance)
    yield line(2, "Max Instances Per VM", 16 if kind.series in "QC" and not is_backed else 1)
    yield line(2, "Max Instances Per GI", kind.per_instance if is_backed else "N/A")
    yield line(2, "FB Memory", f"{kind.framebuffer} MiB")
    yield line(2, "Display Heads", kind.heads)
    yield line(2, "Maximum X Resolution", width)
    yield line(2, "Maximum Y Resolution", height)
    yield line(2, "Frame Rate Limit", f"{kind.frame_rate} FPS")


_RULE = f"+{'-' * 57}+"


def instances_head() -> Iterator[str]:
    """The beginning of `nvidia-smi mig -lgi`."""
    yield _RULE
    yield f"| {'GPU instances:':<56}|"
    yield f"| {'GPU   Name               Profile  Instance   Placement':<56}|"
    yield f"| {'                           ID       ID       Start:Size':<56}|"
    yield f"|{'=' * 57}|"


def instance_of(index: int, instance: GpuInstance, profile: InstanceProfile) -> Iterator[str]:
    """One GPU instance of `nvidia-smi mig -lgi`."""
    name = f"MIG {profile.name}"
    numbers = f"{profile.number:>5}{instance.id:>9}{instance.start:>11}:{profile.size:<6}"
    yield f"|{index:>4}  {name:<19}{numbers}|"
    yield _RULE


def profile_of(index: int, profile: InstanceProfile, free: int) -> Iterator[str]:
    """One profile of `nvidia-smi mig -lgip`, without what it has of a GPU's engines."""
    name = f"MIG {profile.name}"
    yield f"|{index:>4}  {name:<19}{profile.number:>4}{free:>6}/{len(profile.places):<10}|"


def places_of(index: int, profile: InstanceProfile) -> str:
    """One line of `nvidia-smi mig -lgipp`."""
    starts = ",".join(str(start) for start, _ in profile.places)
    word = "Placements:" if len(profile.places) > 1 else "Placement :"
    return f"GPU {index:>2} Profile ID {profile.number:>2} {word} {{{starts}}}:{profile.size}"


def compute_head() -> Iterator[str]:
    """The beginning of `nvidia-smi mig -lci`."""
    yield f"+{'-' * 68}+"
    yield f"| {'Compute instances:':<67}|"
    yield f"| {'GPU     GPU       Name             Profile   Instance   Placement':<67}|"
    yield f"| {'      Instance                       ID        ID       Start:Size':<67}|"
    yield f"| {'        ID':<67}|"
    yield f"|{'=' * 68}|"


def compute_of(index: int, instance: GpuInstance, profile: InstanceProfile) -> Iterator[str]:
    """The compute instance of one GPU instance of `nvidia-smi mig -lci`."""
    name = f"MIG {profile.name}"
    numbers = f"{0:>8}{0:>10}{0:>11}:{profile.name[0]:<6}"
    yield f"|{index:>4}{instance.id:>7}       {name:<16}{numbers}  |"
    yield f"+{'-' * 68}+"

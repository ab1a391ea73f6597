"""Why a device has no vGPUs, and what helps: by its hardware first, then by its driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.host.kernel import parameters
from vfiomgr.passthrough.readiness_hints import how_to_bind
from vfiomgr.pci.model import CLASS_DISPLAY, CLASS_VGA, PciDevice
from vfiomgr.value import Value
from vfiomgr.vgpu.functions import creation, is_before_ampere, lacks_vgpu_functions
from vfiomgr.vgpu.steps import DRIVER

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

_WITHOUT_OUTPUTS = (
    "on workstation cards disable the display outputs with NVIDIA's displaymodeselector"
)
_NVIDIA, _INTEL, _AMD = "10de", "8086", "1002"
_KVMGT = "CONFIG_DRM_I915_GVT_KVMGT"
_BEFORE_AMPERE = frozenset(
    {"0ff2", "11bf"}  # K1, K2
    | {"13bd", "13f2", "13f3"}  # M10, M60, M6
    | {"15f7", "15f8", "15f9", "1b38", "1b39", "1bb3", "1bb4"}  # P100, P40, P10, P4, P6
    | {f"1db{digit}" for digit in "012345678d"}  # V100
    | {"1df0", "1df2", "1df5", "1df6"}  # V100
    | {"1e30", "1e35", "1e36", "1e37", "1e38", "1e78", "1eb8"}  # RTX 6000, RTX 8000, T10, T40, T4
)
"""The NVIDIA GPUs before Ampere that may have vGPUs, by pci.ids; no others will follow."""
_WITH_GVT = (
    *("160", "161", "162", "163"),  # Broadwell
    *("190", "191", "192", "193"),  # Skylake
    *("0a84", "1a84", "1a85", "5a84", "5a85"),  # Broxton
    *("590", "591", "592", "593", "87c0"),  # Kaby Lake
    *("3e9", "3ea", "87ca"),  # Coffee Lake
    "9b",  # Comet Lake
)
"""How the device IDs begin of what is_supported_device lists (drivers/gpu/drm/i915/intel_gvt.c,
include/drm/intel/pciids.h)."""

_INTEL_WITHOUT_SRIOV = (
    *_WITH_GVT,
    *("00", "01", "04", "0a", "0d", "0f", "22", "31"),  # Sandy Bridge to Haswell, Atoms
    *("8a", "45", "4e"),  # 11th generation: Ice Lake, Elkhart Lake, Jasper Lake
)
"""How the device IDs begin of Intel's GPUs up to the graphics of the 11th generation."""

WITHOUT_SRIOV = {
    "amdgpu": "AMD's driver gim creates virtual functions, of the models that have SR-IOV",
    "nouveau": "NVIDIA's vGPU driver creates virtual functions",
}
"""Drivers without sriov_configure in Linux 6.12, and which driver has it; sriov_numvfs fails with
ENOENT (sriov_numvfs_store in drivers/pci/pci-sysfs.c and iov.c)."""


def generation_without_sriov(device: PciDevice) -> str | None:
    """Why a GPU of this generation has no virtual functions; None for others, and if unknown."""
    if not device.class_code.startswith(CLASS_DISPLAY):
        return None
    if device.vendor_id == _INTEL and device.device_id.startswith(_INTEL_WITHOUT_SRIOV):
        return "this generation has none (Intel's GPUs have it from the 12th on)"
    if is_before_ampere(device):
        return "this generation has none for vGPUs (NVIDIA's GPUs have it since Ampere)"
    return None


class Absence(Value):
    """Why a device has no vGPUs."""

    cause: str
    """What follows the name of the device."""
    remedy: str
    is_final: bool = False
    """Whether no driver and no setting changes it."""


def candidates(host: HostSnapshot) -> tuple[PciDevice, ...]:
    """The GPUs of makers of vGPUs, without virtual functions."""
    return tuple(
        device
        for device in host.devices
        if device.vendor_id in (_NVIDIA, _INTEL, _AMD)
        and device.is_graphics_or_accelerator
        and not (device.is_nvswitch or device.is_npu)
        and device.physical_function is None
    )


def absence(host: HostSnapshot, device: PciDevice) -> Absence:
    """Why a device that is no parent of vGPUs has none."""
    if device.vendor_id == _NVIDIA and device in candidates(host):
        return _of_nvidia(host, device)
    if device.vendor_id == _INTEL and device.class_code.startswith(CLASS_DISPLAY):
        return _of_intel(host, device)
    if device in candidates(host):  # of AMD
        return Absence(
            "has none: AMD's GPUs are shared by virtual functions, if the model has SR-IOV",
            f"see: vfiomgr sriov list; or assign the entire GPU: {_entire(host, device)}",
            is_final=True,
        )
    return Absence(
        "shows no vGPU types",
        "load the vendor's vGPU driver; list supported devices with: vfiomgr vgpu list --types",
    )


def _entire(host: HostSnapshot, device: PciDevice) -> str:
    return f"it is on {device.driver}" if device.is_on_vfio else how_to_bind(host, [device])


def _of_nvidia(host: HostSnapshot, device: PciDevice) -> Absence:
    old = is_before_ampere(device)
    entire = f"assign the entire GPU: {_entire(host, device)}"
    if old and device.device_id not in _BEFORE_AMPERE:
        ids = f"{device.vendor_id}:{device.device_id}"
        cause = f"does not have them: NVIDIA has no vGPUs for this model ({ids})"
        return Absence(cause, entire, is_final=True)
    if not old and not device.sriov_totalvfs:
        return Absence(
            "shows no SR-IOV (sriov_totalvfs), which vGPUs need since Ampere",
            f"enable SR-IOV in the firmware setup, and {_WITHOUT_OUTPUTS}; GeForce cards have no "
            f"vGPUs: {entire}",
        )
    kind = "mediated devices of the GPU itself, not virtual functions" if old else ""
    if device.is_on_vfio:
        cause = f"is on {device.driver}, and vGPUs need the driver {DRIVER}"
        cause += f" (they are {kind})" if kind else ""
        return Absence(cause, f"unbind it: vfiomgr unbind {device.address}")
    if device.driver != DRIVER or host.vgpus.has_nvidia_vgpu is False:
        return Absence(
            f"is on {device.driver or 'no driver'} without NVIDIA's vGPU driver (module "
            "nvidia_vgpu_vfio)",
            "install the host driver of NVIDIA vGPU or NVIDIA AI Enterprise instead",
        )
    if lacks_vgpu_functions(host, device):
        again = f" again, on the driver {device.driver}" if device.virtual_functions else ""
        remedy = f"create its virtual functions{again}: {creation(host, device)}"
        if device.class_code.startswith(CLASS_VGA):  # without outputs they are 3D controllers
            remedy += "; if that fails, enable SR-IOV, ARI and above-4G decoding in the firmware "
            remedy += f"setup, and {_WITHOUT_OUTPUTS}"
        return Absence("has no virtual functions for vGPUs", remedy)
    return Absence(
        "gets no vGPU types from the NVIDIA driver that is loaded",
        "use a release of NVIDIA's vGPU driver that lists this GPU (for compute GPUs, of NVIDIA AI "
        "Enterprise), and see: journalctl -u nvidia-vgpud -u nvidia-vgpu-mgr"
        + ("" if device.virtual_functions else f"; or {entire}"),
    )


def _of_intel(host: HostSnapshot, device: PciDevice) -> Absence:
    if not device.device_id.startswith(_WITH_GVT):
        cause = "has no GVT-g, which ends with the 10th generation (Comet Lake)"
        if device.sriov_totalvfs:
            remedy = f"use SR-IOV instead; create virtual functions: {creation(host, device)}"
        else:
            cause += "; later ones have SR-IOV instead, from the 12th on, and this one shows none"
            remedy = f"assign the entire GPU: {_entire(host, device)}"
        return Absence(cause, remedy, is_final=True)
    if device.is_on_vfio:
        cause = f"is on {device.driver}, and GVT-g needs the driver i915"
        return Absence(cause, f"unbind it: vfiomgr unbind {device.address}")
    words = parameters(host.kernel.command_line, "i915.enable_gvt")
    if words and words[-1].value in ("1", "Y", "y"):
        remedy = "run modprobe kvmgt; if it is missing or names no types, boot a kernel with "
        remedy += f"{_KVMGT} that knows this GPU (see dmesg for gvt)"
        return Absence("has no GVT-g types", remedy)
    return Absence(
        "has no GVT-g types",
        f"boot with i915.enable_gvt=1, and load kvmgt ({_KVMGT})",
    )

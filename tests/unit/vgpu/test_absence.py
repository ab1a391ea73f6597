"""Why a device has no vGPUs: the cause, and a remedy that can help."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.vgpu.absence import Absence, absence
from vfiomgr.vgpu.functions import lacks_vgpu_functions
from vfiomgr.vgpu.model import VgpuParent
from vfiomgr.vgpu.placement import no_gpus

GPU = pci_device()
T4: dict[str, Any] = {"device_id": "1eb8", "sriov_totalvfs": 16}
H100: dict[str, Any] = {"device_id": "2330", "sriov_totalvfs": 16}
P1000: dict[str, Any] = {"device_id": "1cb1"}
RTX_3090: dict[str, Any] = {"device_id": "2204"}
INTEL: dict[str, Any] = {"vendor_id": "8086", "class_code": "030000", "driver": "i915"}


def found(command_line: str = "quiet", *, module: bool | None = True, **facts: Any) -> Absence:
    device = replace(GPU, **facts)
    host = with_facts(host_of(device), has_nvidia_vgpu=module, kernel_command_line=command_line)
    return absence(host, device)


@pytest.mark.parametrize("driver", ["nvidia", "nouveau", "vfio-pci", None])
@pytest.mark.parametrize("module", [True, False, None])
def test_a_model_without_vgpus_gets_no_driver(driver: str | None, *, module: bool | None) -> None:
    one = found(module=module, driver=driver, **P1000)
    assert one.is_final
    assert "NVIDIA has no vGPUs for this model (10de:1cb1)" in one.cause
    assert "driver" not in one.remedy
    assert "unbind" not in one.remedy


def test_without_sriov_a_gpu_since_ampere_has_none() -> None:
    one = found(driver="nvidia", **RTX_3090)
    assert "sriov_totalvfs" in one.cause
    assert "displaymodeselector" in one.remedy
    assert "vfiomgr bind 0000:04:00.0" in one.remedy


@pytest.mark.parametrize(("facts", "is_mediated"), [(T4, True), (H100, False)])
def test_a_gpu_on_vfio_is_to_be_unbound(facts: dict[str, Any], *, is_mediated: bool) -> None:
    one = found(driver="vfio-pci", **facts)
    assert one.remedy == "unbind it: vfiomgr unbind 0000:04:00.0"
    assert ("mediated devices" in one.cause) == is_mediated


@pytest.mark.parametrize(("driver", "module"), [("nvidia", False), ("nouveau", True), (None, None)])
@pytest.mark.parametrize("facts", [T4, H100])
def test_without_the_vgpu_driver_it_is_to_be_installed(
    facts: dict[str, Any], driver: str | None, *, module: bool | None
) -> None:
    one = found(module=module, driver=driver, **facts)
    assert "nvidia_vgpu_vfio" in one.cause
    assert one.remedy.startswith("install the host driver of NVIDIA vGPU")


def test_a_loaded_driver_without_types_is_not_to_be_loaded() -> None:
    functions = replace(pci_device("0000:04:00.4"), physical_function=GPU.address)
    h100 = replace(GPU, virtual_functions=(functions.address,), **H100)
    host = with_facts(host_of(h100, functions), has_nvidia_vgpu=True)
    for one in (absence(host, h100), found(**T4)):
        assert "no vGPU types" in one.cause
        assert "release of NVIDIA's vGPU driver that lists this GPU" in one.remedy
        assert "create" not in one.remedy
        assert "install" not in one.remedy


def test_virtual_functions_are_created_where_they_carry_vgpus() -> None:
    assert found(**H100).remedy == (
        "create its virtual functions: vfiomgr vgpu mode 0000:04:00.0 vgpu"
    )
    outputs = found(**H100, class_code="030000").remedy
    assert "SR-IOV, ARI and above-4G decoding" in outputs
    assert "displaymodeselector" in outputs
    turing = replace(GPU, **T4)
    assert not lacks_vgpu_functions(host_of(turing), turing)
    parent = VgpuParent("0000:04:00.0", "/sys/x", "mdev", "nvidia", "0000:04:00.0", (), ())
    ampere = replace(GPU, **H100)
    assert not lacks_vgpu_functions(with_facts(host_of(ampere), vgpu_parents=(parent,)), ampere)


@pytest.mark.parametrize("device_id", ["9a70", "4e61", "46d1", "a7a0", "56a0", "0162"])
def test_generations_without_gvt_are_told_of_sriov(device_id: str) -> None:
    one = found("i915.enable_gvt=1", device_id=device_id, **INTEL)
    assert one.is_final
    assert "no GVT-g" in one.cause
    assert "SR-IOV" in one.cause
    assert "enable_gvt" not in one.remedy
    shared = found(device_id=device_id, sriov_totalvfs=7, **INTEL)
    assert shared.remedy.endswith("vfiomgr sriov set 0000:04:00.0 7")


@pytest.mark.parametrize("device_id", ["1616", "1912", "5a84", "5917", "3e92", "9bc5"])
def test_generations_with_gvt_get_what_is_missing(device_id: str) -> None:
    assert "i915.enable_gvt=1" in found(device_id=device_id, **INTEL).remedy
    present = found("i915.enable_gvt=1", device_id=device_id, **INTEL).remedy
    assert "modprobe kvmgt" in present
    assert "enable_gvt" not in present
    bound = {**INTEL, "driver": "vfio-pci"}
    assert found(device_id=device_id, **bound).remedy.startswith("unbind it")


def test_amd_has_virtual_functions_only() -> None:
    one = found(vendor_id="1002", class_code="030000", driver="amdgpu")
    assert one.is_final
    assert "driver" not in one.remedy


def test_of_several_gpus_those_that_can_have_vgpus_get_the_remedy() -> None:
    final = replace(pci_device("0000:05:00.0"), **P1000)
    error = no_gpus(with_facts(host_of(replace(GPU, driver="vfio-pci", **T4), final)))
    assert "in its current state: 0000:04:00.0 is on vfio-pci" in error.message
    assert "0000:05:00.0 does not have them" in error.message
    assert error.hint == "unbind it: vfiomgr unbind 0000:04:00.0"
    assert "GPU of NVIDIA" in (no_gpus(host_of(replace(GPU, vendor_id="1a03"))).hint or "")

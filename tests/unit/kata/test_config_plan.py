"""From devices and a release to the keys of a configuration."""

from __future__ import annotations

import tomllib
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from tests.unit.guest_hosts import gpu, node, two_sockets
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.kata.check import check_keys
from vfiomgr.kata.configurations import render_drop_in, render_whole
from vfiomgr.kata.facts import read_settings
from vfiomgr.kata.model import (
    KataHypervisor,
    KataPlan,
    KataRelease,
    KataRequest,
    Plug,
    RuntimeName,
    key_table,
)
from vfiomgr.kata.plan import plan_config
from vfiomgr.paths import HostPath
from vfiomgr.pci.memory import HostTopology
from vfiomgr.units import GIB, Version

MAIN = HostPath("/opt/kata/share/defaults/kata-containers/configuration-qemu.toml")
OVMF = HostPath("/opt/kata/share/ovmf/OVMF.fd")
ONE = (gpu("0000:17:00.0", 17),)
SMALL = (gpu("0000:17:00.0", 17, size=GIB),)
NIC = replace(pci_device("0000:05:00.0"), class_code="020000")


def plan(
    release: str = "go 4.1",
    base: str | None = None,
    architecture: str = "x86_64",
    **options: Any,
) -> KataPlan:
    runtime, version = release.split()
    name: RuntimeName = "rs" if runtime == "rs" else "go"
    wanted = KataRequest(
        release=KataRelease(Version.parse(version), name), **{"functions": SMALL} | options
    )
    host = with_facts(two_sockets(), cpu_address_bits=46, architecture=architecture)
    configured = None if base is None else read_settings(MAIN, base)
    return plan_config(host, wanted, configured)


def rule_of(refused: pytest.ExceptionInfo[Refusal]) -> str:
    (found,) = refused.value.diagnostics
    return found.rule


def test_a_longer_time_and_more_memory_that_are_configured_stay() -> None:
    base = """
    [hypervisor.qemu]
    default_memory = 65536
    [agent.kata]
    dial_timeout = 5000
    [runtime]
    create_container_timeout = 45
    """
    done = plan(base=base)
    assert done.value("default_memory") is None
    assert done.value("dial_timeout") == 5000
    assert done.value("create_container_timeout") == 1200
    assert plan(base=base, memory_mib=16384).value("default_memory") == 16384
    assert plan(base="[hypervisor.qemu]\ndefault_memory = 2048").value("default_memory") == 8192


def test_a_small_host_is_not_given_a_guest_that_it_cannot_hold() -> None:
    wanted = KataRequest(KataRelease(Version(4, 1), "go"), SMALL)
    small = HostTopology((node(0, range(2), gib=4),))
    done = plan_config(with_facts(two_sockets(), topology=small), wanted)
    assert done.value("default_memory") is None
    assert any("MiB for guests with a GPU are more than this host's" in note for note in done.notes)


def test_without_devices_there_is_a_port_for_one() -> None:
    assert plan(functions=()).value("pcie_root_port") == 1


def test_a_value_that_is_right_stays_as_it_is_written() -> None:
    base = "[hypervisor.qemu]\nmachine_type = 'q35' # own\n[agent.kata]\ndial_timeout = 1_200\n"
    whole = render_whole(base, MAIN, [], plan(base=base))
    assert "machine_type = 'q35' # own\n" in whole
    assert "dial_timeout = 1_200\n" in whole


def test_a_device_that_is_no_gpu_needs_no_more_memory() -> None:
    assert plan(functions=(NIC,)).value("default_memory") is None


def test_the_times_are_where_each_runtime_reads_them_in_its_units() -> None:
    def times(release: str) -> dict[tuple[str, str], object]:
        return {(e.table[0], e.key): e.value for e in plan(release).entries if "timeout" in e.key}

    assert times("go 3.2") == {("agent", "dial_timeout"): 1200}
    assert times("go 4.1") == {
        ("agent", "dial_timeout"): 1200,
        ("runtime", "create_container_timeout"): 1200,
    }
    assert times("rs 3.15") == {
        ("agent", "request_timeout_ms"): 1200000,
        ("agent", "reconnect_timeout_ms"): 1200000,
    }
    assert times("rs 4.1") == {
        ("agent", "create_container_timeout"): 1200,
        ("agent", "reconnect_timeout_ms"): 1200000,
    }


def test_lists_in_strings_and_arrays_hold_what_is_configured() -> None:
    base = """
    [hypervisor.qemu]
    kernel_params = "pci=realloc quiet"
    enable_annotations = ["enable_iommu", "^default_memory$"]
    cpu_features = "pmu=off, vmx=off,host-phys-bits=off"
    """
    done = plan(
        base=base,
        functions=(*ONE, gpu("0000:31:00.0", 31)),
        kernel_params=("pci=realloc", "pci=nocrs"),
        annotations=("default_memory", "kernel_params"),
    )
    assert done.value("kernel_params") == "pci=realloc quiet pci=nocrs"
    assert done.value("enable_annotations") == (
        "enable_iommu",
        "^default_memory$",
        "^kernel_params$",
    )
    assert done.value("cpu_features") == "pmu=off,vmx=off,host-phys-bits=on"


def test_kernel_params_are_never_replaced_unseen() -> None:
    with pytest.raises(Refusal, match="replace those of the configuration") as refused:
        plan(kernel_params=("quiet",))
    assert rule_of(refused) == "kata-kernel-params"
    assert "--beside" in refused.value.hint
    assert plan(annotations=("kernel_params",)).notes[0].startswith("enable_annotations replaces")


@pytest.mark.parametrize("text", ["a b", "cold-plug", ".*", "^", "ÄB", ""])
def test_an_annotation_has_a_name(text: str) -> None:
    with pytest.raises(UsageError, match="invalid annotation name: --annotations"):
        plan(annotations=(text,))


def test_annotations_are_named_in_several_ways_and_always_anchored() -> None:
    names = ("^cold_plug_vfio$", "io.katacontainers.config.hypervisor.kernel_params")
    done = plan(annotations=names)
    assert done.value("enable_annotations") == ("^cold_plug_vfio$", "^kernel_params$")
    assert any(
        (
            "cold_plug_vfio only as an annotation plugs no CDI device: Kata looks for devices "
            "before it reads annotations"
        )
        in note
        for note in done.notes
    )
    with pytest.raises(Refusal, match="does not support annotation cold_plug_vfio") as refused:
        plan("rs 4.1", annotations=names)
    assert rule_of(refused) == "kata-annotation-unknown"


def test_large_bars_want_wide_addresses_and_a_firmware() -> None:
    assert plan(functions=SMALL).value("cpu_features") is None
    large = (gpu("0000:17:00.0", 17, size=128 * GIB),)
    done = plan(functions=large, own_firmware=OVMF)
    assert done.value("cpu_features") == "pmu=off,host-phys-bits=on"
    assert done.value("firmware") == OVMF
    without = plan(functions=large)
    assert without.value("firmware") is None
    assert any(
        "need firmware that makes room for them, but none was found" in note
        for note in without.notes
    )
    base = "[hypervisor.qemu]\nfirmware = '/own.fd'"
    assert plan(functions=large, base=base, own_firmware=OVMF).value("firmware") is None
    assert plan(functions=large, base=base, firmware="/x.fd").value("firmware") == "/x.fd"
    assert plan(functions=(*SMALL, gpu("0000:31:00.0", 31, size=GIB))).value("cpu_features")


def test_what_has_no_room_is_refused_with_what_would_give_it() -> None:
    with pytest.raises(Refusal, match="larger than the host") as refused:
        plan(memory_mib=4 << 20)
    assert rule_of(refused) == "kata-host-memory"
    many = tuple(gpu(f"0000:{bus:02x}:00.0", bus, size=GIB) for bus in range(1, 18))
    with pytest.raises(
        Refusal, match="17 functions need a root port each, but Kata has only 16"
    ) as refused:
        plan(functions=many)
    assert rule_of(refused) == "kata-too-many-devices"
    assert plan(functions=many[:16]).value("pcie_root_port") == 16
    assert any("wrong GPU" in note for note in plan(functions=many[:11]).notes)


def test_the_machine_stays_one_that_has_root_ports() -> None:
    virt = plan(base="[hypervisor.qemu]\nmachine_type = 'virt'", functions=(*ONE, *SMALL))
    assert virt.value("machine_type") == "virt"
    assert virt.value("cpu_features") is None, "host-phys-bits is for x86"
    assert plan(base="[hypervisor.qemu]\nmachine_type = 'pc'").value("machine_type") == "q35"


@pytest.mark.parametrize("base", [None, "[hypervisor.qemu]\nmachine_type = ''"])
def test_arm_has_another_machine(base: str | None) -> None:
    virt = plan(base=base, functions=(*ONE, *SMALL), architecture="aarch64")
    assert virt.value("machine_type") == "virt"
    assert virt.value("cpu_features") is None, "host-phys-bits is for x86"


def test_switch_ports_and_root_ports_are_not_both_in_runtime_rs() -> None:
    base = "[hypervisor.qemu]\npcie_switch_port = 4\n[runtime]\nhypervisor_name = 'qemu'"
    assert plan("rs 4.1", base).value("pcie_switch_port") == 0
    assert plan("go 4.1", base).value("pcie_switch_port") is None
    assert plan("rs 3.15", base).value("pcie_switch_port") is None, "it ignores the key"


@pytest.mark.parametrize(
    ("release", "hypervisor", "plug", "why"),
    [
        ("rs 4.1", "qemu", "hot", "does not support hot_plug_vfio: runtime-rs never had it"),
        ("rs 3.30", "qemu", "cold", r"since 3\.31"),
        ("go 3.28", "clh", "cold", "can only plug devices into a running Cloud Hypervisor guest"),
        ("go 3.1", "qemu", None, "older than 3.2"),
    ],
)
def test_what_a_runtime_cannot_is_refused_with_who_can(
    release: str, hypervisor: KataHypervisor, plug: Plug | None, why: str
) -> None:
    with pytest.raises(Refusal, match=why) as refused:
        plan(release, hypervisor=hypervisor, plug=plug)
    assert refused.value.hint
    assert rule_of(refused) == ("kata-too-old" if "older" in why else "kata-plug")


def test_the_kubelet_is_asked_where_kata_can() -> None:
    key = "pod_resource_api_sock"
    assert plan("go 3.24").value(key) == "/var/lib/kubelet/pod-resources/kubelet.sock"
    other = HostPath("/var/lib/k0s/kubelet/pod-resources/kubelet.sock")
    assert plan("go 3.24", kubelet_socket=other).value(key) == other
    assert plan("go 3.24", has_pod_resources=False).value(key) == ""
    assert plan("go 3.15").value(key) is None
    assert any("annotations cdi.k8s.io" in note for note in plan("go 3.15").notes)
    with pytest.raises(Refusal, match=r"since 3\.24") as refused:
        plan("go 3.15", has_pod_resources=True)
    assert rule_of(refused) == "kata-no-pod-resources"
    with pytest.raises(
        Refusal,
        match="cannot use --pod-resources without cold plug: it is for devices that are plugged "
        "before the guest starts",
    ) as refused:
        plan("go 4.1", has_pod_resources=True, plug="hot")
    assert rule_of(refused) == "kata-pod-resources-plug"


@pytest.mark.parametrize(
    ("release", "base", "name"),
    [
        ("go 4.1", None, "clh"),
        ("rs 3.29", None, "cloud-hypervisor"),
        ("rs 3.30", None, "clh"),
        ("rs 4.1", None, "clh"),
        ("rs 4.1", "[hypervisor.cloud-hypervisor]\npath='/x'", "cloud-hypervisor"),
    ],
)
def test_cloud_hypervisors_table_is_called_as_the_installed_one(
    release: str, base: str | None, name: str
) -> None:
    done = plan(release, base, hypervisor="clh")
    assert done.hypervisor == name
    assert done.value("pcie_root_port") is None
    assert f"[hypervisor.{name}]" in render_drop_in(done)


def test_confidential_guests_of_the_go_runtime_take_devices_through_iommufd_alone() -> None:
    base = "[hypervisor.qemu]\nconfidential_guest = true"
    with pytest.raises(Refusal, match="they need iommufd") as refused:
        plan("go 3.2", base)
    assert rule_of(refused) == "kata-no-cdevs"
    assert any("CONFIG_VFIO_DEVICE_CDEV" in note for note in plan("go 4.1", base).notes)
    cdev = (replace(ONE[0], vfio_cdev=True),)
    assert not any("CDEV" in note for note in plan("go 4.1", base, functions=cdev).notes)
    assert any("publish /dev/vfio/GROUP" in n for n in plan("go 3.2", functions=cdev).notes)
    assert not any("GROUP" in note for note in plan("go 3.15", functions=cdev).notes)


def test_a_release_that_is_newer_than_the_table_is_told() -> None:
    assert any("newer than 4.1" in note for note in plan("go 4.2").notes)
    assert not any("newer" in note for note in plan("go 4.1.9").notes)


BASES = st.sampled_from(
    [
        None,
        "",
        "[hypervisor.qemu]\npcie_switch_port = 2\ncpu_features = 'x'\n[runtime]\n",
        "[hypervisor.qemu]\nmachine_type = 'virt'\ndefault_memory = 1\nconfidential_guest = true",
    ]
)


@st.composite
def wanted(draw: st.DrawFn) -> KataRequest:
    version = draw(st.sampled_from(key_table().releases))
    count = draw(st.integers(0, 17))
    size = draw(st.sampled_from([GIB, 32 * GIB, 256 * GIB]))
    functions = tuple(gpu(f"0000:{bus:02x}:00.0", bus, size=size) for bus in range(1, count + 1))
    return KataRequest(
        release=KataRelease(version, draw(st.sampled_from(get_args(RuntimeName)))),
        functions=functions if draw(st.booleans()) else functions and (NIC,),
        hypervisor=draw(st.sampled_from(get_args(KataHypervisor))),
        plug=draw(st.sampled_from([None, *get_args(Plug)])),
        memory_mib=draw(st.sampled_from([None, 1024, 65536])),
        firmware=draw(st.sampled_from([None, "/x.fd"])),
        has_pod_resources=draw(st.sampled_from([None, True, False])),
        annotations=draw(st.sampled_from([(), ("kernel_params",), ("pcie_root_port",)])),
        kernel_params=draw(st.sampled_from([(), ("pci=realloc",)])),
    )


@settings(max_examples=300)
@given(wanted=wanted(), base=BASES, bits=st.sampled_from([None, 39, 46, 52]))
def test_no_key_is_ever_written_that_the_release_does_not_know(
    wanted: KataRequest, base: str | None, bits: int | None
) -> None:
    configured = None if base is None else read_settings(MAIN, base)
    host = with_facts(host_of(), cpu_address_bits=bits)
    try:
        done = plan_config(host, replace(wanted, own_firmware=OVMF), configured)
    except Refusal:
        return
    _require_known_keys(done)
    whole = render_whole(base or "", MAIN, [], done)
    assert render_whole(whole, MAIN, [], done) == whole, "a second run changes nothing"
    assert read_settings(MAIN, whole).root_ports == (done.value("pcie_root_port") or 0)


def _require_known_keys(done: KataPlan) -> None:
    document = tomllib.loads(render_drop_in(done))
    written = [
        (section, key)
        for section, tables in document.items()
        for key in (tables if section == "runtime" else next(iter(tables.values())))
    ]
    assert written
    assert all(done.release.knows(section, key) for section, key in written), written
    assert check_keys(document, done.release, is_drop_in=True) == ()


@pytest.mark.parametrize("runtime", get_args(RuntimeName))
@pytest.mark.parametrize("version", key_table().releases, ids=str)
def test_each_release_gets_its_own_keys_alone(version: Version, runtime: RuntimeName) -> None:
    release = KataRelease(version, runtime)
    for hypervisor in get_args(KataHypervisor):
        wanted = KataRequest(release, SMALL, hypervisor=hypervisor, annotations=("kernel_params",))
        done = plan_config(two_sockets(), wanted)
        _require_known_keys(done)
        has_ports = hypervisor == "qemu" and (runtime == "rs" or version >= Version(3, 6))
        assert (done.value("pcie_root_port") == 1) == has_ports


@pytest.mark.parametrize(
    ("release", "key", "value"),
    [
        ("go 3.3", "create_container_timeout", None),
        ("go 3.4", "create_container_timeout", 1200),
        ("rs 3.18", "create_container_timeout", None),
        ("rs 3.18", "request_timeout_ms", 1_200_000),
        ("rs 3.19", "request_timeout_ms", None),
        ("rs 3.19", "create_container_timeout", 1_200_000),
        ("rs 3.20", "create_container_timeout", 1_200_000),
        ("rs 3.21", "create_container_timeout", 1200),
        ("rs 4.1", "create_container_timeout", 1200),
        ("rs 4.1", "reconnect_timeout_ms", 1_200_000),
    ],
)
def test_times_are_in_the_unit_of_the_release(release: str, key: str, value: int | None) -> None:
    assert plan(release).value(key) == value


def test_cloud_hypervisor_is_plugged_cold_where_the_go_runtime_can() -> None:
    assert plan("go 3.29", hypervisor="clh", plug="cold").value("cold_plug_vfio") == "root-port"
    assert plan("go 3.29", hypervisor="clh").value("hot_plug_vfio") == "root-port"


def test_an_annotation_that_the_release_does_not_have_is_not_allowed() -> None:
    assert plan("rs 4.1", annotations=("pcie_root_port",)).value("enable_annotations")
    with pytest.raises(Refusal, match="does not support annotation numa_mapping, and ignores it"):
        plan("go 3.26", annotations=("numa_mapping",))
    with pytest.raises(Refusal, match="support annotation cold_plug_vfio, and fails"):
        plan("rs 4.1", annotations=("cold_plug_vfio",))


def test_more_root_ports_that_are_configured_stay() -> None:
    def ports(configured: int, **more: Any) -> tuple[object, bool]:
        done = plan(base=f"[hypervisor.qemu]\npcie_root_port = {configured}\n", **more)
        told = any(f"pcie_root_port stays {configured}" in note for note in done.notes)
        return done.value("pcie_root_port"), told

    assert ports(8) == (8, True)
    assert ports(1) == (1, False)
    assert ports(0) == (1, False)
    assert ports(17) == (1, False), "Kata makes no more than 16"


def test_ports_for_no_device_say_so() -> None:
    assert "pcie_root_port = 1 # no device uses it yet" in render_drop_in(plan(functions=()))

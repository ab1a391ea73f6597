"""What a release of Kata ignores or refuses in a configuration."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

import pytest

from vfiomgr.kata.check import check_keys
from vfiomgr.kata.model import KataRelease
from vfiomgr.units import Version

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.kata.model import RuntimeName


def check(text: str, version: str, *, is_drop_in: bool = False) -> tuple[Diagnostic, ...]:
    """Findings about a text, for `go 4.1` or `rs 3.31`."""
    runtime: RuntimeName = "rs" if version.startswith("rs") else "go"
    release = KataRelease(Version.parse(version.split()[1]), runtime)
    return check_keys(tomllib.loads(text), release, is_drop_in=is_drop_in)


FINE = """
[hypervisor.qemu]
cold_plug_vfio = "root-port"
hot_plug_vfio = "no-port"
pcie_root_port = 8
default_vcpus = 1
enable_annotations = ["^kernel_params$"]
[hypervisor.qemu.unknown_to_go]
[agent.kata]
dial_timeout = 90
[runtime]
vfio_mode = "vfio"
[factory]
enable_template = false
"""


def test_what_kata_takes_gives_no_finding() -> None:
    text = FINE.replace("default_vcpus", "enable_iommu = true\ndefault_vcpus")
    assert check(text, "go 4.1") == ()


@pytest.mark.parametrize(
    ("text", "version", "is_drop_in", "severity", "why"),
    [
        ("[hypervisor.qemu]\nnix = 1", "go 4.1", True, "blocker", "starts no guest"),
        ("[hypervisor.qemu]\nnix = 1", "go 4.1", False, "warning", "silently"),
        ("[agent.kata]\nnix = 1", "go 4.1", True, "blocker", "starts no guest"),
        ("[runtime]\nnix = 1", "go 4.1", True, "warning", "with a warning in its log"),
        ("[factory]\nnix = 1", "go 4.1", True, "warning", "with a warning in its log"),
        ("[hypervisor.qemu.nix]\na = 1", "go 4.1", True, "blocker", "starts no guest"),
        ("[agent.kata]\nnix = 1", "rs 3.28", False, "warning", "silently"),
        ("[agent.kata]\nnix = 1", "rs 3.29", False, "blocker", "refuses the entire"),
        ("[agent.kata.nix]\na = 1", "rs 3.29", False, "blocker", "refuses the entire"),
        ("[agent.kata.mem_agent]\nnix = 1", "rs 3.28", False, "warning", "silently"),
        ("[agent.kata.mem_agent]\nnix = 1", "rs 3.29", False, "blocker", "refuses the entire"),
        ("[agent.kata]\nnix = 1", "rs 4.1", True, "blocker", "refuses the entire"),
        ("[agent.kata]\nnix = 1", "rs 4.1", False, "blocker", "refuses the entire"),
        ("[hypervisor.qemu]\nnix = 1", "rs 4.1", True, "warning", "silently"),
        ("[runtime]\nnix = 1", "rs 4.1", True, "warning", "silently"),
        ("[hypervisor.qemu.factory]\nnix = 1", "rs 4.1", False, "blocker", "refuses the entire"),
        ("[hypervisor.qemu.factory]\nnix = 1", "rs 3.28", False, "warning", "silently"),
        ("[nix]\nnix = 1", "go 4.1", True, "warning", "with a warning in its log"),
    ],
)
def test_what_becomes_of_an_unknown_key(
    text: str, version: str, *, is_drop_in: bool, severity: str, why: str
) -> None:
    (found,) = check(text, version, is_drop_in=is_drop_in)
    assert (found.rule, found.severity) == ("kata-unknown-key", severity)
    assert why in found.why


@pytest.mark.parametrize(
    ("text", "version", "remedy"),
    [
        ("[runtime]\ncreate_container_timeout = 9", "rs 4.1", "write it into [agent.kata]"),
        ("[agent.kata]\ncreate_container_timeout = 9", "go 4.1", "write it into [runtime]"),
        ("[agent.kata]\ndial_timeout = 9", "rs 4.1", "write reconnect_timeout_ms"),
        ("[hypervisor.qemu]\nseccompsandbox = ''", "rs 4.1", "write seccomp_sandbox"),
        ("[hypervisor.qemu]\nhot_plug_vfio = ''", "rs 4.1", "cold_plug_vfio, from 3.31 on"),
        ("[hypervisor.qemu]\ncold_plug_vfio = 'no-port'", "rs 3.24", "use Kata 3.31.0 or later"),
        ("[runtime]\npod_resource_api_sock = ''", "go 3.15", "use Kata 3.24.0 or later"),
        ("[hypervisor.qemu]\nhotplug_vfio_on_root_bus = true", "go 3.2", "only runtime-rs"),
        ("[hypervisor.qemu]\npcie_root_port = 1", "go 3.5", "use Kata 3.6.0 or later"),
        ("[hypervisor.qemu]\nfile_mem_backend = ''", "go 4.1", "no longer has it"),
        ("[runtime]\nkeep_abnormal = true", "go 4.1", "only runtime-rs has it"),
        ("[runtime]\nguest_selinux_label = ''", "rs 4.1", "only the Go runtime has it"),
    ],
)
def test_what_is_to_be_written_instead(text: str, version: str, remedy: str) -> None:
    (found,) = check(text, version)
    assert found.rule == "kata-unknown-key"
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("use_legacy_serial = false", "info"),
        ("use_legacy_serial = true", "warning"),
        ("firmware_volume = ''", "info"),
        ("firmware_volume = '@FIRMWAREVOLUMEPATH_NV@'", "info"),
        ("firmware_volume = '/x'", "warning"),
        ("of_no_runtime = ''", "warning"),
        ("[runtime]\nkubelet_root_dir = '/var/lib/kubelet'", "info"),
        ("[runtime]\nkubelet_root_dir = '/var/lib/k0s/kubelet'", "warning"),
    ],
)
def test_a_key_of_the_other_runtime_whose_value_changes_nothing_is_a_remark(
    line: str, severity: str
) -> None:
    (found,) = check(f"[hypervisor.qemu]\n{line}", "rs 4.1")
    assert (found.rule, found.severity) == ("kata-unknown-key", severity)


@pytest.mark.parametrize(
    ("line", "is_right"),
    [
        ("pcie_root_port = -1", False),
        ("default_memory = 4294967296", False),
        ("disk_rate_limiter_bw_max_rate = -1", True),
        ("pcie_root_port = '8'", False),
        ("pcie_root_port = true", False),
        ("pcie_root_port = 1.5", False),
        ("default_vcpus = 1.5", True),
        ("enable_iommu = 1", False),
        ("enable_annotations = 'a'", False),
        ("enable_annotations = [1]", False),
        ("enable_annotations = []", True),
        ("kernel_params = ['a']", False),
    ],
)
def test_types_are_those_of_the_code(line: str, *, is_right: bool) -> None:
    found = check(f"[hypervisor.qemu]\n{line}", "go 4.1")
    assert [each.rule for each in found] == ([] if is_right else ["kata-wrong-type"])


@pytest.mark.parametrize(
    ("line", "version", "wanted"),
    [
        ("default_vcpus = 1.5", "go 3.2", "a whole number from -2147483648 to 2147483647"),
        ("default_vcpus = 1.5", "go 3.3", None),
        ("default_vcpus = 1.5", "rs 3.19", "a whole number from -2147483648 to 2147483647"),
        ("default_vcpus = 1.5", "rs 3.20", None),
        ("pcie_root_port = -1", "rs 4.1", "a whole number from 0 to 4294967295"),
        ("rootless_user = {groups = [1]}", "rs 4.1", None),
        ("rootless_user = {groups = ['a']}", "rs 4.1", "an array of whole numbers"),
        ("shared_fs = 1", "rs 4.1", "a string"),
        ("guest_extension_images = [{name = 'a'}]", "rs 4.1", None),
        ("guest_extension_images = ['a']", "go 4.1", "an array of tables"),
        ("hugepage_type = 1", "rs 4.1", "a string"),
    ],
)
def test_types_are_those_of_the_release(line: str, version: str, wanted: str | None) -> None:
    found = check(f"[hypervisor.qemu]\n{line}", version)
    assert [(each.rule, each.remedy) for each in found] == (
        [] if wanted is None else [("kata-wrong-type", f"write {wanted}")]
    )


@pytest.mark.parametrize(
    ("text", "version", "finding"),
    [
        ("cold_plug_vfio='root-port'\nhot_plug_vfio='root-port'", "go 3.2", "kata-both-plugs"),
        ("cold_plug_vfio='root-port'\nhot_plug_vfio='no-port'", "go 3.2", None),
        ("cold_plug_vfio='rootport'", "go 4.1", "kata-port"),
        ("cold_plug_vfio='switch-port'", "go 4.1", None),
        ("cold_plug_vfio='switch-port'", "rs 4.1", "kata-port"),
        ("pcie_root_port=1\npcie_switch_port=1", "rs 4.1", "kata-both-ports"),
        ("pcie_root_port=1\npcie_switch_port=0", "rs 4.1", None),
        ("pcie_root_port=1\npcie_switch_port=1", "go 4.1", None),
        ("pcie_root_port=1\npcie_switch_port=1", "rs 3.16", "kata-unknown-key"),
        ("cold_plug_vfio='rootport'\nmachine_type='s390-ccw-virtio'", "go 4.1", None),
        ("cold_plug_vfio='no-port'\nhot_plug_vfio='root-port'", "go 4.1", None),
        ("[runtime]\nvfio_mode='guest_kernel'", "go 4.1", "kata-vfio-mode"),
    ],
)
def test_values_that_are_refused(text: str, version: str, finding: str | None) -> None:
    found = check(f"[hypervisor.qemu]\n{text}", version)
    assert [each.rule for each in found] == ([finding] if finding else [])
    is_ignored = finding == "kata-unknown-key"
    severity = "warning" if is_ignored else "blocker"
    assert all(each.severity == severity and each.remedy for each in found)


@pytest.mark.parametrize(
    ("text", "version", "finding"),
    [
        ("pcie_root_port=17", "go 4.1", "kata-too-many-ports"),
        ("pcie_switch_port=17", "go 3.6", "kata-too-many-ports"),
        ("pcie_root_port=16", "go 4.1", None),
        ("enable_iommu=false\n[runtime]\nvfio_mode='vfio'", "go 4.1", "kata-vfio-without-iommu"),
        ("[runtime]\nvfio_mode='vfio'", "rs 4.1", "kata-vfio-without-iommu"),
        ("enable_iommu=true\n[runtime]\nvfio_mode='vfio'", "go 4.1", None),
        ("machine_type='s390-ccw-virtio'\n[runtime]\nvfio_mode='vfio'", "go 4.1", None),
    ],
)
def test_values_that_load_and_that_devices_have_trouble_with(
    text: str, version: str, finding: str | None
) -> None:
    found = check(f"[hypervisor.qemu]\n{text}", version)
    assert [(each.rule, each.severity) for each in found] == (
        [(finding, "warning")] if finding else []
    )


def test_cloud_hypervisor_has_root_ports_alone() -> None:
    (found,) = check("[hypervisor.clh]\nhot_plug_vfio = 'bridge-port'", "go 4.1")
    assert found.rule == "kata-port"
    (found,) = check("[hypervisor.clh]\ncold_plug_vfio = 'root-port'", "go 3.28")
    assert 'hot_plug_vfio = "root-port"' in str(found.remedy)
    assert check("[hypervisor.clh]\ncold_plug_vfio = 'root-port'", "go 3.29") == ()
    assert check("[hypervisor.firecracker]\nhot_plug_vfio = 'none'", "go 4.1") == ()


def test_the_gravest_comes_first() -> None:
    text = "[hypervisor.qemu]\nuse_legacy_serial = false\nnix = 1\npcie_root_port = 'x'"
    assert [(each.rule, each.severity) for each in check(text, "rs 4.1")] == [
        ("kata-wrong-type", "blocker"),
        ("kata-unknown-key", "warning"),
        ("kata-unknown-key", "info"),
    ]


def test_a_release_newer_than_the_table_is_judged_as_the_last_one_in_it() -> None:
    text = "[hypervisor.qemu]\npcie_root_port = 1\nnix = 1"
    assert len(check(text, "go 4.2")) == len(check(text, "go 4.1")) == 1


@pytest.mark.parametrize("groups", ["[true]", "1", "[-1]", "[4294967296]", "[1, 'a']"])
def test_numbers_of_an_array_are_numbers_in_the_range(groups: str) -> None:
    (found,) = check(f"[hypervisor.qemu]\nrootless_user = {{groups = {groups}}}", "rs 4.1")
    assert found.rule == "kata-wrong-type"


def test_an_iommu_may_be_in_another_file_than_a_drop_in() -> None:
    text = "[hypervisor.qemu]\n[runtime]\nvfio_mode='vfio'"
    assert check(text, "go 4.1", is_drop_in=True) == ()


@pytest.mark.parametrize("is_drop_in", [False, True])
@pytest.mark.parametrize(
    ("text", "version", "place"),
    [
        ("hypervisor = 1", "go 4.1", "hypervisor is 1"),
        ("agent = 1", "go 4.1", "agent is 1"),
        ("runtime = []", "rs 4.1", "runtime is []"),
        ("[hypervisor]\nqemu = 1", "rs 4.1", "hypervisor.qemu is 1"),
        ("[agent]\nkata = 'x'", "go 4.1", "agent.kata is 'x'"),
        ("[hypervisor.qemu]\nfactory = 1", "rs 4.1", "hypervisor.qemu.factory is 1"),
        ("[hypervisor.qemu.default_memory]", "go 4.1", "default_memory in [hypervisor.qemu] is {}"),
    ],
)
def test_a_section_that_is_no_table_and_a_key_that_is_one_are_refused(
    text: str, version: str, place: str, *, is_drop_in: bool
) -> None:
    (finding,) = check(text, version, is_drop_in=is_drop_in)
    assert (finding.rule, finding.severity) == ("kata-wrong-type", "blocker")
    assert finding.summary.startswith(place)


def test_a_name_at_the_top_that_is_no_section_of_kata_is_passed_over() -> None:
    assert check("title = 1", "go 4.1") == ()

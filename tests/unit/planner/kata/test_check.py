"""What a release of Kata ignores or refuses in a configuration."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

import pytest

from vfiomgr.adapters.kata.keys import key_table
from vfiomgr.model.kata import KataRelease
from vfiomgr.model.version import Version
from vfiomgr.planner.kata.check import check_keys

if TYPE_CHECKING:
    from vfiomgr.model.kata import RuntimeName
    from vfiomgr.model.readiness import Finding


def check(text: str, version: str, *, is_drop_in: bool = False) -> tuple[Finding, ...]:
    """Findings about a text, for `go 4.1` or `rs 3.31`."""
    runtime: RuntimeName = "rs" if version.startswith("rs") else "go"
    release = KataRelease(Version.parse(version.split()[1]), runtime)
    return check_keys(tomllib.loads(text), release, key_table(), is_drop_in=is_drop_in)


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
        ("[hypervisor.qemu]\nnix = 1", "go 4.1", False, "warning", "without a word"),
        ("[agent.kata]\nnix = 1", "go 4.1", True, "blocker", "starts no guest"),
        ("[runtime]\nnix = 1", "go 4.1", True, "warning", "with a warning in its log"),
        ("[agent.kata]\nnix = 1", "rs 4.1", True, "blocker", "refuses the whole"),
        ("[agent.kata]\nnix = 1", "rs 4.1", False, "blocker", "refuses the whole"),
        ("[hypervisor.qemu]\nnix = 1", "rs 4.1", True, "warning", "without a word"),
        ("[runtime]\nnix = 1", "rs 4.1", True, "warning", "without a word"),
        ("[hypervisor.qemu.factory]\nnix = 1", "rs 4.1", False, "blocker", "refuses the whole"),
        ("[nix]\nnix = 1", "go 4.1", True, "warning", "with a warning in its log"),
    ],
)
def test_what_becomes_of_an_unknown_key(
    text: str, version: str, *, is_drop_in: bool, severity: str, why: str
) -> None:
    (found,) = check(text, version, is_drop_in=is_drop_in)
    assert (found.id, found.severity) == ("kata-unknown-key", severity)
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
        ("[hypervisor.qemu]\nhotplug_vfio_on_root_bus = true", "go 3.2", "removed in 3.2"),
        ("[hypervisor.qemu]\nfile_mem_backend = ''", "go 4.1", "has it no more"),
        ("[runtime]\nkeep_abnormal = true", "go 4.1", "only runtime-rs has it"),
        ("[runtime]\nguest_selinux_label = ''", "rs 4.1", "only the Go runtime has it"),
    ],
)
def test_what_is_to_be_written_instead(text: str, version: str, remedy: str) -> None:
    (found,) = check(text, version)
    assert found.id == "kata-unknown-key"
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("line", "is_right"),
    [
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
    assert [each.id for each in found] == ([] if is_right else ["kata-wrong-type"])


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
        ("pcie_root_port=17", "go 4.1", "kata-too-many-ports"),
        ("pcie_root_port=16", "go 4.1", None),
        ("enable_iommu=false\n[runtime]\nvfio_mode='vfio'", "go 4.1", "kata-vfio-without-iommu"),
        ("enable_iommu=true\n[runtime]\nvfio_mode='vfio'", "go 4.1", None),
        ("[runtime]\nvfio_mode='guest_kernel'", "go 4.1", "kata-vfio-mode"),
    ],
)
def test_values_that_are_refused(text: str, version: str, finding: str | None) -> None:
    found = check(f"[hypervisor.qemu]\n{text}", version)
    assert [each.id for each in found] == ([finding] if finding else [])
    assert all(each.severity == "blocker" and each.remedy for each in found)


def test_cloud_hypervisor_has_root_ports_alone() -> None:
    (found,) = check("[hypervisor.clh]\nhot_plug_vfio = 'bridge-port'", "go 4.1")
    assert found.id == "kata-port"


def test_what_no_version_shows_is_a_remark_and_the_gravest_comes_first() -> None:
    text = "[hypervisor.qemu]\ndefault_maxmemory = 0\nnix = 1\npcie_root_port = 'x'"
    found = check(text, "go 3.2")
    assert [(each.id, each.severity) for each in found] == [
        ("kata-wrong-type", "blocker"),
        ("kata-unknown-key", "warning"),
        ("kata-unsure-key", "info"),
    ]


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
    assert (finding.id, finding.severity) == ("kata-wrong-type", "blocker")
    assert finding.title.startswith(place)


def test_a_name_at_the_top_that_is_no_section_of_kata_is_passed_over() -> None:
    assert check("title = 1", "go 4.1") == ()

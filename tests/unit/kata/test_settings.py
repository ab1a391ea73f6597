"""Reading of Kata's configurations as Kata reads them."""

from __future__ import annotations

import pytest

from vfiomgr.errors import InvalidDocument
from vfiomgr.kata.facts import read_settings
from vfiomgr.paths import HostPath

MAIN = HostPath("/opt/kata/share/defaults/kata-containers/configuration-qemu.toml")
BASE = """
[hypervisor.qemu]
machine_type = "q35"
kernel_params = "quiet pci=realloc"
enable_annotations = ["enable_iommu", "^kernel_params$"]
hot_plug_vfio = "root-port"
pcie_root_port = 2
[agent.kata]
dial_timeout = 90
[runtime]
vfio_mode = "guest-kernel"
"""


def drop_in(name: str, text: str) -> tuple[HostPath, str]:
    return MAIN.parent / f"config.d/{name}", text


def test_drop_ins_count_in_the_order_of_their_names_and_replace_whole_values() -> None:
    settings = read_settings(
        MAIN,
        BASE,
        [
            drop_in("60-b.toml", '[hypervisor.qemu]\nkernel_params = "last"\npcie_root_port = 8'),
            drop_in("50-a.toml~", '[hypervisor.qemu]\nkernel_params = "x"\nenable_annotations=[]'),
        ],
    )
    assert settings.drop_ins == (
        MAIN.parent / "config.d/50-a.toml~",
        MAIN.parent / "config.d/60-b.toml",
    )
    assert settings.kernel_params == "last"
    assert settings.enable_annotations == ()
    assert (settings.root_ports, settings.hot_plug, settings.cold_plug) == (
        8,
        "root-port",
        "no-port",
    )
    assert settings.machine_type == "q35", "what no drop-in names stays"
    assert settings.number("agent.kata", "dial_timeout") == 90


def test_an_expression_that_is_not_anchored_allows_more_than_it_names() -> None:
    settings = read_settings(MAIN, BASE)
    assert settings.allows_annotation("enable_iommu_platform")
    assert settings.allows_annotation("kernel_params")
    assert not settings.allows_annotation("kernel_params_of_others")
    broken = read_settings(MAIN, '[hypervisor.qemu]\nenable_annotations = ["("]')
    assert not broken.allows_annotation("(")


def test_what_is_not_there_or_of_a_wrong_type_is_what_kata_takes_by_itself() -> None:
    settings = read_settings(MAIN, '[hypervisor.qemu]\npcie_root_port = "8"\ncold_plug_vfio = 1')
    assert (settings.root_ports, settings.cold_plug, settings.vfio_mode) == (
        0,
        "no-port",
        "guest-kernel",
    )
    assert settings.default_memory_mib is None
    assert not settings.has_iommu
    assert settings.pod_resource_api_sock == ""
    assert read_settings(MAIN, "hypervisor = 3").root_ports == 0


@pytest.mark.parametrize(
    ("text", "hypervisor", "runtime"),
    [
        (BASE, "qemu", "go"),
        ("[hypervisor.clh]\npath = '/x'", "clh", "go"),
        ("[hypervisor.qemu]\n[hypervisor.dragonball]\n[runtime]\n", "qemu", "go"),
        (
            "[hypervisor.qemu]\n[runtime]\nhypervisor_name='cloud-hypervisor'",
            "cloud-hypervisor",
            "rs",
        ),
        ("", "qemu", "go"),
    ],
)
def test_whose_table_counts(text: str, hypervisor: str, runtime: str) -> None:
    settings = read_settings(MAIN, text)
    assert (settings.hypervisor, settings.runtime) == (hypervisor, runtime)


def test_a_file_that_is_no_toml_is_named() -> None:
    with pytest.raises(InvalidDocument, match=r"configuration-qemu\.toml:1: not valid TOML"):
        read_settings(MAIN, "[hypervisor\n")
    with pytest.raises(InvalidDocument, match=r"config\.d/50-a:1: not valid TOML"):
        read_settings(MAIN, BASE, [drop_in("50-a", "x")])

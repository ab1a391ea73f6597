from __future__ import annotations

import pytest

from vfiomgr.model.vgpu import Vgpu, VgpuParent, describe_type

NVIDIA = "num_heads=4, frl_config=45, framebuffer=1024M, max_resolution=5120x2880, max_instance=32"


def test_nvidias_description_tells_everything() -> None:
    kind = describe_type("nvidia-555", "NVIDIA A40-1B", NVIDIA, "vfio-pci")
    assert (kind.series, kind.framebuffer, kind.heads) == ("B", 1024, 4)
    assert (kind.resolution, kind.max_instances) == ("5120x2880", 32)
    assert (kind.short_name, kind.number) == ("A40-1B", "555")


@pytest.mark.parametrize(
    ("name", "series", "framebuffer", "short"),
    [
        ("GRID T4-2Q", "Q", 2048, "T4-2Q"),
        ("GRID T4-2B4", "B", 2048, "T4-2B4"),
        ("GRID M60-0B", "B", 512, "M60-0B"),
        ("GRID A100-1-5C", "C", 5120, "A100-1-5C"),
        ("NVIDIA A100-1-5CME", "C", 5120, "A100-1-5CME"),
        ("NVIDIA RTX Pro 6000 Blackwell DC-1-24QGFX", "Q", 24576, None),
        ("NVIDIA L40S-48A", "A", 49152, "L40S-48A"),
        ("H200X-141C", "C", 144384, "H200X-141C"),
        ("Dual port serial", None, None, "Dual port serial"),
        (None, None, None, None),
    ],
)
def test_without_a_description_nvidias_name_tells_series_and_size(
    name: str | None, series: str | None, framebuffer: int | None, short: str | None
) -> None:
    kind = describe_type("1148", name)
    assert (kind.series, kind.framebuffer) == (series, framebuffer)
    assert short is None or kind.short_name == short


@pytest.mark.parametrize(
    ("description", "framebuffer", "resolution"),
    [
        (
            "low_gm_size: 128MB\nhigh_gm_size: 512MB\nfence: 4\nresolution: 1920x1200\nweight: 4",
            640,
            "1920x1200",
        ),
        ("virtual display, 64 MB video memory", 64, None),
        ("virtual display, 640x480 framebuffer", None, "640x480"),
        ("num_heads=1, framebuffer=4096M, max_resolution=4096x2400, max_instance=12", 4096, None),
        ("no words of ours", None, None),
        ("", None, None),
    ],
)
def test_other_descriptions(
    description: str, framebuffer: int | None, resolution: str | None
) -> None:
    kind = describe_type("x-1", None, description)
    assert kind.framebuffer == framebuffer
    assert resolution is None or kind.resolution == resolution
    assert kind.description is None or "\n" not in kind.description


def test_the_driver_in_an_identifier_varies_and_the_number_does_not() -> None:
    assert describe_type("vfio-pci-575").number == describe_type("nvidia-575").number == "575"


def test_a_parent_offers_nothing_that_it_does_not_name() -> None:
    kinds = (describe_type("a-1"), describe_type("a-2"))
    parent = VgpuParent("x", "/sys/devices/x", "mdev", None, "x", kinds, (3, None))
    assert [parent.offers(name) for name in ("a-1", "a-2", "a-3")] == [3, None, 0]


def test_an_instance_is_called_by_its_uuid_or_its_function() -> None:
    facts = ("vendor-vfio", "0000:41:00.4", "1148", None, "nvidia", 7, None, None)
    assert str(Vgpu(None, *facts)) == "vGPU 0000:41:00.4"  # type: ignore[arg-type]
    assert Vgpu("u-u", *facts).name == "u-u"  # type: ignore[arg-type]

from __future__ import annotations

import pytest

from vfiomgr.vgpu.model import Vgpu, VgpuParent, describe_type, types_called

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
        ("NVIDIA RTX Pro 6000 Blackwell DC-48C", "C", 49152, "DC-48C"),
        ("NVIDIA RTX Pro 6000 Blackwell DC-1-24Q", "Q", 24576, "DC-1-24Q"),
        ("NVIDIA RTX6000-Ada-8Q", "Q", 8192, "RTX6000-Ada-8Q"),
        ("GRID_M60-0B", "B", 512, "M60-0B"),
        ("i915-GVTg_V5_4", None, None, "i915-GVTg_V5_4"),
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


BLACKWELL = tuple(
    describe_type(str(1500 + place), f"NVIDIA RTX Pro 6000 Blackwell {name}")
    for place, name in enumerate(("DC-2B", "DC-48C", "DC-96Q", "DC-1-2Q", "DC-1-24C", "DC-4-96Q"))
)


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ("DC-48C", "DC-48C"),
        ("dc-48c", "DC-48C"),
        ("RTX Pro 6000 Blackwell DC-48C", "DC-48C"),
        ("NVIDIA_RTX_Pro_6000_Blackwell_DC-48C", "DC-48C"),
        ("1501", "DC-48C"),
        ("DC-1-24CGFX", "DC-1-24C"),
        ("DC-4-96QGFX", "DC-4-96Q"),
        ("DC-1-24CMEALL", "DC-1-24C"),
        ("DC-48CGFX", None),
        ("DC-1-24CX", None),
        ("48C", None),
        ("Blackwell", None),
    ],
)
def test_types_are_found_by_the_names_of_nvidias_configurations(
    text: str, called: str | None
) -> None:
    assert [kind.short_name for kind in types_called(BLACKWELL, text)] == [called] * bool(called)


def test_a_type_that_the_driver_names_with_its_attribute_is_that_one() -> None:
    kinds = [describe_type(str(n), f"GRID A100-1-5C{end}") for n, end in enumerate(("", "ME"))]
    assert types_called(kinds, "A100-1-5CME") == [kinds[1]]
    assert types_called(kinds, "A100-1-5C") == [kinds[0]]
    assert types_called(kinds[:1], "A100-1-5CME") == [kinds[0]]


def test_a_full_name_comes_before_the_same_short_name() -> None:
    kinds = [describe_type("1", "DC-16Q"), describe_type("2", "NVIDIA RTX Pro 4500 DC-16Q")]
    assert types_called(kinds, "DC-16Q") == kinds[:1]


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

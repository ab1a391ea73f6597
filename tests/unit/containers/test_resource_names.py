"""Names of resources: those that users of NVIDIA's plugins know, valid for kubelet and CDI."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.node.made import A40, A40_NAME, UUID, at, node_of, offered, vgpu_node
from vfiomgr.containers.cdi.document import is_annotation_key, is_kind
from vfiomgr.containers.resource_names import (
    LONGEST,
    DeviceKind,
    kind_of_model,
    kind_of_type,
    name_resources,
    qualified,
)
from vfiomgr.errors import UsageError
from vfiomgr.node.model import NodeSettings

SETTINGS = NodeSettings()


def name_of(name: str) -> str:
    """The resource of a device with a name of pci.ids."""
    kind = kind_of_model(replace(A40, name=name))
    return name_resources([kind], SETTINGS)[kind.key].partition("/")[2]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA Corporation GA102GL [A40]", "GA102GL_A40"),
        ("NVIDIA Corporation GP104GL [Tesla P4]", "GP104GL_TESLA_P4"),
        ("NVIDIA Corporation GA107GL [A2 / A16]", "GA107GL_A2___A16"),
        ("NVIDIA Corporation GV100GL [Tesla V100-PCIE-16GB]", "GV100GL_TESLA_V100PCIE16GB"),
        (
            "Advanced Micro Devices, Inc. [AMD/ATI] Aqua Vanjaram [Instinct MI300X]",
            "AQUA_VANJARAM_INSTINCT_MI300X",
        ),
        ("Intel Corporation 82599 Ethernet (rev 1.0)", "INTEL_82599_ETHERNET_REV_1_0"),
        ("Device 10de:2235", "PCI_10DE_2235"),
        ("NVIDIA Corporation 10de:2235", "PCI_10DE_2235"),
        ("[", "PCI"),
    ],
)
def test_models_are_named_as_by_nvidias_plugin(name: str, expected: str) -> None:
    assert name_of(name) == expected


@pytest.mark.parametrize(
    ("type_id", "name", "expected"),
    [
        ("nvidia-561", "NVIDIA A40-4Q", "NVIDIA_A40-4Q"),
        ("nvidia-222", "GRID T4-1B", "GRID_T4-1B"),
        ("nvidia-1", "NVIDIA A100-1-5CME", "NVIDIA_A100-1-5CME"),
        ("i915-GVTg_V5_4", None, "i915-GVTg_V5_4"),
        ("1148", None, "VGPU_1148"),
    ],
)
def test_types_keep_their_names(type_id: str, name: str | None, expected: str) -> None:
    kind = kind_of_type(type_id, name)
    assert name_resources([kind], SETTINGS) == {kind.key: f"vfiomgr.io/{expected}"}


def test_a_virtual_function_with_the_ids_of_its_model_is_another_kind() -> None:
    plain, sized, unknown = (
        kind_of_model(A40),
        kind_of_model(A40, quota="4G"),
        kind_of_model(A40, quota=""),
    )
    assert set(name_resources([plain, sized, unknown], SETTINGS).values()) == {
        A40_NAME,
        f"{A40_NAME}_VF_4G",
        f"{A40_NAME}_VF",
    }


def test_models_of_the_same_name_have_their_ids_in_it() -> None:
    twin = replace(at(A40, 7), device_id="2236")
    assert offered(node_of(A40, twin)) == {
        f"{A40_NAME}_2235": ["0000:41:00.0"],
        f"{A40_NAME}_2236": ["0000:07:00.0"],
    }
    other = replace(twin, device_id="2235", vendor_id="10df")
    names = list(offered(node_of(A40, other)))
    assert len(names) == 2
    assert all(name.startswith(f"{A40_NAME}_") for name in names)


def test_a_long_name_is_cut_and_stays_unique() -> None:
    names = [f"NVIDIA Corporation {'X' * 80}{last}" for last in "AB"]
    cut = [name_of(name) for name in names]
    assert len(set(cut)) == 2
    assert all(len(f"vfiomgr.io/{name}") == LONGEST for name in cut)


@pytest.mark.parametrize("key", ["10de:2235", "10DE:2235", "GA102GL_A40", "ga102gl_a40"])
@pytest.mark.parametrize(
    ("alias", "expected"),
    [("gpu", "vfiomgr.io/gpu"), ("nvidia.com/GA102GL_A40", "nvidia.com/GA102GL_A40")],
)
def test_an_alias_names_a_model(key: str, alias: str, expected: str) -> None:
    settings = NodeSettings(aliases={key: alias})
    assert list(offered(node_of(A40), settings)) == [expected]


@pytest.mark.parametrize("key", ["A40-4Q", "NVIDIA A40-4Q", "nvidia-561", "nvidia_a40-4q"])
def test_an_alias_names_a_type(key: str) -> None:
    settings = NodeSettings(aliases={key: "small"})
    assert offered(vgpu_node(uuid=UUID), settings) == {"vfiomgr.io/small": [UUID]}


def test_one_alias_joins_models() -> None:
    other = replace(at(A40, 7), device_id="26b9", name="NVIDIA Corporation AD102GL [L40S]")
    settings = NodeSettings(aliases={"10de:2235": "gpu", "10de:26b9": "gpu"})
    assert offered(node_of(A40, other), settings) == {
        "vfiomgr.io/gpu": ["0000:07:00.0", "0000:41:00.0"]
    }


def test_an_alias_takes_the_name_of_another_model() -> None:
    other = replace(at(A40, 7), device_id="26b9", name="NVIDIA Corporation AD102GL [L40S]")
    settings = NodeSettings(aliases={"10de:26b9": "GA102GL_A40"})
    assert offered(node_of(A40, other), settings) == {
        A40_NAME: ["0000:07:00.0"],
        f"{A40_NAME}_2235": ["0000:41:00.0"],
    }


@pytest.mark.parametrize(
    "prefix", ["", "gpus", "kubernetes.io", "x.kubernetes.io", "A.io", "a/b.io", f"{'a' * 40}.io"]
)
def test_an_invalid_domain_is_refused(prefix: str) -> None:
    with pytest.raises(UsageError, match="invalid domain of resource names"):
        offered(node_of(A40), NodeSettings(prefix=prefix))


@pytest.mark.parametrize(
    "alias", ["", "7", "a b", "x", "gpu-", "a/b/c", "kubernetes.io/gpu", "G" * 60, "gpu:1", "naïve"]
)
def test_an_invalid_alias_is_refused(alias: str) -> None:
    with pytest.raises(UsageError, match="invalid"):
        offered(node_of(A40), NodeSettings(aliases={"10de:2235": alias}))


_TEXTS = st.text(st.characters(codec="utf-8"), max_size=90)


@given(names=st.lists(_TEXTS, min_size=1, max_size=5, unique=True), types=st.lists(_TEXTS))
def test_every_name_is_valid_and_unique(names: list[str], types: list[str]) -> None:
    kinds: list[DeviceKind] = [
        kind_of_model(replace(A40, name=name, device_id=f"{number:04x}"))
        for number, name in enumerate(names)
    ]
    kinds += [kind_of_type(text or "0", text) for text in types]
    found = name_resources(kinds, SETTINGS)
    assert len(set(found.values())) == len({kind.key for kind in kinds})
    for name in found.values():
        assert len(name) <= LONGEST
        assert is_kind(name)
        assert is_annotation_key(name)
        assert qualified(name, SETTINGS) == name
    assert name_resources(reversed(kinds), SETTINGS) == found

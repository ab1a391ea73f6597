"""Names as people say them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.devices import pci_device
from vfiomgr.pci.names import short_name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA Corporation GA102GL [A40]", "NVIDIA A40"),
        ("NVIDIA Corporation GA107GL [A2 / A16]", "NVIDIA A2 / A16"),
        ("NVIDIA Corporation 10de:2684", "NVIDIA 10de:2684"),
        (
            "Advanced Micro Devices, Inc. [AMD/ATI] Navi 31 [Radeon RX 7900 XT]",
            "AMD Radeon RX 7900 XT",
        ),
        ("Advanced Micro Devices, Inc. [AMD] Starship Host Bridge", "AMD Starship Host Bridge"),
        ("Intel Corporation DG2 [Arc A770]", "Intel Arc A770"),
        ("Intel Corporation Raptor Lake-S [Intel Graphics]", "Intel Graphics"),
        ("Mellanox Technologies MT27800 Family [ConnectX-5]", "Mellanox ConnectX-5"),
        ("Broadcom Inc. and subsidiaries NetXtreme BCM5720", "Broadcom NetXtreme BCM5720"),
        ("Broadcom / LSI SAS-3 3108 [Invader]", "Broadcom / LSI SAS-3 3108 [Invader]"),
        ("Realtek Semiconductor Co., Ltd. RTL8125", "Realtek RTL8125"),
        ("Moore Threads Technology Co.,Ltd MTT S10", "Moore Threads MTT S10"),
        ("ASPEED Technology, Inc. ASPEED Graphics Family", "ASPEED Graphics Family"),
        ("Matrox Electronics Systems Ltd. MGA G200EH (iLO4)", "Matrox MGA G200EH (iLO4)"),
        ("Device 8086:4680", "Device 8086:4680"),
        ("Corporation", "Corporation"),
        ("NVIDIA Corporation", "NVIDIA Corporation"),
        ("", ""),
    ],
)
def test_a_short_name_has_maker_and_marketing_name(name: str, short: str) -> None:
    assert short_name(name, has_marketing_name=True) == short


def test_brackets_of_other_devices_stay() -> None:
    name = "Intel Corporation Alder Lake SATA Controller [AHCI mode]"
    device = replace(pci_device(), name=name, class_code="010601")
    assert device.short_name == "Intel Alder Lake SATA Controller [AHCI mode]"
    assert pci_device().short_name == "NVIDIA A2 / A16"

"""Unbinding what `ids=` of vfio-pci still matches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.check.test_rules import facts, lines
from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.engine.registry import plan
from vfiomgr.passthrough.steps import Unbind

if TYPE_CHECKING:
    from vfiomgr.check.model import Readiness

GPU = replace(pci_device(), driver="vfio-pci")
IDS = f"{GPU.vendor_id}:{GPU.device_id}"
OTHER = "8086:1521"
FILE = "/etc/modprobe.d/{}.conf: options vfio_pci ids={}"


def notes(known: Readiness | None, words: str = "", driver: str = "vfio-pci") -> list[str]:
    """The notes about `ids=` of a plan to unbind the GPU."""
    gpu = replace(GPU, driver=driver)
    host = with_facts(host_of(gpu), readiness=known, kernel_command_line=words)
    made = plan(host, Unbind((GPU.address,)))
    return [note for note in made.notes if "at the next boot vfio-pci" in note]


@pytest.mark.parametrize(
    ("known", "words", "place"),
    [
        (lines(IDS), "", FILE.format(0, IDS)),
        (lines(OTHER, f"{OTHER},{IDS}"), "", FILE.format(1, f"{OTHER},{IDS}")),
        (facts(), f"quiet vfio-pci.ids={IDS}", f"/proc/cmdline: vfio-pci.ids={IDS}"),
    ],
)
def test_the_setting_by_which_vfio_pci_takes_it_again_is_named(
    known: Readiness, words: str, place: str
) -> None:
    (note,) = notes(known, words)
    assert note.startswith("at the next boot vfio-pci may bind 0000:04:00.0")
    assert note.endswith(f" again: {place}")


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (None, f"vfio-pci.ids={IDS}"),
        (facts(), ""),
        (lines(OTHER), ""),
        (lines(IDS, OTHER), ""),
        (lines(IDS), f"vfio-pci.ids={OTHER}"),
        (lines(IDS, state="built-in"), ""),
    ],
)
def test_a_setting_without_effect_or_of_other_devices_is_not_named(
    known: Readiness | None, words: str
) -> None:
    assert notes(known, words) == []


def test_a_function_on_a_variant_driver_is_not_matched_by_ids_of_vfio_pci() -> None:
    assert notes(lines(IDS), driver="mlx5_vfio_pci") == []


def test_an_unbind_reads_the_settings_of_modules() -> None:
    assert Unbind((GPU.address,)).needs_readiness

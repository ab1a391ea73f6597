"""vGPUs that other tools created, adopted by a layout that several hosts have in common."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.hosts import mixed
from tests.fakes.vgpu_hosts import GPUS, a40_host, l40s_host, t4_host
from tests.unit.devices import with_facts
from tests.unit.engine.faults import Course, EveryFault, kept, named
from tests.unit.layout import test_boot as boot
from tests.unit.layout.test_apply import AUDIO, GPU, drivers, layout
from vfiomgr.definitions.requests import DefineVgpu
from vfiomgr.engine.registry import plan
from vfiomgr.errors import HostError, Refusal
from vfiomgr.layout.compare import compare
from vfiomgr.layout.requests import ApplyLayout, UninstallLayout
from vfiomgr.passthrough.steps import Bind
from vfiomgr.paths import HostPath
from vfiomgr.pci.facts import read_virtual_functions
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.persistence.installed_layout import BOOT
from vfiomgr.persistence.steps import ChangeFiles
from vfiomgr.uninstall.requests import Uninstall
from vfiomgr.vgpu.apply import adopt as adopt_function
from vfiomgr.vgpu.steps import AdoptVgpu

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

FLEET: dict[str, Any] = {
    "select": "all",
    "state": "vgpu",
    "vgpus": [{"framebuffer": "4G", "series": "Q", "per_gpu": 2}],
}
DEFINED, BY_HAND = (f"00000000-0000-4000-8000-00000000000{number}" for number in (1, 2))
VENDOR_4Q, VENDOR_8Q = "1150", "1152"


def fleet(*rules: dict[str, Any], adopt: bool = True) -> ApplyLayout:
    return replace(layout(*(rules or (FLEET,)), name="fleet"), adopt=adopt)


def _create(kernel: FakeKernel, parent: object, type_id: str, uuid: str) -> None:
    types = HostPath(f"/sys/bus/pci/devices/{parent}/mdev_supported_types")
    kernel.write(types / type_id / "create", uuid)


def _define(kernel: FakeKernel, parent: object, type_id: str, uuid: str) -> None:
    document = {"mdev_type": type_id, "start": "auto", "attrs": []}
    boot.put(kernel, HostPath(f"/etc/mdevctl.d/{parent}/{uuid}"), json.dumps(document))


def _type(kernel: FakeKernel, name: str) -> str:
    host = api.scan(kernel, with_gpu_modes=True)
    return next(k.id for parent in host.vgpus.parents for k in parent.types if k.short_name == name)


def of_mdevctl(tmp_path: Path) -> FakeKernel:
    """A T4 with a vGPU of mdevctl, and one by hand."""
    kernel = t4_host(tmp_path)
    kind = _type(kernel, "T4-4Q")
    for uuid in (DEFINED, BY_HAND):
        _create(kernel, GPUS[0], kind, uuid)
    _define(kernel, GPUS[0], kind, DEFINED)
    return kernel


def of_libvirt(tmp_path: Path) -> FakeKernel:
    """An A40 with two vGPUs of persistent node devices, one of which a guest has."""
    kernel = a40_host(tmp_path, total_vfs=4)
    kind = _type(kernel, "A40-4Q")
    first, second, *_ = read_virtual_functions(kernel, PciAddress.parse(GPUS[0]))
    for parent, uuid in ((first, DEFINED), (second, BY_HAND)):
        _create(kernel, parent, kind, uuid)
        _define(kernel, parent, kind, uuid)
    group = next(v for v in api.scan(kernel).vgpus.active if v.name == DEFINED).iommu_group
    kernel.sysfs.make("/proc/4711/fd")
    kernel.sysfs.link_absolute("/proc/4711/fd/7", f"/dev/vfio/{group}")
    return kernel


def of_a_script(tmp_path: Path) -> FakeKernel:
    """An L40S with a vGPU that a script made on a virtual function; a second one is missing."""
    kernel = l40s_host(tmp_path, total_vfs=4)
    first = read_virtual_functions(kernel, PciAddress.parse(GPUS[0]))[0]
    kernel.write(pci_device(first) / "nvidia/current_vgpu_type", _type(kernel, "L40S-4Q"))
    return kernel


def own(kernel: FakeKernel) -> list[tuple[bool, str | None]]:
    vgpus = api.scan(kernel, with_users=True, with_gpu_modes=True).vgpus
    return [(vgpus.is_own(one), vgpus.adopted_from(one)) for one in vgpus.active]


HOSTS = {
    "mdev": (of_mdevctl, [(True, "mdevctl"), (True, "unknown")]),
    "SR-IOV mdev": (of_libvirt, [(True, "mdevctl"), (True, "mdevctl")]),
    "vendor VFIO": (of_a_script, [(True, "unknown"), (True, None)]),
}


@pytest.mark.parametrize("name", HOSTS)
def test_one_layout_adopts_the_vgpus_of_three_hosts(tmp_path: Path, name: str) -> None:
    make, expected = HOSTS[name]
    kernel = make(tmp_path)
    before = api.scan(kernel).vgpus.active
    earlier = len(kernel.operations)
    outcome = api.apply(fleet(), tree=kernel)
    assert outcome.is_changed
    assert own(kernel) == expected
    after = api.scan(kernel).vgpus.active
    assert set(before) <= set(after)
    written = {one.path for one in kernel.operations[earlier:] if "/sys" in one.path}
    assert not any(vgpu.name in path for vgpu in before for path in written)
    assert not api.apply(fleet(), tree=kernel).is_changed
    assert not api.apply(fleet(adopt=False), tree=kernel).is_changed
    api.revert(tree=kernel)
    assert api.scan(kernel).vgpus.active == before
    assert own(kernel) == [(False, None)] * len(before)


@pytest.mark.parametrize("name", HOSTS)
def test_a_recorded_host_shows_what_would_be_adopted(tmp_path: Path, name: str) -> None:
    host = api.scan(HOSTS[name][0](tmp_path), with_users=True, with_gpu_modes=True)
    adopted = [d for d in compare(host, fleet()).differences if d.wanted == "adopted"]
    assert len(adopted) == len(host.vgpus.active)
    assert all("creator: " in d.found for d in adopted)
    assert not [d for d in compare(host, fleet(adopt=False)).differences if d.wanted == "adopted"]


def test_what_does_not_fit_is_named_and_stays(tmp_path: Path) -> None:
    kernel = of_mdevctl(tmp_path)
    before = kept(kernel)
    one = {**FLEET, "vgpus": [{"framebuffer": "4G", "series": "Q", "per_gpu": 1}]}
    with pytest.raises(Refusal) as caught:
        api.apply(fleet(one), tree=kernel)
    left = BY_HAND if BY_HAND in caught.value.message else DEFINED
    assert f"vfiomgr did not create them: {left} (GRID T4-4Q)" in caught.value.message
    assert f"vfiomgr vgpu remove {left}" in str(caught.value.remedy)
    assert kept(kernel) == before


def test_an_adopted_vgpu_is_one_of_vfiomgr_for_a_later_layout(tmp_path: Path) -> None:
    kernel = of_mdevctl(tmp_path)
    api.apply(fleet(), tree=kernel)
    larger = {**FLEET, "vgpus": [{"type": "T4-8Q", "per_gpu": 1}]}
    api.apply(fleet(larger), tree=kernel)
    assert [vgpu.type_name for vgpu in api.scan(kernel).vgpus.active] == ["GRID T4-8Q"]


def test_what_else_starts_the_vgpus_at_boot_is_named(tmp_path: Path) -> None:
    kernel = of_mdevctl(tmp_path)
    host = api.scan(kernel, with_users=True, with_gpu_modes=True)
    (note,) = plan(host, fleet()).notes
    path = f"/etc/mdevctl.d/{GPUS[0]}/{DEFINED}"
    assert note.startswith(f"mdevctl's definition also starts vGPU {DEFINED} at boot ({path}); ")
    assert note.endswith(f"vfiomgr vgpu define {DEFINED} --parent {GPUS[0]} --manual")
    assert plan(host, fleet(adopt=False)).notes == ()
    api.apply(DefineVgpu(DEFINED, parent=GPUS[0], autostart=False), tree=kernel)
    host = api.scan(kernel, with_users=True, with_gpu_modes=True)
    assert plan(host, fleet()).notes == (), "the remedy ends it"


def test_what_else_binds_the_functions_at_boot_is_named(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    api.apply(Bind((GPU,)), tree=kernel)
    boot.put(kernel, HostPath(f"/etc/driverctl.d/{GPU}"), "vfio-pci\n")
    host = api.scan(kernel, with_users=True, with_gpu_modes=True)
    line = "quiet vfio-pci.ids=10de:2684,10de:22ba"
    host = replace(host, kernel=replace(host.kernel, command_line=line))
    wanted = {"select": {"id": "10de:2684"}, "state": "passthrough"}
    of_driverctl, of_ids = plan(host, fleet(wanted)).notes
    assert of_driverctl.startswith(f"driverctl binds {GPU} to vfio-pci (/etc/driverctl.d/{GPU})")
    assert of_ids == (
        f"the kernel command line (vfio-pci.ids) also binds {GPU}, {AUDIO} at boot; once the "
        "layout is installed, remove ids=10de:2684,10de:22ba there"
    )
    assert plan(host, fleet(wanted, adopt=False)).notes == (of_driverctl,)


def test_an_installed_layout_replaces_entries_of_driverctl_until_it_is_uninstalled(
    tmp_path: Path,
) -> None:
    kernel = boot.host(tmp_path)
    entry = HostPath(f"/etc/driverctl.d/{GPU}")
    boot.put(kernel, entry, "vfio-pci\n")
    before = boot.etc(kernel)
    wanted = boot.installing()
    wanted = replace(wanted, apply=replace(wanted.apply, adopt=True))
    outcome = api.apply(wanted, tree=kernel)
    assert f"{entry} of driverctl is removed until vfiomgr layout uninstall" in outcome.plan.notes
    assert not kernel.exists(entry)
    assert "--layout whole --adopt\n" in (kernel.read_text(BOOT) or "")
    assert not api.apply(wanted, tree=kernel).is_changed
    assert drivers(kernel, GPU) == ["nvidia"], "no device is changed now"
    api.apply(UninstallLayout(), tree=kernel)
    assert boot.etc(kernel) == before
    assert kernel.read_text(entry) == "vfio-pci\n"


def test_entries_of_driverctl_return_when_all_of_vfiomgr_is_removed(tmp_path: Path) -> None:
    kernel = boot.host(tmp_path)
    entry = HostPath(f"/etc/driverctl.d/{GPU}")
    boot.put(kernel, entry, "vfio-pci\n")
    wanted = boot.installing()
    api.apply(replace(wanted, apply=replace(wanted.apply, adopt=True)), tree=kernel)
    assert not kernel.exists(entry)
    api.apply(Uninstall(ChangeFiles("files", (), ()), update_initramfs=False), tree=kernel)
    assert kernel.read_text(entry) == "vfio-pci\n"


def test_entries_of_driverctl_return_with_a_layout_that_does_not_replace_them(
    tmp_path: Path,
) -> None:
    kernel = boot.host(tmp_path)
    entry = HostPath(f"/etc/driverctl.d/{GPU}")
    boot.put(kernel, entry, "vfio-pci\n")
    wanted = boot.installing()
    api.apply(replace(wanted, apply=replace(wanted.apply, adopt=True)), tree=kernel)
    assert not kernel.exists(entry)
    outcome = api.apply(wanted, tree=kernel)
    assert kernel.read_text(entry) == "vfio-pci\n"
    assert not any("removed until" in note for note in outcome.plan.notes)
    api.apply(UninstallLayout(), tree=kernel)
    assert kernel.read_text(entry) == "vfio-pci\n"


def test_an_entry_that_driverctl_got_since_is_kept(tmp_path: Path) -> None:
    kernel = boot.host(tmp_path)
    entry = HostPath(f"/etc/driverctl.d/{GPU}")
    boot.put(kernel, entry, "vfio-pci\n")
    wanted = boot.installing()
    api.apply(replace(wanted, apply=replace(wanted.apply, adopt=True)), tree=kernel)
    boot.put(kernel, entry, "nvidia\n")
    api.apply(UninstallLayout(), tree=kernel)
    assert kernel.read_text(entry) == "nvidia\n"


def test_a_function_with_another_vgpu_is_not_adopted(tmp_path: Path) -> None:
    kernel = of_a_script(tmp_path)
    (vgpu,) = api.scan(kernel).vgpus.active
    device = api.scan(kernel).device(PciAddress.parse(vgpu.name)).identity
    with pytest.raises(HostError, match=f"its type is {vgpu.type}"):
        adopt_function(kernel, AdoptVgpu(device, 7, before=False, after=True))
    assert own(kernel) == [(False, None)]


def test_a_mark_of_a_vgpu_that_was_created_again_does_not_count(tmp_path: Path) -> None:
    kernel = of_a_script(tmp_path)
    api.apply(fleet(), tree=kernel)
    host = api.scan(kernel, with_gpu_modes=True)
    again = with_facts(host, made_functions=())
    assert not any(map(again.vgpus.is_own, again.vgpus.active))
    assert [again.vgpus.adopted_from(one) for one in again.vgpus.active] == [None, None]


def test_the_list_shows_who_created_a_vgpu(run: Run) -> None:
    run("vgpu", "create", "--parent", "mbochs", "--type", "mbochs-small")
    (item,) = json.loads(run("vgpu", "list", "--format", "json").stdout)["items"]
    assert (item["made_by_vfiomgr"], item["adopted_from"]) == (True, None)


def adopted(make: Callable[[Path], FakeKernel]) -> Callable[[Path], tuple[FakeKernel, ApplyLayout]]:
    return lambda place: (make(place), fleet())


class TestFaults(EveryFault):
    """A failure, and a death, at each operation of an adoption."""

    courses = named(
        lambda tmp_path, name: Course(
            tmp_path, adopted(HOSTS[name][0]), back=lambda kernel: api.revert(tree=kernel)
        ),
        ("mdev", "vendor VFIO"),
    )

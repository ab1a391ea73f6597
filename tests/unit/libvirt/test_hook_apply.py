"""What libvirt's hook takes for a guest and gives back, with a fault at every operation."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.faults import PowerCut
from tests.fakes.hosts import mixed, workstation
from tests.unit.engine.faults import EveryFault, changes, kept, told
from tests.unit.libvirt.domains import EMPTY, hostdev, with_hostdevs
from vfiomgr.definitions.requests import DefineVgpu
from vfiomgr.errors import ProgramFailed, Refusal, VfiomgrError
from vfiomgr.libvirt.commands.hook import read_guest
from vfiomgr.libvirt.guest_hook import prepare_guest, release_guest
from vfiomgr.libvirt.hook import (
    GUESTS,
    GuestRecord,
    InstallHook,
    UninstallHook,
    parse_record,
    render_script,
)
from vfiomgr.libvirt.model import NAMESPACE
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.paths import SCRIPT
from vfiomgr.pci.model import PciAddress
from vfiomgr.sriov.steps import SetVirtualFunctions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.engine.plan import Request
    from vfiomgr.libvirt.model import Domain

GPU, AUDIO = "0000:01:00.0", "0000:01:00.1"
CONSOLE = "0000:00:02.0"
UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
INSTALL = InstallHook("/usr/bin/vfiomgr")


def guest(*names: str, managed: bool = False) -> Domain:
    return with_hostdevs(EMPTY, *(hostdev(name, managed=managed) for name in names))


def prepare(kernel: FakeKernel, domain: Domain) -> tuple[str, ...]:
    return prepare_guest(api.host_at(kernel), domain)


def release(kernel: FakeKernel, domain: Domain) -> tuple[str, ...]:
    return release_guest(api.host_at(kernel), domain)


def read_records(kernel: FakeKernel) -> tuple[GuestRecord, ...]:
    names = sorted(name for name in kernel.children(GUESTS) if name.endswith(".json"))
    texts = {name.removesuffix(".json"): kernel.read_text(GUESTS / name) for name in names}
    return tuple(parse_record(uuid, text) for uuid, text in texts.items() if text is not None)


def drivers(kernel: FakeKernel, *names: str) -> list[str | None]:
    host = api.scan(kernel)
    return [host.device(PciAddress.parse(name)).driver for name in names]


def test_a_gpu_is_bound_whole_for_its_guest_and_given_back(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    before, at_first = kept(kernel), drivers(kernel, GPU, AUDIO)
    assert prepare(kernel, guest(GPU)) == (GPU, AUDIO)
    assert drivers(kernel, GPU, AUDIO) == ["vfio-pci", "vfio-pci"]
    (record,) = read_records(kernel)
    assert (record.name, record.functions) == ("win", (GPU, AUDIO))
    assert release(kernel, guest(GPU)) == (GPU, AUDIO)
    assert drivers(kernel, GPU, AUDIO) == at_first
    assert changes(before, kept(kernel)) == {}
    assert read_records(kernel) == ()


def test_what_was_bound_before_stays_bound(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    api.apply(Bind((PciAddress.parse(GPU),)), tree=kernel)
    assert prepare(kernel, guest(GPU)) == ()
    assert release(kernel, guest(GPU)) == ()
    assert drivers(kernel, GPU, AUDIO) == ["vfio-pci", "vfio-pci"]


def test_the_rest_of_a_group_is_bound_too_and_that_alone_given_back(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    api.apply(Bind((PciAddress.parse(GPU),)), tree=kernel)
    api.apply(Unbind((PciAddress.parse(AUDIO),), only=True), tree=kernel)
    before = kept(kernel)
    assert drivers(kernel, GPU, AUDIO) == ["vfio-pci", "snd_hda_intel"]
    assert prepare(kernel, guest(GPU)) == (AUDIO,)
    assert release(kernel, guest(GPU)) == (AUDIO,)
    assert changes(before, kept(kernel)) == {}


def test_what_libvirt_manages_is_its_own(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    at_first = drivers(kernel, GPU, AUDIO)
    assert prepare(kernel, guest(GPU, managed=True)) == ()
    assert drivers(kernel, GPU, AUDIO) == at_first


def test_a_function_that_is_not_there_is_for_libvirt_to_tell(tmp_path: Path) -> None:
    assert prepare(mixed(tmp_path), guest("0000:77:00.0")) == ()


def test_both_can_be_repeated(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    before = kept(kernel)
    assert release(kernel, guest(GPU)) == ()
    prepare(kernel, guest(GPU))
    assert prepare(kernel, guest(GPU)) == ()
    assert read_records(kernel)[0].functions == (GPU, AUDIO)
    release(kernel, guest(GPU))
    assert release(kernel, guest(GPU)) == ()
    assert changes(before, kept(kernel)) == {}


def test_what_went_back_by_hand_is_not_missed(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    before = kept(kernel)
    prepare(kernel, guest(GPU))
    api.apply(Unbind((PciAddress.parse(GPU),)), tree=kernel)
    assert release(kernel, guest(GPU)) == (GPU, AUDIO)
    assert changes(before, kept(kernel)) == {}


def test_what_bind_refuses_the_hook_refuses_and_takes_nothing(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    before = kept(kernel)
    with pytest.raises(Refusal, match="console's display"):
        prepare(kernel, guest(GPU, CONSOLE))
    assert changes(before, kept(kernel)) == {}
    assert read_records(kernel) == ()


def test_a_vgpu_that_is_defined_is_started_and_stopped(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    api.apply(DefineVgpu(UUID, parent="mtty", type="mtty-2"), tree=kernel)
    before = kept(kernel)
    assert prepare(kernel, guest(UUID)) == (UUID,)
    assert api.scan(kernel).vgpus.named(UUID) is not None
    assert prepare(kernel, guest(UUID)) == ()
    assert release(kernel, guest(UUID)) == (UUID,)
    assert api.scan(kernel).vgpus.named(UUID) is None
    assert changes(before, kept(kernel)) == {}


def test_a_vgpu_that_nobody_knows_stops_the_start(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    with pytest.raises(Refusal, match="no such vGPU:") as caught:
        prepare(kernel, guest(UUID, GPU))
    assert f"vfiomgr vgpu define {UUID}" in caught.value.hint
    assert drivers(kernel, GPU) != ["vfio-pci"]


def test_a_vgpu_is_given_back_where_the_functions_are_refused(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    api.apply(DefineVgpu(UUID, parent="mbochs", type="mbochs-small"), tree=kernel)
    before = kept(kernel)
    with pytest.raises(Refusal):
        prepare(kernel, guest(UUID, CONSOLE))
    assert changes(before, kept(kernel)) == {}
    assert read_records(kernel) == ()


def test_two_guests_have_records_of_their_own(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    other = replace(guest("0000:02:00.0"), uuid="5d7e9c3a-6b0f-4f0e-9a43-0e2f5a1b7c99", name="lin")
    prepare(kernel, guest(GPU))
    prepare(kernel, other)
    release(kernel, guest(GPU))
    assert drivers(kernel, GPU, "0000:02:00.0") == ["nvidia", "vfio-pci"]
    assert [record.name for record in read_records(kernel)] == ["lin"]


# ---- faults


def _operations(tmp_path: Path) -> range:
    kernel = mixed(tmp_path / "count")
    before = len(kernel.operations)
    prepare(kernel, guest(GPU))
    return range(1, len(kernel.operations) - before + 1)


def test_a_failure_of_any_operation_takes_nothing(tmp_path: Path) -> None:
    failed = 0
    for at in _operations(tmp_path):
        kernel = mixed(tmp_path / str(at))
        before = kept(kernel)
        kernel.fail(at=at, errno=errno.EIO)
        try:
            prepare(kernel, guest(GPU))
        except VfiomgrError:
            failed += 1
            assert changes(before, kept(kernel)) == {}, at
            assert read_records(kernel) == (), at
    assert failed


@pytest.mark.parametrize("then", ["recover", "prepare", "release"])
def test_a_death_at_any_operation_strands_nothing(tmp_path: Path, then: str) -> None:
    """The release gives back what there is, and the next start comes to its end."""
    for at in _operations(tmp_path):
        kernel = mixed(tmp_path / f"{then}-{at}")
        before = kept(kernel)
        kernel.kill(at=at)
        with pytest.raises(PowerCut):
            prepare(kernel, guest(GPU))
        kernel.revive()
        if then == "recover":
            api.recover(tree=kernel)
        elif then == "prepare":
            prepare(kernel, guest(GPU))
            assert drivers(kernel, GPU, AUDIO) == ["vfio-pci", "vfio-pci"], at
        release(kernel, guest(GPU))
        assert changes(before, kept(kernel)) == {}, at
        assert read_records(kernel) == (), at


# ---- the hook itself


def hooked(tmp_path: Path, *earlier: Request) -> FakeKernel:
    kernel = mixed(tmp_path)
    for intent in earlier:
        api.apply(intent, tree=kernel)
    return kernel


def test_the_script_is_written_for_all_to_run_and_removed(tmp_path: Path) -> None:
    kernel = hooked(tmp_path)
    before = kept(kernel)
    outcome = api.apply(INSTALL, tree=kernel)
    assert any("restart libvirtd or virtqemud" in text for text in outcome.plan.notes)
    real = kernel.sysfs.real(SCRIPT)
    assert os.stat(real).st_mode & 0o777 == 0o755
    with open(real) as file:
        assert file.read() == render_script("/usr/bin/vfiomgr")
    assert api.apply(INSTALL, tree=kernel).plan.already == ("the hook is already installed",)
    moved = api.apply(InstallHook("/opt/bin/vfiomgr"), tree=kernel)
    assert moved.is_changed
    assert not any("restart" in text for text in moved.plan.notes)
    api.apply(UninstallHook(), tree=kernel)
    assert changes(before, kept(kernel)) == {}
    assert api.apply(UninstallHook(), tree=kernel).plan.already == ("the hook is not installed",)


class Restorecon:
    """The program restorecon of a machine with SELinux, which gives files a type."""

    def __init__(self, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, gives: str) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.kind = "virt_etc_t"
        self._gives = gives
        kernel.sysfs.put("/sys/fs/selinux/enforce", "1")
        kernel.sysfs.put("/sys/fs/selinux/booleans/virt_hooks_unconfined", "0 0")
        monkeypatch.setattr(type(kernel), "is_machine", True)
        monkeypatch.setattr(kernel, "call", self)
        monkeypatch.setattr("vfiomgr.host.selinux.type_of", lambda *_: self.kind)

    def __call__(self, *command: str, limit: float | None = 60) -> None:
        """Label the files, or fail as the real tree does."""
        assert limit is not None
        self.asked.append(command)
        if not self._gives:
            message = "restorecon ended with 1: no policy"
            raise ProgramFailed(message, "run it manually to see why", status=1, said="no policy")
        self.kind = self._gives


HOOKS = "/etc/libvirt/hooks"
RESTORECON = ("restorecon", HOOKS, f"{HOOKS}/qemu.d", f"{HOOKS}/qemu.d/50-vfiomgr")


def test_the_script_has_the_type_of_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = hooked(tmp_path)
    labels = Restorecon(kernel, monkeypatch, "virt_hook_t")
    api.apply(INSTALL, tree=kernel)
    assert labels.asked == [RESTORECON]
    api.apply(UninstallHook(), tree=kernel)
    assert labels.asked == [RESTORECON]


@pytest.mark.parametrize(
    ("gives", "trouble"),
    [("virt_etc_t", "its type is virt_etc_t, not virt_hook_t"), ("", "ended with 1: no policy")],
)
def test_a_type_that_is_wrong_afterwards_is_reported_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gives: str, trouble: str
) -> None:
    kernel = hooked(tmp_path)
    Restorecon(kernel, monkeypatch, gives)
    with pytest.warns(UserWarning, match=f"{trouble}; run restorecon {HOOKS} {HOOKS}/qemu.d "):
        api.apply(INSTALL, tree=kernel)
    assert kernel.exists(SCRIPT)


def test_without_selinux_nothing_is_labelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = hooked(tmp_path)
    labels = Restorecon(kernel, monkeypatch, "virt_hook_t")
    kernel.sysfs.drop("/sys/fs/selinux/enforce")
    api.apply(INSTALL, tree=kernel)
    assert labels.asked == []


def test_no_script_runs_a_module(tmp_path: Path) -> None:
    with pytest.raises(
        Refusal, match="cannot run vfiomgr from a script: it is not installed as a command"
    ):
        api.apply(InstallHook(None), tree=hooked(tmp_path))
    with pytest.raises(Refusal, match="cannot write a systemd unit"):
        api.apply(InstallHook("/home/a b/vfiomgr"), tree=hooked(tmp_path / "again"))


class TestFaults(EveryFault):
    """A failure, and a death, at each operation."""

    courses = told({"install": ((), INSTALL), "uninstall": ((INSTALL,), UninstallHook())}, hooked)


# ---- what libvirt hands over


XML = """<domain type='kvm'><name>win</name><uuid>{uuid}</uuid><memory unit='MiB'>64</memory>
<metadata>{metadata}</metadata><os><type machine='q35'>hvm</type></os><devices/></domain>"""


@pytest.mark.parametrize(
    ("metadata", "acts"),
    [
        (f"<v:devices xmlns:v='{NAMESPACE}' bind='yes'/>", True),
        (f'<devices xmlns="{NAMESPACE}" bind="yes"/>', True),
        (f"<v:devices xmlns:v='{NAMESPACE}' bind='no'/>", False),
        (f"<v:devices xmlns:v='{NAMESPACE}'/>", False),
        (f"<v:other xmlns:v='{NAMESPACE}' bind='yes'/>", False),
        ("<v:devices xmlns:v='urn:other' bind='yes'/>", False),
        ("<devices bind='yes'/>", False),
        ("", False),
    ],
)
def test_a_domain_opts_in_by_its_metadata(metadata: str, *, acts: bool) -> None:
    found = read_guest(XML.format(uuid=UUID, metadata=metadata).encode(), "win")
    assert (found is not None) is acts


def test_a_domain_that_never_heard_of_vfiomgr_is_not_even_read() -> None:
    assert read_guest(b"<no xml", "win") is None


def test_a_record_is_read_as_it_was_written() -> None:
    record = GuestRecord(UUID, "win", (GPU,), (UUID,))
    assert parse_record(UUID, record.render()) == record
    with pytest.raises(VfiomgrError, match="is not a valid record of vfiomgr:"):
        parse_record(UUID, "{}")


@pytest.mark.parametrize("act", [prepare, release])
def test_a_guest_without_a_uuid_is_none_of_libvirts(
    tmp_path: Path, act: Callable[[FakeKernel, Domain], tuple[str, ...]]
) -> None:
    kernel = mixed(tmp_path)
    nameless = replace(guest(GPU), uuid=None, name="../../x")
    with pytest.raises(VfiomgrError, match="has no <uuid>") as caught:
        act(kernel, nameless)
    assert "virsh dumpxml" in caught.value.hint
    assert drivers(kernel, GPU) != ["vfio-pci"]


def test_virtual_functions_are_bound_alone(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    api.apply(SetVirtualFunctions(PciAddress.parse("0000:05:00.0"), 2, autoprobe=True), tree=kernel)
    assert prepare(kernel, guest("0000:05:10.0")) == ("0000:05:10.0",)

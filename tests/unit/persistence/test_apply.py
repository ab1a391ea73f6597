"""Persistence carried out on the fake kernel, with a fault at every operation; and the watch."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.faults import PowerCut
from tests.fakes.hosts import workstation
from tests.unit.engine.faults import EveryFault, Stories, told
from vfiomgr.engine import registry
from vfiomgr.engine.journal import Journal
from vfiomgr.engine.survey import cut_off_runs
from vfiomgr.errors import (
    HostError,
    ProgramFailed,
    RollbackIncomplete,
    RolledBack,
    StuckInKernel,
    VfiomgrError,
)
from vfiomgr.host import udev
from vfiomgr.host.owners import ROOT_ONLY, NodeOwner
from vfiomgr.host.programs import ProgramAnswer
from vfiomgr.passthrough import watch
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.passthrough.watch import Arrival
from vfiomgr.paths import BOOT_ID, HostPath, vfio_group_node
from vfiomgr.pci.facts import read_driver_state, read_identity
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.apply import rebuild_initramfs, replace_file
from vfiomgr.persistence.facts import rules_changed
from vfiomgr.persistence.model import COMMANDS, HOOKS, UNIT, render_rule, rule_file
from vfiomgr.persistence.steps import (
    ForgetPersisted,
    ImportDriverctl,
    RebuildInitramfs,
    ReplaceFile,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.persistence.model import PersistedBinding

GPU, AUDIO = PciAddress.parse("0000:01:00.0"), PciAddress.parse("0000:01:00.1")
OWNER = NodeOwner("qemu:kvm", 64055, 107)
PERSIST = Bind((GPU,), persist=True, owner=OWNER)
NODE = vfio_group_node(10)


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return prepared(tmp_path)


def prepared(tmp_path: Path) -> FakeKernel:
    kernel = workstation(tmp_path, vfio_loaded=True, has_cdev=True)
    put(kernel, "/etc/initramfs-tools/initramfs.conf", "MODULES=dep\nFRAMEBUFFER=y\n")
    put(kernel, "/etc/driverctl.d/0000:02:00.0", "vfio-pci\n")
    return kernel


def put(kernel: FakeKernel, path: str, text: str) -> None:
    kernel.sysfs.make(HostPath(path).parent)
    with open(kernel.sysfs.real(path), "w") as file:
        file.write(text)


def etc(kernel: FakeKernel) -> dict[str, str]:
    """Every file below /etc that no process left half written."""
    found = kernel.sysfs.picture("/etc")
    return {p: t for p, t in found.items() if t != "/"}


def driver(kernel: FakeKernel, address: PciAddress) -> str | None:
    return read_driver_state(kernel, address).driver


def test_persist_binds_and_writes_a_rule_for_each_function_of_the_slot(kernel: FakeKernel) -> None:
    before = etc(kernel)
    assert api.apply(PERSIST, tree=kernel).is_changed
    host = api.scan(kernel)
    assert [(b.address, b.driver, b.owner) for b in host.files.bindings] == [
        (GPU, "vfio-pci", OWNER),
        (AUDIO, "vfio-pci", OWNER),
    ]
    assert kernel.read_text(rule_file(GPU)) == render_rule(host.files.bindings[0])
    assert os.stat(kernel.locate(HostPath("/etc/initramfs-tools/hooks/vfiomgr"))).st_mode & 0o111
    assert not api.apply(PERSIST, tree=kernel).is_changed
    api.apply(Unbind((GPU,), forget=True), tree=kernel)
    assert etc(kernel) == before
    assert driver(kernel, GPU) == "nvidia"


def test_the_owner_gets_group_node_and_cdev_and_a_new_node_is_roots_again(
    kernel: FakeKernel,
) -> None:
    api.apply(replace(PERSIST, persist=False), tree=kernel)
    nodes = {node.path: node.access for node in api.scan(kernel).files.nodes}
    assert set(nodes) == {NODE, "/dev/vfio/devices/vfio0", "/dev/vfio/devices/vfio1"}
    assert set(nodes.values()) == {OWNER.access}
    assert not api.apply(replace(PERSIST, persist=False), tree=kernel).is_changed
    api.apply(Unbind((GPU,)), tree=kernel)
    assert kernel.access(NODE) is None
    api.apply(Bind((GPU,)), tree=kernel)
    assert kernel.access(NODE) == ROOT_ONLY


STORIES: Stories = {
    "persist": ((), PERSIST),
    "forget": ((PERSIST,), Unbind((GPU,), forget=True)),
    "remove": ((PERSIST,), ForgetPersisted(every=True)),
    "import": ((), ImportDriverctl()),
}
COURSES = told(STORIES, prepared)


class TestFaults(EveryFault):
    """A failure, and a death, at each operation."""

    courses = COURSES


def test_a_file_that_somebody_else_changed_is_not_overwritten(kernel: FakeKernel) -> None:
    put(kernel, rule_file(GPU), "mine")
    step = ReplaceFile(rule_file(GPU), None, "ours")
    with pytest.raises(HostError, match="was changed by another program"):
        replace_file(kernel, step)
    assert kernel.read_text(rule_file(GPU)) == "mine"


def test_the_initramfs_of_another_root_is_not_made_here(kernel: FakeKernel) -> None:
    with pytest.raises(HostError, match="cannot rebuild the initramfs") as caught:
        rebuild_initramfs(kernel, RebuildInitramfs(("update-initramfs", "-u")))
    assert "run on that host: update-initramfs -u" in caught.value.hint


def test_an_initramfs_that_cannot_be_made_undoes_all(kernel: FakeKernel) -> None:
    before = etc(kernel)
    with pytest.raises(RolledBack, match="cannot rebuild the initramfs"):
        api.apply(replace(PERSIST, update_initramfs=True), tree=kernel)
    assert (etc(kernel), driver(kernel, GPU)) == (before, "nvidia")


class Deaf:
    """Programs of this machine that fail, and what was asked of them."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, *command: str, limit: float | None = 60) -> None:
        """Fail as the real tree does."""
        self.asked.append(" ".join(command))
        assert limit is None or limit <= 10
        message = f"{self.asked[-1]} ended with 1: no bus"
        raise ProgramFailed(message, "run it by hand to see why", status=1, said="no bus")


@pytest.fixture
def deaf(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> Deaf:
    """The fake kernel as the machine itself, with a systemd and a udevd that answer nobody."""
    put(kernel, "/run/udev/control", "")
    kernel.sysfs.make("/run/systemd/system")
    monkeypatch.setattr(type(kernel), "is_machine", True)
    monkeypatch.setattr(
        "vfiomgr.passthrough.apply._UNSEEN_DEADLINE", 0.0
    )  # it makes no record either
    monkeypatch.setattr(udev, "_PAUSE", 0.0)
    programs = Deaf()
    monkeypatch.setattr(kernel, "call", programs)
    return programs


MANAGED = replace(PERSIST, program="/usr/bin/vfiomgr")


def test_a_reload_that_fails_is_told_and_undoes_nothing(kernel: FakeKernel, deaf: Deaf) -> None:
    with pytest.warns(UserWarning, match="could not be reloaded") as told:
        api.apply(MANAGED, tree=kernel)
    assert driver(kernel, GPU) == "vfio-pci"
    assert {UNIT, rule_file(GPU), rule_file(AUDIO)} <= set(etc(kernel))
    reload, daemon_reload = "udevadm control --reload", "systemctl daemon-reload"
    start = f"systemctl --no-block start {UNIT.name}"
    assert deaf.asked == [*[reload] * 2 * udev._ATTEMPTS, daemon_reload, start]
    texts = [str(warning.message) for warning in told]
    assert texts[-1] == (
        f"{UNIT} is written, but could not be reloaded: {start} ended with 1: no bus; "
        "run it by hand to see why"
    )


def test_a_reload_that_fails_leaves_no_roll_back_incomplete(kernel: FakeKernel, deaf: Deaf) -> None:
    before = etc(kernel)
    with (
        pytest.warns(UserWarning, match="could not be reloaded") as told,
        pytest.raises(RolledBack, match="update-initramfs -u -k all ended with 1") as caught,
    ):
        api.apply(replace(MANAGED, update_initramfs=True), tree=kernel)
    assert caught.value.exit_code == 1
    assert (etc(kernel), driver(kernel, GPU)) == (before, "nvidia")
    assert f"systemctl --no-block stop {UNIT.name}" in deaf.asked
    assert any(str(warning.message).startswith(f"{UNIT} is removed, but") for warning in told)


class Listing:
    """The kernel as the machine, whose programs all succeed and list an image."""

    def __init__(self, kernel: FakeKernel, image: str | ProgramAnswer | None) -> None:
        self._kernel = kernel
        self._answer = ProgramAnswer(0, image, "") if isinstance(image, str) else image
        self.is_machine = True
        self.asked: list[tuple[str, ...]] = []

    def __getattr__(self, name: str) -> object:
        """Whatever else the kernel has."""
        return getattr(self._kernel, name)

    def call(self, *command: str, **_: object) -> None:
        """Rebuild the image."""
        self.asked.append(command)

    def ask(self, command: tuple[str, ...], _limit: float) -> ProgramAnswer | None:
        """List the image, or fail."""
        self.asked.append(command)
        return self._answer


LISTED = {
    "initramfs-tools": ("lsinitramfs", "/boot/initrd.img-6.1.0-18-amd64"),
    "dracut": ("lsinitrd", "--kver", "6.1.0-18-amd64"),
    "mkinitcpio": ("lsinitcpio", "/boot/initramfs-6.1-x86_64.img"),
}


def make_preset(kernel: FakeKernel) -> None:
    """Add the preset of a kernel of Manjaro."""
    put(kernel, "/usr/lib/modules/6.1.0-18-amd64/pkgbase", "linux61\n")
    text = "PRESETS=('default')\ndefault_image=\"/boot/initramfs-6.1-x86_64.img\"\n"
    put(kernel, "/etc/mkinitcpio.d/linux61.preset", text)


@pytest.mark.parametrize("tool", [*LISTED])
def test_the_rules_are_looked_for_in_the_new_image(kernel: FakeKernel, tool: str) -> None:
    put(kernel, "/proc/sys/kernel/osrelease", "6.1.0-18-amd64\n")
    put(kernel, HOOKS[tool], "")
    put(kernel, rule_file(GPU), "")
    put(kernel, rule_file(AUDIO), "")
    make_preset(kernel)
    names = [rule_file(GPU).name, rule_file(AUDIO).name]
    step = RebuildInitramfs(COMMANDS[tool])
    full = Listing(kernel, f"-rw-r--r-- etc/udev/rules.d/{names[0]}\n./{names[1]}\n")
    rebuild_initramfs(full, step)  # type: ignore[arg-type]
    assert full.asked == [COMMANDS[tool], LISTED[tool]]
    with pytest.warns(UserWarning, match="does not contain") as told:
        rebuild_initramfs(Listing(kernel, names[1]), step)  # type: ignore[arg-type]
    (warning,) = told
    assert f"does not contain {rule_file(GPU)}: at boot" in str(warning.message)


UNLISTED = "was not found or did not end within 60 seconds"


@pytest.mark.parametrize(
    ("tool", "answer", "why"),
    [
        ("initramfs-tools", None, f"{' '.join(LISTED['initramfs-tools'])} {UNLISTED}"),
        ("dracut", ProgramAnswer(1, "", "no\nimage\n"), "ended with 1: no image"),
        ("dracut", ProgramAnswer(2, "", ""), "ended with 2: no message"),
        ("mkinitcpio", None, f"{' '.join(LISTED['mkinitcpio'])} {UNLISTED}"),
    ],
)
def test_an_image_that_cannot_be_listed_is_not_verified(
    kernel: FakeKernel, tool: str, answer: ProgramAnswer | None, why: str
) -> None:
    put(kernel, "/proc/sys/kernel/osrelease", "6.1.0-18-amd64\n")
    put(kernel, HOOKS[tool], "")
    put(kernel, rule_file(GPU), "")
    make_preset(kernel)
    with pytest.warns(UserWarning, match="the new initramfs was not verified") as told:
        rebuild_initramfs(Listing(kernel, answer), RebuildInitramfs(COMMANDS[tool]))  # type: ignore[arg-type]
    (warning,) = told
    by_hand = f"run {' '.join(LISTED[tool])} manually, and look for {rule_file(GPU)}"
    assert str(warning.message).endswith(f"{why}; {by_hand}")


KERNEL = "kernel 6.1.0-18-amd64"
AFTER_REBOOT = "reboot, then list the image of the new kernel with lsinitcpio"


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (
            "modules.dep",
            f"no preset in /etc/mkinitcpio.d names the image of {KERNEL}: list it with lsinitcpio",
        ),
        (
            None,
            f"the modules of {KERNEL} are gone (it was upgraded): {AFTER_REBOOT}",
        ),
    ],
)
def test_an_image_that_is_unknown_is_not_verified(
    kernel: FakeKernel, module: str | None, why: str
) -> None:
    put(kernel, "/proc/sys/kernel/osrelease", "6.1.0-18-amd64\n")
    put(kernel, HOOKS["mkinitcpio"], "")
    put(kernel, rule_file(GPU), "")
    if module is not None:
        put(kernel, f"/usr/lib/modules/6.1.0-18-amd64/{module}", "")
    unnamed = Listing(kernel, "")
    with pytest.warns(UserWarning, match="was not verified") as told:
        rebuild_initramfs(unnamed, RebuildInitramfs(COMMANDS["mkinitcpio"]))  # type: ignore[arg-type]
    (warning,) = told
    assert str(warning.message) == (
        f"the new initramfs was not verified: {why}, and look for {rule_file(GPU)}"
    )
    assert unnamed.asked == [COMMANDS["mkinitcpio"]]


def test_a_known_image_may_have_any_name(kernel: FakeKernel) -> None:
    put(kernel, "/proc/sys/kernel/osrelease", "6.1.0-18-amd64\n")
    put(kernel, HOOKS["mkinitcpio"], "")
    put(kernel, rule_file(GPU), "")
    put(kernel, "/usr/lib/modules/6.1.0-18-amd64/pkgbase", "linux\n")
    put(kernel, "/etc/mkinitcpio.d/linux.preset", "PRESETS=(a)\na_image=/boot/IMAGE.img\n")
    with pytest.warns(UserWarning, match=f"lsinitcpio /boot/IMAGE.img {UNLISTED}"):
        rebuild_initramfs(Listing(kernel, None), RebuildInitramfs(COMMANDS["mkinitcpio"]))  # type: ignore[arg-type]


def test_an_image_without_a_hook_is_not_listed(kernel: FakeKernel) -> None:
    bare = Listing(kernel, "")
    rebuild_initramfs(bare, RebuildInitramfs(COMMANDS["dracut"]))  # type: ignore[arg-type]
    assert bare.asked == [COMMANDS["dracut"]]


def wait_for_ever(*_: object) -> None:
    """Do as a tool does that takes longer than anybody waits."""
    time.sleep(3600)


@pytest.mark.parametrize("finish", [True, False])
def test_an_initramfs_that_takes_too_long_is_no_stuck_kernel(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, *, finish: bool
) -> None:
    kernel.stuck.really = True  # so that steps are carried out by children
    performers: Any = registry._PERFORMERS
    monkeypatch.setitem(performers, RebuildInitramfs, wait_for_ever)
    monkeypatch.setattr(RebuildInitramfs, "deadline", 0.5)
    before = etc(kernel)
    with pytest.raises(RollbackIncomplete, match=r"has not ended within 0\.5 seconds") as caught:
        api.apply(replace(PERSIST, update_initramfs=True), tree=kernel)
    assert not isinstance(caught.value, StuckInKernel)
    assert caught.value.message.startswith("update-initramfs -u -k all has not ended")
    assert "kernel" not in caught.value.message
    assert driver(kernel, GPU) == "vfio-pci"
    rebuilt: list[RebuildInitramfs] = []
    monkeypatch.setitem(performers, RebuildInitramfs, lambda _, step: rebuilt.append(step))
    kernel.stuck.really = False  # what a child rebuilds is not seen here
    (run,) = api.recover(tree=kernel, finish=finish)
    assert run.step.startswith("rebuild the initramfs")
    assert len(rebuilt) == 1, "without the rules too: the tool may have finished"
    assert (rule_file(GPU) in etc(kernel)) is finish
    assert driver(kernel, GPU) == ("vfio-pci" if finish else "nvidia")
    assert finish or etc(kernel) == before
    assert api.recover(tree=kernel) == ()


@pytest.mark.parametrize("finish", [True, False], ids=["recover --finish", "same command"])
@pytest.mark.parametrize("is_begun", [True, False])
def test_an_interrupted_rebuild_is_done_by_what_completes_the_run_and_by_nothing_else(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, *, finish: bool, is_begun: bool
) -> None:
    rebuilt: list[RebuildInitramfs] = []
    performers: Any = registry._PERFORMERS
    request = replace(PERSIST, update_initramfs=True)

    def cut(*_: object) -> None:
        raise PowerCut

    def begin(journal: Journal, steps: Sequence[int], *, durable: bool = True) -> None:
        if not is_begun and api.host_at(kernel).plan(PERSIST).is_empty:
            raise PowerCut
        began(journal, steps, durable=durable)

    began = Journal.begin
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "begin", begin)
        patch.setitem(performers, RebuildInitramfs, cut)
        with pytest.raises(PowerCut):
            api.apply(request, tree=kernel)
    kernel.revive()
    monkeypatch.setitem(performers, RebuildInitramfs, lambda _, step: rebuilt.append(step))
    if is_begun:
        api.apply(PERSIST, tree=kernel)
        assert rebuilt == []
    assert len(cut_off_runs(kernel, kernel.read(BOOT_ID))) == 1
    planned = api.host_at(kernel).plan(request).steps
    assert planned == (RebuildInitramfs(COMMANDS["initramfs-tools"]),)
    if finish:
        api.recover(tree=kernel, finish=True)
    else:
        assert api.apply(request, tree=kernel).plan.steps == planned
    assert len(rebuilt) == 1
    assert cut_off_runs(kernel, kernel.read(BOOT_ID)) == []
    assert not api.apply(request, tree=kernel).is_changed


def test_a_rebuild_that_never_began_is_named_by_the_run_that_closes_its_journal(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(journal: Journal, steps: Sequence[int], *, durable: bool = True) -> None:
        if api.host_at(kernel).plan(PERSIST).is_empty:  # all but the rebuild is done
            raise PowerCut
        began(journal, steps, durable=durable)

    request, began = replace(PERSIST, update_initramfs=True), Journal.begin
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "begin", begin)
        with pytest.raises(PowerCut):
            api.apply(request, tree=kernel)
    kernel.revive()
    notes: list[str] = []
    api.apply(PERSIST, tree=kernel, on_note=notes.append)
    assert cut_off_runs(kernel, kernel.read(BOOT_ID)) == []
    assert notes[-1] == (
        "a step of the interrupted operation is not done: rebuild the initramfs (may take "
        "minutes); to do it, run: update-initramfs -u -k all"
    )


class Images:
    """What a rebuild of the image finds in /etc; `fails` is raised by each."""

    def __init__(self, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernel = kernel
        self.found: list[dict[str, str]] = []
        self.fails: type[BaseException] | None = None
        performers: Any = registry._PERFORMERS
        monkeypatch.setitem(performers, RebuildInitramfs, self._rebuild)

    def _rebuild(self, *_: object) -> None:
        if self.fails:
            raise self.fails
        self.found.append(etc(self.kernel))

    def die(self) -> None:
        """A command that dies while it rebuilds the image."""
        self.fails = PowerCut
        with pytest.raises(PowerCut):
            api.apply(replace(PERSIST, update_initramfs=True), tree=self.kernel)
        self.kernel.revive()


@pytest.fixture
def images(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> Images:
    return Images(kernel, monkeypatch)


@pytest.mark.parametrize("reboots", [False, True])
def test_an_image_that_may_have_the_rules_is_rebuilt_when_they_are_undone(
    kernel: FakeKernel, images: Images, *, reboots: bool
) -> None:
    before = etc(kernel)
    images.die()
    if reboots:
        kernel.reboot()
    with pytest.raises(PowerCut):
        api.recover(tree=kernel)
    kernel.revive()
    images.fails = OSError
    with pytest.raises(RollbackIncomplete, match="rebuild the initramfs"):
        api.recover(tree=kernel)
    images.fails = None
    assert len(api.recover(tree=kernel)) == 1
    assert images.found == [before]
    assert api.recover(tree=kernel) == ()


def test_a_failure_after_a_rebuild_rebuilds_the_image_of_the_restored_files(
    kernel: FakeKernel, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        message = "what follows cannot be planned"
        raise HostError(message)

    before = etc(kernel)
    monkeypatch.setattr("vfiomgr.engine.transaction._Replanner.__call__", fail)
    with pytest.raises(RolledBack):
        api.apply(replace(PERSIST, update_initramfs=True), tree=kernel)
    assert rule_file(GPU) in images.found[0]
    assert images.found[1:] == [before]


@pytest.mark.parametrize("finish", [True, False])
def test_recover_rebuilds_the_image_and_keeps_what_a_later_unbind_did(
    kernel: FakeKernel, images: Images, *, finish: bool
) -> None:
    before = etc(kernel)
    images.die()
    images.fails = None
    api.apply(Unbind((GPU,), forget=True), tree=kernel)
    assert (driver(kernel, GPU), images.found) == ("nvidia", [])
    assert len(api.recover(tree=kernel, finish=finish)) == 1
    assert driver(kernel, GPU) == "nvidia"
    assert images.found == [before]
    assert api.recover(tree=kernel) == ()


def test_a_reader_that_takes_longer_than_a_step_may_is_no_stuck_kernel(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.stuck.really = True
    told = "vfiomgr.persistence.apply._tell_readers"
    monkeypatch.setattr(told, lambda *_, **__: time.sleep(3.5))
    assert api.apply(PERSIST, tree=kernel, deadline=3.0).is_changed
    assert rule_file(GPU) in etc(kernel)


class Story:
    """Both halves of a watch on a fake kernel, and what it said and wanted to be put right."""

    def __init__(self, kernel: FakeKernel) -> None:
        self.notes: list[str] = []
        self.lost: list[PersistedBinding] = []
        self.kernel = kernel
        self.quick = watch.FastPath(kernel)
        self.thorough = watch.FullPath(kernel, self.notes.append, self._correct)

    def _correct(self, bindings: Sequence[PersistedBinding]) -> None:
        self.lost += bindings

    def arrive(self, *, device_id: str | None = None) -> PciAddress | None:
        """The kernel announces the GPU."""
        found = read_identity(self.kernel, GPU)
        assert found is not None
        arrival = Arrival(
            GPU,
            found.vendor_id,
            device_id or found.device_id,
            found.subsystem_id,
            found.class_code,
            found.bridge_path,
        )
        return self.quick.arrived(arrival)


@pytest.fixture
def story(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> Story:
    monkeypatch.setattr(watch, "SETTLE", 0.0)
    api.apply(PERSIST, tree=kernel)
    kernel.unplug(str(GPU))
    kernel.plug(str(GPU))
    assert driver(kernel, GPU) == "nvidia"
    return Story(kernel)


def test_what_arrives_gets_its_override_at_once(story: Story) -> None:
    assert story.arrive() == GPU
    assert story.kernel.override_of(str(GPU)) == "vfio-pci"


def test_another_device_that_arrives_is_left_alone(story: Story) -> None:
    assert story.arrive(device_id="2222") is None
    assert story.kernel.override_of(str(GPU)) is None


def test_a_function_that_vanishes_again_is_no_trouble(story: Story) -> None:
    story.kernel.fail_writes("driver_override", errno.ENOENT)
    assert story.arrive() == GPU
    story.kernel.unplug(str(GPU))
    story.thorough.arrived([GPU])
    story.thorough.settle()
    assert (story.notes, story.lost) == ([], [])


def test_what_a_host_driver_took_first_is_to_be_put_right_once(story: Story) -> None:
    story.thorough.arrived([GPU, AUDIO])
    story.thorough.settle()
    story.thorough.settle()
    assert [binding.address for binding in story.lost] == [GPU]
    assert story.notes == ["0000:01:00.0 is on nvidia", "0000:01:00.1 is on vfio-pci"]


def test_nothing_is_looked_at_while_more_arrives(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SETTLE", 60.0)
    story.thorough.arrived([GPU])
    story.thorough.settle()
    assert story.notes == []


def test_a_rule_that_is_removed_counts_no_more(story: Story) -> None:
    before = rules_changed(story.kernel)
    api.apply(ForgetPersisted((GPU,)), tree=story.kernel)
    assert rules_changed(story.kernel) != before
    story.quick.refresh()
    assert story.arrive() is None
    story.thorough.arrived([GPU])
    story.thorough.settle()
    assert story.notes == []


def test_the_first_watch_of_a_boot_looks_at_all_functions(story: Story) -> None:
    story.thorough.sweep()
    story.thorough.settle()
    assert [binding.address for binding in story.lost] == [GPU]
    again = Story(story.kernel)
    again.thorough.sweep()
    again.thorough.settle()
    assert again.lost == []


def test_what_was_lost_is_bound_and_told(story: Story) -> None:
    watch.put_right(
        [api.scan(story.kernel).files.bindings[0]], tree=story.kernel, on_note=story.notes.append
    )
    assert driver(story.kernel, GPU) == "vfio-pci"
    assert story.notes == ["bound to vfio-pci: 0000:01:00.0"]


def test_a_guard_stands_where_something_is_to_be_put_right(story: Story) -> None:
    story.kernel.sysfs.make("/proc/812/fd")
    story.kernel.sysfs.link_absolute("/proc/812/fd/7", "/dev/nvidiactl")
    watch.put_right(
        [api.scan(story.kernel).files.bindings[0]], tree=story.kernel, on_note=story.notes.append
    )
    assert driver(story.kernel, GPU) == "nvidia"
    assert "is in use by" in story.notes[0]


@pytest.mark.parametrize("kind", [RolledBack, RollbackIncomplete])
def test_an_interrupted_correction_ends_the_watch(
    story: Story, kind: type[VfiomgrError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        message = "interrupted"
        raise kind(message) from KeyboardInterrupt()

    monkeypatch.setattr(watch, "carry_out", interrupted)
    bindings = [api.scan(story.kernel).files.bindings[0]]
    with pytest.raises(kind):
        watch.put_right(bindings, tree=story.kernel, on_note=story.notes.append)
    assert story.notes == []


def test_recover_takes_rules_back_after_a_reboot_too(kernel: FakeKernel) -> None:
    before = etc(kernel)
    kernel.kill(at=operation_number(kernel, "replace", rule_file(GPU)), after=True)
    with pytest.raises(PowerCut):
        api.apply(PERSIST, tree=kernel)
    kernel.reboot()
    assert kernel.read_text(rule_file(GPU)) is not None
    assert len(api.recover(tree=kernel)) == 1
    assert etc(kernel) == before
    assert driver(kernel, GPU) == "nvidia"


def operation_number(kernel: FakeKernel, kind: str, path: str) -> int:
    """When, counted from now, a run of PERSIST comes to an operation; found on a twin host."""
    twin = prepared(Path(kernel.root).parent / "twin")
    before = len(twin.operations)
    api.apply(PERSIST, tree=twin)
    done = [(operation.kind, operation.path) for operation in twin.operations[before:]]
    return done.index((kind, path)) + 1  # type: ignore[arg-type]

"""Uninstall: everything that vfiomgr wrote is removed, or nothing."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from typing import TYPE_CHECKING, ClassVar

import pytest

from tests import api
from tests.fakes.faults import PowerCut
from tests.fakes.tunable import TunableHost
from tests.unit.devices import with_facts
from tests.unit.engine.faults import Course, Courses, EveryFault
from tests.unit.layout.test_apply import AUDIO, GPU, drivers
from tests.unit.layout.test_boot import etc, installing
from tests.unit.runtimes import install, kata, put
from tests.unit.uninstall.everything import (
    KATA_DROP_IN,
    KATA_TEXT,
    PROGRAM,
    RESOURCE,
    SPECIFICATION,
    documented,
    everything,
    paths,
    prepared,
    request_for,
)
from tools.package.__main__ import STAYING
from vfiomgr.containers.runtimes.record import RECORD as RUNTIMES
from vfiomgr.containers.runtimes.record import parse_record
from vfiomgr.definitions import model as definitions
from vfiomgr.documents.text import sealed, unsealed
from vfiomgr.errors import Refusal
from vfiomgr.libvirt.hook import InstallHook
from vfiomgr.metrics import timer
from vfiomgr.metrics.model import DEVICES
from vfiomgr.passthrough.steps import Bind
from vfiomgr.paths import SCRIPT, HostPath
from vfiomgr.persistence import installed_layout as layouts
from vfiomgr.persistence.installed_layout import FILE, RECORD
from vfiomgr.persistence.model import HOOKS, UNIT
from vfiomgr.tuning.model import TUNED, PlacedInterrupts
from vfiomgr.tuning.steps import TuneHost
from vfiomgr.users.model import DeviceUser

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.engine.plan import Plan
    from vfiomgr.uninstall.requests import Uninstall


GUEST = "5d7e9c3a-6b0f-4f0e-9a43-0e2f5a1b7c11"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backups are made at one time."""
    monkeypatch.setattr("vfiomgr.containers.runtimes.apply._stamp", lambda: "20261121T120000Z")


def plan_of(kernel: FakeKernel, request: Uninstall | None = None) -> Plan:
    request = request or request_for(kernel)
    return api.host_at(kernel).plan(request)


def test_every_documented_file_is_removed_or_its_reason_to_stay_is_documented(
    tmp_path: Path,
) -> None:
    kernel = everything(tmp_path)
    before = paths(kernel)
    api.apply(request_for(kernel), tree=kernel)
    after = paths(kernel)
    for expression, fate in documented():
        matches = {path for path in before if re.fullmatch(expression, path)}
        if fate.startswith("removes"):
            assert matches, f"no host of this test has {expression}"
            assert not matches & after, expression
        else:
            assert fate.startswith(("keeps", "refused while ")), expression


def test_packages_name_each_file_that_stays_without_them() -> None:
    """But for those of container runtimes, which do not start without a file that they import."""
    for expression, fate in documented():
        path = expression.replace("[^/]+", "x").replace("\\", "")
        if path.startswith("/etc/") and fate == "removes" and "containerd" not in path:
            is_named = any(fnmatch(path, pattern) for pattern in STAYING)
            assert is_named or path == FILE, path  # which may be of configuration management


def test_etc_is_as_before_the_first_command(tmp_path: Path) -> None:
    before = etc(prepared(tmp_path / "before"))
    kernel = everything(tmp_path)
    api.apply(request_for(kernel), tree=kernel)
    left = {path: text for path, text in etc(kernel).items() if before.get(path) != text}
    assert [path for path in left if not path.startswith("/etc/mdevctl.d/")] == []
    assert not before.keys() - etc(kernel).keys()


def test_what_is_uninstalled_twice_has_nothing_left_to_do(tmp_path: Path) -> None:
    kernel = everything(tmp_path)
    api.apply(request_for(kernel, unbind=True), tree=kernel)
    plan = plan_of(kernel, request_for(kernel, unbind=True))
    assert plan.is_empty
    assert plan.already == ("no files to remove",)


def test_devices_stay_without_unbind_and_the_option_is_named(tmp_path: Path) -> None:
    kernel = everything(tmp_path)
    done = api.apply(request_for(kernel), tree=kernel)
    assert drivers(kernel, GPU, AUDIO) == ["vfio-pci", "vfio-pci"]
    assert any(n.endswith("to return them now, pass --unbind") for n in done.plan.notes)
    assert kernel.exists(HostPath(f"/var/lib/vfiomgr/origins/{GPU}.json"))


def test_unbind_returns_devices_and_no_note_says_that_rules_bind_them_again(
    tmp_path: Path,
) -> None:
    kernel = everything(tmp_path)
    done = api.apply(request_for(kernel, unbind=True), tree=kernel)
    assert drivers(kernel, GPU, AUDIO) == ["nvidia", "snd_hda_intel"]
    assert not [note for note in done.plan.notes if "again" in note or "afterwards" in note]
    assert not kernel.exists(HostPath(f"/var/lib/vfiomgr/origins/{GPU}.json"))


def test_a_device_in_use_refuses_all_and_the_option_to_leave_it_is_named(tmp_path: Path) -> None:
    kernel = everything(tmp_path)
    request = request_for(kernel, unbind=True)
    host = api.host_at(kernel).facts_for(request)
    guest = DeviceUser("/dev/vfio/10", 812, "qemu-system-x86")
    used = with_facts(host, users=(guest,))
    with pytest.raises(Refusal) as caught:
        api.plan(used, request)
    assert str(GPU) in caught.value.message
    assert f"leave it on its driver: --keep {GPU};" in str(caught.value.remedy)
    kept = request_for(kernel, unbind=True, keep=(str(GPU), str(AUDIO)))
    assert api.plan(used, kept).steps
    api.apply(kept, tree=kernel)
    assert drivers(kernel, GPU, AUDIO) == ["vfio-pci", "vfio-pci"]


def test_an_interrupted_operation_is_ended_first(tmp_path: Path) -> None:
    kernel = prepared(tmp_path)
    kernel.kill(at=3)
    with pytest.raises(PowerCut):
        api.apply(Bind((GPU,)), tree=kernel)
    kernel.revive()
    with pytest.raises(Refusal) as caught:
        request_for(kernel)
    assert caught.value.diagnostics[0].rule == "uninstall-interrupted"
    assert caught.value.remedy == "vfiomgr recover"


@pytest.mark.parametrize("is_served", [True, False])
def test_claims_are_named_before_the_agent_which_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_served: bool
) -> None:
    monkeypatch.setattr("vfiomgr.uninstall.found.is_running", lambda _: is_served)
    kernel = everything(tmp_path)
    put(kernel, "/run/vfiomgr/dra/0b7c.json", "{}")
    with pytest.raises(Refusal) as caught:
        request_for(kernel)
    assert caught.value.diagnostics[0].rule == "uninstall-claims"
    assert "have 1 ResourceClaim that" in caught.value.message
    words = str(caught.value.remedy)
    order = [words.find(word) for word in ("kubectl drain", "disable --now", "vfiomgr uninstall")]
    assert order == sorted(order)
    assert -1 not in order
    assert words.startswith("start the agent (a service: ") is not is_served
    by_hand = f"if no agent should run here: rm {kernel.root}/run/vfiomgr/dra/*.json"
    assert words.endswith(f"; {by_hand}") is not is_served


def test_an_agent_without_claims_is_stopped_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfiomgr.uninstall.found.is_running", lambda _: True)
    with pytest.raises(Refusal) as caught:
        request_for(prepared(tmp_path))
    assert caught.value.diagnostics[0].rule == "uninstall-agent"


def test_an_entry_that_was_edited_since_stays_with_its_configuration_and_is_named(
    tmp_path: Path,
) -> None:
    kernel = everything(tmp_path)
    drop_in = "/etc/containerd/conf.d/50-vfiomgr.toml"
    text = kernel.read_text(HostPath(drop_in)) or ""
    put(kernel, drop_in, text.replace("containerd-shim-kata-v2", "my-shim"))
    done = api.apply(request_for(kernel), tree=kernel)
    assert any(note.startswith("entries of containerd 2.1.9 stay: ") for note in done.plan.notes)
    assert kernel.exists(HostPath(drop_in))
    assert kernel.exists(HostPath("/etc/kata-containers/vfiomgr/kata-vfio/configuration.toml"))
    assert not kernel.exists(RECORD)


def test_an_edited_entry_keeps_no_other_entry_of_its_runtime(tmp_path: Path) -> None:
    kernel = everything(tmp_path)
    install(kernel, kata(name="other"))
    drop_in = "/etc/containerd/conf.d/50-vfiomgr.toml"
    text = kernel.read_text(HostPath(drop_in)) or ""
    put(kernel, drop_in, text.replace("containerd-shim-kata-v2", "my-shim", 1))
    done = api.apply(request_for(kernel), tree=kernel)
    stays = "entry kata-vfio of containerd 2.1.9 stays: "
    (note,) = (note for note in done.plan.notes if " of containerd 2.1.9 stay" in note)
    assert note.startswith(stays)
    assert "runtime_path" in note
    left = kernel.read_text(HostPath(drop_in)) or ""
    assert "my-shim" in left
    assert "other" not in left
    (runtime,) = parse_record(kernel.read_text(RUNTIMES))
    assert [entry.name for entry in runtime.entries] == ["kata-vfio"]
    put(kernel, drop_in, left.replace("my-shim", "containerd-shim-kata-v2"))
    api.apply(request_for(kernel), tree=kernel)
    assert not kernel.exists(HostPath(drop_in))
    assert not kernel.exists(RUNTIMES)


RULE = f"/etc/udev/rules.d/05-vfiomgr-{GPU}.rules"
SEALED = (UNIT, SCRIPT, *layouts.SERVICES, *definitions.FILES, *HOOKS.values(), *timer.FILES)
"""Units and hooks, whose last line is a hash."""
WRITTEN = (*SEALED, SPECIFICATION, RESOURCE, DEVICES, timer.DIRECTORIES[0] / timer.NAME)
HANDLER = "/etc/kata-containers/vfiomgr/kata-vfio/configuration.toml"


@pytest.mark.filterwarnings("ignore:ignoring /etc/udev")
@pytest.mark.parametrize(
    ("path", "added"),
    [
        (HANDLER, 'kernel_params = "agent.log=debug"\n'),
        ("/etc/kata-containers/vfiomgr/mine/configuration.toml", "[hypervisor.qemu]\n"),
        (KATA_DROP_IN, "# my own line\n"),
        (RULE, 'SUBSYSTEM=="net", NAME="lan0"\n'),
        (RULE.replace(".0.rules", ".7.rules"), 'SUBSYSTEM=="net", NAME="lan0"\n'),
        (UNIT, "Nice=5\n"),
        (layouts.BOOT, "Nice=5\n"),
        (timer.SERVICE, "Nice=5\n"),
        (timer.TIMER, "OnCalendar=hourly\n"),
        (layouts.WATCH, "Nice=5\n"),
        (layouts.WANTED, "Wants=my.service\n"),
        (definitions.SERVICE, "Nice=5\n"),
        (definitions.INSTANCE, "Nice=5\n"),
        (definitions.WANTED, "Wants=my.service\n"),
        (definitions.RULE, 'KERNEL=="x", NAME="y"\n'),
        ("/etc/vfiomgr/vgpu.d/0000:41:00.0.json", "\n"),
        (SCRIPT, "# my own line\n"),
        ("/etc/initramfs-tools/hooks/vfiomgr", "# my own line\n"),
        ("/etc/dracut.conf.d/90-vfiomgr.conf", "# my own line\n"),
        ("/etc/mkinitcpio.conf.d/vfiomgr.conf", "# my own line\n"),
        (SPECIFICATION, "\n"),
        (RESOURCE, "not JSON\n"),
    ],
)
def test_an_edited_file_stays_is_named_and_all_else_is_removed(
    tmp_path: Path, path: str, added: str
) -> None:
    kernel = everything(tmp_path)
    text = (kernel.read_text(HostPath(path)) or "") + added
    put(kernel, path, text)
    done = api.apply(request_for(kernel), tree=kernel)
    assert kernel.read_text(HostPath(path)) == text
    (note,) = (note for note in done.plan.notes if note.startswith(f"{path} stays: "))
    assert note.endswith(f"check it, then: rm {path}")
    assert (f"still binds {GPU} at boot" in note) is (path == RULE)
    others = {HANDLER, KATA_DROP_IN, RULE, "/etc/containerd/conf.d/50-vfiomgr.toml", *WRITTEN}
    assert not (others - {path}) & paths(kernel)


def test_a_specification_with_more_than_nodes_of_devices_was_edited(tmp_path: Path) -> None:
    kernel = everything(tmp_path)
    text = kernel.read_text(SPECIFICATION) or ""
    found = json.loads(text)
    found["devices"][0]["annotations"] = {"vfiomgr.io/owner": "me"}
    put(kernel, SPECIFICATION, json.dumps(found, indent=2) + "\n")
    notes = plan_of(kernel).notes
    assert any(note.startswith(f"{SPECIFICATION} stays: ") for note in notes)


def test_units_and_hooks_without_their_hash_count_as_edited_and_stay(tmp_path: Path) -> None:
    kernel = everything(tmp_path)
    for path in SEALED:
        put(kernel, path, unsealed(kernel.read_text(HostPath(path)) or ""))
    done = api.apply(request_for(kernel), tree=kernel)
    assert set(SEALED) <= paths(kernel)
    assert set(SEALED) <= {note.partition(" stays: ")[0] for note in done.plan.notes}


def test_a_unit_of_another_version_was_not_edited(tmp_path: Path) -> None:
    kernel = everything(tmp_path)
    units = (UNIT, layouts.BOOT, layouts.WATCH, definitions.SERVICE, definitions.INSTANCE)
    for path in units:
        text = kernel.read_text(path) or ""
        put(kernel, path, sealed(text.replace(" CAP_SYS_CHROOT", "")))
    api.apply(request_for(kernel), tree=kernel)
    assert not set(units) & paths(kernel)


@pytest.mark.filterwarnings("ignore:ignoring /etc/udev")
@pytest.mark.parametrize("text", [None, "# mine\n"])
def test_hooks_were_not_edited_although_a_rule_was_edited_or_removed(
    tmp_path: Path, text: str | None
) -> None:
    kernel = everything(tmp_path)
    rule = HostPath(RULE)
    kernel.remove(rule) if text is None else put(kernel, rule, text)
    api.apply(request_for(kernel), tree=kernel)
    assert not set(HOOKS.values()) & paths(kernel)


def test_files_of_others_with_names_of_vfiomgr_stay_and_are_named(tmp_path: Path) -> None:
    kernel = prepared(tmp_path)
    put(kernel, KATA_DROP_IN, "# by hand\n")
    put(kernel, FILE, "layouts: {}\n")
    put(kernel, "/etc/systemd/system/vfiomgr-node.service", "[Unit]\n")
    plan = plan_of(kernel)
    assert plan.is_empty
    named = [note.partition(" stays")[0] for note in plan.notes]
    assert named == [KATA_DROP_IN, "/etc/systemd/system/vfiomgr-node.service", FILE]


def test_the_initramfs_is_rebuilt_when_its_hook_goes(tmp_path: Path) -> None:
    kernel = prepared(tmp_path)
    api.apply(installing(), tree=kernel)
    found = request_for(kernel)
    commands = [c for s in plan_of(kernel, replaced(found)).steps for c in s.commands()]
    assert "update-initramfs -u -k all" in commands


def replaced(request: Uninstall) -> Uninstall:
    return type(request)(request.files, request.unbind, request.keep, update_initramfs=True)


def _course(tmp_path: Path) -> Course:
    """Each way in which files are removed, and a device."""

    def made(place: Path) -> tuple[FakeKernel, Uninstall]:
        kernel = prepared(place)
        for request in (Bind((GPU,), persist=True, program=PROGRAM), InstallHook(PROGRAM)):
            api.apply(request, tree=kernel)
        put(kernel, KATA_DROP_IN, KATA_TEXT)
        return kernel, request_for(kernel, unbind=True)

    return Course(tmp_path, made)


class TestEveryFault(EveryFault):
    """An uninstallation with a fault at each of its operations."""

    courses: ClassVar[Courses] = {"all": _course}


def test_what_the_hook_changed_for_guests_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfiomgr.tuning.apply.own_program", lambda: PROGRAM)
    host = TunableHost(everything(tmp_path))
    before = host.picture()
    placed = PlacedInterrupts((GPU,), (2, 3))
    tune = TuneHost(GUEST, "win", cpus=(2, 3), why="guest win has a GPU", interrupts=placed)
    api.apply(tune, tree=host.kernel)
    assert host.picture() != before
    done = api.apply(request_for(host.kernel), tree=host.kernel)
    assert "the hook's settings for guest win end now, even if it is running" in done.plan.notes
    assert host.picture() == before
    assert not host.kernel.exists(TUNED)

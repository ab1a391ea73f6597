"""A layout installed for every boot and taken back, with a fault at every operation."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.hosts import mixed
from tests.unit.devices import agent_of, with_facts
from tests.unit.engine.faults import EveryFault, Stories, told
from tests.unit.layout.test_apply import AUDIO, GPU, NIC, WHOLE, drivers, layout
from vfiomgr.errors import Refusal
from vfiomgr.host.owners import NodeOwner
from vfiomgr.layout.requests import InstallLayout, UninstallLayout
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.paths import HostPath
from vfiomgr.persistence.installed_layout import BOOT, FILE, RECORD, WANTED, WATCH
from vfiomgr.persistence.model import SWEPT, UNIT, rule_file
from vfiomgr.persistence.steps import ForgetPersisted, ImportDriverctl
from vfiomgr.users.model import DeviceUser, HostUse

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.engine.plan import Request

HOOK = HostPath("/etc/initramfs-tools/hooks/vfiomgr")
OTHER = {"select": {"address": str(NIC)}, "state": "sriov", "count": 1}
OWNED = Bind(
    (GPU,), persist=True, owner=NodeOwner("1000:1000", 1000, 1000), program="/usr/bin/vfiomgr"
)


def host(tmp_path: Path, *earlier: Request) -> FakeKernel:
    """A host with systemd, whose initramfs brings the drivers of displays."""
    kernel = mixed(tmp_path)
    kernel.sysfs.make("/run/systemd/system")
    put(kernel, HostPath("/etc/initramfs-tools/initramfs.conf"), "MODULES=dep\nFRAMEBUFFER=y\n")
    for intent in earlier:
        api.apply(intent, tree=kernel)
    return kernel


def put(kernel: FakeKernel, path: HostPath, text: str) -> None:
    kernel.sysfs.make(path.parent)
    with open(kernel.sysfs.real(path), "w") as file:
        file.write(text)


def installing(*rules: dict[str, Any], name: str = "whole", enforce: bool = False) -> InstallLayout:
    wanted = layout(*rules, name=name)
    text = f"# the layout {name}\r\n"
    return InstallLayout(wanted, text, enforce=enforce, program="/usr/bin/vfiomgr")


def etc(kernel: FakeKernel) -> dict[str, str]:
    """Every file below /etc that no process left half written."""
    found = kernel.sysfs.picture("/etc")
    return {p: t for p, t in found.items() if t != "/"}


def changed(kernel: FakeKernel, intent: Request) -> list[str]:
    """What a run writes or removes, by name."""
    steps = api.apply(intent, tree=kernel).plan.steps
    return [HostPath(step.path).name for step in steps]  # type: ignore[attr-defined]


def test_all_is_written_nothing_moves_and_all_is_taken_back(tmp_path: Path) -> None:
    kernel = host(tmp_path)
    before, at_first = etc(kernel), drivers(kernel, GPU, AUDIO)
    outcome = api.apply(installing(), tree=kernel)
    assert any("no device is changed now; the host differs" in note for note in outcome.plan.notes)
    assert set(etc(kernel)) - set(before) == {
        FILE,
        RECORD,
        BOOT,
        WANTED,
        UNIT,
        HOOK,
        rule_file(GPU),
        rule_file(AUDIO),
    }
    assert kernel.read_text(FILE) == "# the layout whole\r\n"
    assert os.stat(kernel.locate(FILE)).st_mode & 0o777 == 0o644
    assert "--layout whole" in (kernel.read_text(BOOT) or "")
    assert "chown 64055:" in (kernel.read_text(rule_file(GPU)) or "")
    assert kernel.exists(SWEPT), "the service that is started now moves nothing"
    assert drivers(kernel, GPU, AUDIO) == at_first
    taken = api.apply(UninstallLayout(), tree=kernel)
    assert any("devices are not changed" in note for note in taken.plan.notes)
    assert etc(kernel) == before
    again = api.apply(UninstallLayout(), tree=kernel)
    assert (again.is_changed, again.plan.already) == (False, ("no layout is installed",))


def test_a_second_time_changes_the_difference_alone(tmp_path: Path) -> None:
    kernel = host(tmp_path, installing())
    again = api.apply(installing(), tree=kernel)
    assert not again.is_changed
    assert again.plan.already == ("the layout whole is already installed",)
    assert changed(kernel, installing(enforce=True)) == [WATCH.name, WANTED.name]
    assert set(changed(kernel, installing(*WHOLE[1:], name="rest"))) == {
        RECORD.name,
        FILE.name,
        rule_file(GPU).name,
        rule_file(AUDIO).name,
        UNIT.name,
        HOOK.name,
        BOOT.name,
        WATCH.name,
        WANTED.name,
    }
    assert kernel.read_text(rule_file(GPU)) is None


def test_an_owner_that_a_layout_no_longer_names_is_forgotten(tmp_path: Path) -> None:
    kernel = host(tmp_path, installing())
    plain = {key: value for key, value in WHOLE[0].items() if key != "owner"}
    api.apply(installing(plain), tree=kernel)
    assert [binding.owner for binding in api.scan(kernel).files.bindings] == [None, None]


def test_rules_of_bind_stay_whose_they_are(tmp_path: Path) -> None:
    kernel = host(tmp_path, OWNED)
    before = etc(kernel)
    api.apply(installing(), tree=kernel)
    owners = {binding.owner.uid for binding in api.scan(kernel).files.bindings if binding.owner}
    assert owners == {64055}
    api.apply(UninstallLayout(), tree=kernel)
    assert etc(kernel) == before, "the rules of bind are there again"
    plain = {key: value for key, value in WHOLE[0].items() if key != "owner"}
    assert rule_file(GPU).name not in changed(kernel, installing(plain)), "the same rule: not ours"
    api.apply(UninstallLayout(), tree=kernel)
    assert etc(kernel) == before


def test_a_rule_that_is_changed_or_removed_since_is_left_so(tmp_path: Path) -> None:
    kernel = host(tmp_path, installing(), OWNED, ForgetPersisted((AUDIO,)))
    kept = kernel.read_text(rule_file(GPU))
    outcome = api.apply(UninstallLayout(), tree=kernel)
    assert kernel.read_text(rule_file(GPU)) == kept
    assert kernel.read_text(rule_file(AUDIO)) is None
    assert kernel.exists(UNIT)
    assert any(
        f"is kept; remove it with: vfiomgr unbind {GPU} --forget-only" in note
        for note in outcome.plan.notes
    )


def test_what_is_pinned_gets_no_rule(tmp_path: Path) -> None:
    kernel = host(tmp_path)
    outcome = api.apply(installing({**WHOLE[0], "d3cold": False}), tree=kernel)
    assert api.scan(kernel).files.bindings == ()
    assert sum("gets no udev rule" in note for note in outcome.plan.notes) == 2


PINNED = {**WHOLE[0], "d3cold": False}
TAKEN_BACK = UninstallLayout(program="/usr/bin/vfiomgr")


def test_a_rule_of_bind_is_put_aside_for_what_a_layout_pins(tmp_path: Path) -> None:
    kernel = host(tmp_path, OWNED)
    before = etc(kernel)
    outcome = api.apply(installing(PINNED), tree=kernel)
    assert api.scan(kernel).files.bindings == (), "a rule would have it before it can be pinned"
    told = [note for note in outcome.plan.notes if "bind --persist" in note]
    assert told == [
        f"{rule_file(a)} of bind --persist is removed until vfiomgr layout uninstall"
        for a in (GPU, AUDIO)
    ]
    assert not api.apply(installing(PINNED), tree=kernel).is_changed
    api.apply(TAKEN_BACK, tree=kernel)
    assert etc(kernel) == before
    outcome = api.apply(installing(), tree=kernel)
    assert sum("is replaced by the layout's" in note for note in outcome.plan.notes) == 2


def test_a_rule_that_was_put_aside_goes_to_the_layout_that_follows(tmp_path: Path) -> None:
    kernel = host(tmp_path, OWNED)
    before = etc(kernel)
    for rules in (PINNED, WHOLE[0], PINNED, OTHER):
        api.apply(installing(rules), tree=kernel)
    assert {binding.owner.uid for binding in api.scan(kernel).files.bindings if binding.owner} == {
        1000
    }
    api.apply(TAKEN_BACK, tree=kernel)
    assert etc(kernel) == before


def test_what_an_installed_layout_pins_gets_no_rule_of_bind(tmp_path: Path) -> None:
    kernel = host(tmp_path, installing(PINNED))
    before = etc(kernel)
    with pytest.raises(Refusal) as caught:
        api.apply(OWNED, tree=kernel)
    assert "the installed layout whole sets reset_method or d3cold" in caught.value.message
    assert "leave out --persist" in caught.value.hint
    assert "vfiomgr layout uninstall" in caught.value.hint
    assert etc(kernel) == before
    api.apply(replace(OWNED, persist=False), tree=kernel)
    told = "; ".join(api.apply(Unbind((GPU,)), tree=kernel).plan.notes)
    assert f"the installed layout whole binds {GPU}, {AUDIO} again" in told
    api.apply(TAKEN_BACK, tree=kernel)
    api.apply(OWNED, tree=kernel)
    assert len(api.scan(kernel).files.bindings) == 2


def test_who_wins_over_a_rule_of_a_layout_is_told(tmp_path: Path) -> None:
    kernel = host(tmp_path, installing())
    same = NodeOwner("64055:108", 64055, 108)
    same_plan = api.plan(api.scan(kernel, with_users=True), replace(OWNED, owner=same))
    assert not any("layout" in note for note in same_plan.notes)
    told = "; ".join(api.plan(api.scan(kernel, with_users=True), OWNED).notes)
    assert f"replacing the rule of the layout whole for {GPU}" in told
    assert "takes precedence" in told


def test_rules_of_a_layout_are_its_own_to_take_back(tmp_path: Path) -> None:
    kernel = host(tmp_path, installing())
    before = etc(kernel)
    outcome = api.apply(ForgetPersisted(every=True), tree=kernel)
    assert (outcome.is_changed, etc(kernel)) == (False, before)
    (told,) = outcome.plan.notes
    assert told.startswith(f"keeping rules of the layout whole ({GPU}, {AUDIO}); ")
    told = "; ".join(api.apply(ForgetPersisted((GPU,)), tree=kernel).plan.notes)
    assert f"binds {GPU} again at the next boot; to prevent it: vfiomgr layout uninstall" in told


@pytest.mark.parametrize("rules", [WHOLE[0], PINNED], ids=["a rule", "no rule"])
def test_an_import_leaves_what_a_layout_has(tmp_path: Path, rules: dict[str, Any]) -> None:
    kernel = host(tmp_path)
    put(kernel, HostPath(f"/etc/driverctl.d/{GPU}"), "vfio-pci\n")
    put(kernel, HostPath(f"/etc/driverctl.d/{NIC}"), "vfio-pci\n")
    installed = "; ".join(api.apply(installing(rules), tree=kernel).plan.notes)
    if rules is PINNED:
        assert f"driverctl unset-override {GPU}" in installed
    kept = kernel.read_text(rule_file(GPU))
    outcome = api.apply(ImportDriverctl(program="/usr/bin/vfiomgr"), tree=kernel)
    assert f"not importing {GPU}: the installed layout whole" in "; ".join(outcome.plan.notes)
    assert kernel.read_text(rule_file(GPU)) == kept
    assert kernel.exists(rule_file(NIC))
    assert kernel.exists(HostPath(f"/etc/driverctl.d/{GPU}"))


def test_an_import_starts_no_service_that_moves_what_is_there(tmp_path: Path) -> None:
    kernel = host(tmp_path)
    put(kernel, HostPath(f"/etc/driverctl.d/{NIC}"), "vfio-pci\n")
    steps = api.apply(ImportDriverctl(program="/usr/bin/vfiomgr"), tree=kernel).plan.steps
    paths = [step.path for step in steps]  # type: ignore[attr-defined]
    assert paths.index(SWEPT) < paths.index(UNIT)


def test_a_layout_that_the_host_cannot_have_is_not_installed(tmp_path: Path) -> None:
    kernel = host(tmp_path)
    before = etc(kernel)
    with pytest.raises(Refusal, match="at least 8 devices"):
        api.apply(installing({**WHOLE[0], "at_least": 8}), tree=kernel)
    with pytest.raises(Refusal, match="at most 4 virtual functions"):
        api.apply(installing({**OTHER, "count": 9}), tree=kernel)
    assert etc(kernel) == before


def test_a_layout_is_installed_while_its_devices_are_in_use(tmp_path: Path) -> None:
    kernel = host(tmp_path)
    kernel.sysfs.make("/proc/812/fd")
    kernel.sysfs.link_absolute("/proc/812/fd/7", "/dev/nvidiactl")
    wanted = installing(WHOLE[0])
    outcome = api.apply(wanted, tree=kernel)
    assert any("is in use by" in note for note in outcome.plan.notes)
    assert "no device is changed now; the layout is applied at the next boot" in outcome.plan.notes
    assert not [one for one in kernel.operations if one.path.startswith("/sys")]
    api.apply(UninstallLayout(), tree=kernel)
    allowed = replace(wanted.apply, allow=frozenset({"in-use", "host-peripheral"}))
    api.apply(replace(wanted, apply=allowed), tree=kernel)
    text = kernel.read_text(BOOT) or ""
    assert "--layout whole --allow host-peripheral\n" in text


OPEN = DeviceUser("/dev/nvidiactl", 812, "python3")
GUEST = DeviceUser("/dev/vfio/10", 813, "qemu-system-x86")
BACK = {"select": {"address": [str(GPU), str(AUDIO)]}, "state": "host"}
AT_BOOT = "apply the layout at the next boot: vfiomgr layout install FILE"


@pytest.mark.parametrize(
    ("rules", "user", "rule"),
    [
        ((), OPEN, "in-use"),
        (({**WHOLE[0], "d3cold": False},), OPEN, "in-use"),
        ((BACK,), GUEST, "held-by-guest"),
    ],
)
def test_a_layout_refused_for_users_that_a_boot_ends_can_be_applied_then(
    tmp_path: Path, rules: tuple[dict[str, Any], ...], user: DeviceUser, rule: str
) -> None:
    kernel = host(tmp_path, *((Bind((GPU,)),) if user == GUEST else ()))
    seen = with_facts(api.scan(kernel, with_users=True), users=(user,))
    request = installing(*rules).apply
    with pytest.raises(Refusal) as caught:
        api.plan(seen, request)
    assert {one.rule for one in caught.value.diagnostics} == {rule}
    assert all(AT_BOOT in one.remedy for one in caught.value.diagnostics)
    assert api.plan(seen, installing(*rules)).steps


def test_a_layout_takes_a_peripheral_of_the_host_by_its_own_consent(tmp_path: Path) -> None:
    keyboard = HostUse(GPU, "keyboard", "Board, the only keyboard")
    seen = with_facts(api.scan(host(tmp_path), with_users=True), host_uses=(keyboard,))
    with pytest.raises(Refusal, match="has the host's keyboard") as caught:
        api.plan(seen, installing().apply)
    assert "allow: host-peripheral" in str(caught.value.remedy)
    allowing = {**WHOLE[0], "allow": "host-peripheral"}
    assert api.plan(seen, installing(allowing).apply).steps
    used = with_facts(seen, users=(OPEN,))
    with pytest.raises(Refusal, match="is in use by"):
        api.plan(used, installing(allowing).apply)


def test_an_installed_layout_is_not_named_as_one_to_install(tmp_path: Path) -> None:
    seen = api.scan(host(tmp_path, installing()), with_users=True)
    with pytest.raises(Refusal, match="is in use by: python3") as caught:
        api.plan(with_facts(seen, users=(OPEN,)), installing().apply)
    assert AT_BOOT not in str(caught.value.remedy)


def test_the_next_boot_is_no_remedy_if_it_does_not_end_another_reason(tmp_path: Path) -> None:
    seen = api.scan(host(tmp_path, Bind((GPU,))), with_users=True)
    pods = agent_of(str(AUDIO), pod="ml/train-0/c0")
    with pytest.raises(Refusal) as caught:
        api.plan(with_facts(seen, users=(GUEST,), agent=pods), installing(BACK).apply)
    assert {one.rule for one in caught.value.diagnostics} == {"held-by-guest", "held-by-pod"}
    assert AT_BOOT not in caught.value.message + str(caught.value.remedy)


def test_without_systemd_it_is_said_what_to_run(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    outcome = api.apply(installing(enforce=True), tree=kernel)
    told = "; ".join(outcome.plan.notes)
    assert f"run `vfiomgr apply {FILE} --layout whole` at boot" in told
    assert "keep `vfiomgr layout watch --enforce` running" in told
    assert not kernel.exists(BOOT)


def test_a_module_of_python_cannot_be_run_by_a_unit(tmp_path: Path) -> None:
    kernel = host(tmp_path)
    with pytest.raises(Refusal, match="not an installed command"):
        api.apply(replace(installing(), program=None), tree=kernel)


def test_a_record_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    kernel = host(tmp_path, installing())
    put(kernel, RECORD, "{}\n")
    outcome = api.apply(UninstallLayout(), tree=kernel)
    assert any("list them with vfiomgr list --persistent" in note for note in outcome.plan.notes)
    assert not kernel.exists(FILE)
    assert kernel.exists(rule_file(GPU))


def test_systemd_is_told_and_a_watch_is_ended_or_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = host(tmp_path, installing(OTHER, enforce=True))
    asked: list[str] = []
    monkeypatch.setattr(type(kernel), "is_machine", True)
    monkeypatch.setattr(kernel, "call", lambda *words, **_: asked.append(" ".join(words)))
    api.apply(installing(OTHER, name="other", enforce=True), tree=kernel)
    assert asked == [
        "systemctl daemon-reload",
        "systemctl daemon-reload",
        f"systemctl --no-block try-restart {WATCH.name}",
    ]
    asked.clear()
    api.apply(UninstallLayout(), tree=kernel)
    assert f"systemctl --no-block stop {WATCH.name}" in asked
    assert not any("start" in call.split() for call in asked), "nothing begins now"


# ---- faults

STORIES: Stories = {
    "install": ((OWNED,), installing(enforce=True)),
    "exchange": ((installing(enforce=True),), installing(OTHER, name="other")),
    "uninstall": ((OWNED, installing()), UninstallLayout()),
    "put aside": ((OWNED,), installing({**WHOLE[0], "d3cold": False})),
    "put back": (
        (OWNED, installing({**WHOLE[0], "d3cold": False})),
        UninstallLayout(program="/usr/bin/vfiomgr"),
    ),
}


class TestFaults(EveryFault):
    """A failure, and a death, at each operation."""

    courses = told(STORIES, host)

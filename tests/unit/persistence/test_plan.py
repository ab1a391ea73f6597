from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.documents.text import TextFile
from vfiomgr.engine.registry import plan
from vfiomgr.host.owners import ROOT_ONLY, NodeAccess, NodeFact, NodeOwner
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.paths import vfio_group_node
from vfiomgr.persistence.model import (
    HOOKS,
    UNIT,
    Initramfs,
    PersistedBinding,
    render_rule,
    render_unit,
    rule_file,
)
from vfiomgr.persistence.steps import (
    ForgetPersisted,
    ImportDriverctl,
    RebuildInitramfs,
    ReplaceFile,
    SetNodeAccess,
)

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Request, Step
    from vfiomgr.snapshot.model import HostSnapshot

GPU = pci_device()
BOUND = replace(GPU, driver="vfio-pci", driver_override="vfio-pci", driver_module="vfio_pci")
OWNER = NodeOwner("qemu", 64055)
BINDING = PersistedBinding(GPU.identity, "vfio-pci", "vfio_pci")
RULE = TextFile(rule_file(GPU.address), render_rule(BINDING))
BIND = Bind((GPU.address,), persist=True)
GRAPHICS = Initramfs("initramfs-tools", (), ("03",))
HOOK = HOOKS["initramfs-tools"]


def host_with(*files: TextFile, bound: bool = True, **facts: Any) -> HostSnapshot:
    facts = {"has_systemd": True} | facts
    return with_facts(host_of(BOUND if bound else GPU), files=files, **facts)


def kept(host: HostSnapshot, intent: Request) -> list[Step]:
    kinds = ReplaceFile | RebuildInitramfs | SetNodeAccess
    return [step for step in plan(host, intent).steps if isinstance(step, kinds)]


def test_a_rule_is_written_after_the_function_has_moved() -> None:
    steps = plan(host_with(bound=False), BIND).steps
    assert steps[-1] == ReplaceFile(RULE.path, None, RULE.text)
    assert len(steps) > 1


def test_the_text_of_a_file_cannot_end_its_here_document() -> None:
    step = ReplaceFile("/etc/a b", None, "END\nreboot\nEND_\n")
    assert step.commands() == (
        "cat > '/etc/a b' <<'END__'",
        *("END", "reboot", "END_", "END__"),
        "chmod 0644 '/etc/a b'",
    )
    assert step.inverse().commands() == ("rm '/etc/a b'",)


def test_what_is_bound_already_is_persisted_too_and_a_second_run_does_nothing() -> None:
    assert kept(host_with(), BIND) == [ReplaceFile(RULE.path, None, RULE.text)]
    made = plan(host_with(RULE), BIND)
    assert made.is_empty
    assert f"{GPU} is already persisted" in made.already


def test_without_persist_nothing_is_written() -> None:
    assert kept(host_with(bound=False), replace(BIND, persist=False)) == []


def test_one_writer_of_rules_at_a_time() -> None:
    assert plan(host_with(), BIND).locks == ("group-4", "persistence")


def test_the_rule_of_another_device_is_replaced_and_told() -> None:
    other = PersistedBinding(replace(GPU.identity, device_id="2222"), "vfio-pci", "vfio_pci", OWNER)
    old = TextFile(RULE.path, render_rule(other))
    made = plan(host_with(old), BIND)
    assert made.steps == (ReplaceFile(RULE.path, old.text, RULE.text),)
    assert "replacing the rule of a different device: 0000:04:00.0 [10de:2222 10de:157e]" in (
        made.notes
    )


def test_a_rule_keeps_its_owner_until_another_is_named() -> None:
    owned = TextFile(RULE.path, render_rule(replace(BINDING, owner=OWNER)))
    assert plan(host_with(owned), BIND).is_empty
    (_, changed) = kept(
        host_with(owned, nodes=(NodeFact("/dev/vfio/4", OWNER.access),)),
        replace(BIND, owner=NodeOwner("other", 7)),
    )
    assert changed == ReplaceFile(
        RULE.path, owned.text, render_rule(replace(BINDING, owner=NodeOwner("other", 7)))
    )


def test_the_service_is_written_where_systemd_runs_it() -> None:
    program = "/usr/bin/vfiomgr"
    unit = ReplaceFile(UNIT, None, render_unit(program))
    assert unit in kept(host_with(), replace(BIND, program=program))
    bare = plan(host_with(has_systemd=False), replace(BIND, program=program))
    assert unit not in bare.steps
    assert "systemd not found" in " ".join(bare.notes)


def test_a_driver_that_is_built_in_is_told() -> None:
    built_in = replace(GPU, driver="simpledrm", driver_module=None)
    made = plan(with_facts(host_of(built_in), has_systemd=True), BIND)
    assert "module of simpledrm not found: if it is built into the kernel" in " ".join(made.notes)


def test_an_owner_gets_the_node_and_is_told_how_long() -> None:
    made = plan(host_with(bound=False), replace(BIND, persist=False, owner=OWNER))
    assert made.steps[-1] == SetNodeAccess(GPU.identity, 4, ROOT_ONLY, OWNER.access)
    assert "keep it with --persist" in made.notes[-1]


def test_a_node_that_belongs_to_somebody_else_is_given_over_and_back() -> None:
    theirs = NodeAccess(7, 7, 0o660)
    host = host_with(nodes=(NodeFact(vfio_group_node(4), theirs),))
    (step,) = kept(host, replace(BIND, persist=False, owner=OWNER))
    assert isinstance(step, SetNodeAccess)
    assert (step.before, step.after) == (theirs, OWNER.access)
    assert step.inverse().after == theirs
    own = host_with(nodes=(NodeFact(vfio_group_node(4), OWNER.access),))
    assert plan(own, replace(BIND, persist=False, owner=OWNER)).is_empty


def test_unbind_tells_of_the_rule_or_forgets_it() -> None:
    told = plan(host_with(RULE), Unbind((GPU.address,)))
    assert "vfiomgr unbind 0000:04:00.0 --forget-only" in told.notes[-1]
    assert kept(host_with(RULE), Unbind((GPU.address,))) == []
    steps = kept(host_with(RULE), Unbind((GPU.address,), forget=True))
    assert steps == [ReplaceFile(RULE.path, RULE.text, None)]


def test_the_last_rule_takes_hook_and_service_along() -> None:
    hook, unit = TextFile(HOOK, "hook"), TextFile(UNIT, "unit")
    host = host_with(RULE, hook, unit, initramfs=GRAPHICS)
    made = plan(host, ForgetPersisted(every=True))
    assert made.steps == (
        ReplaceFile(RULE.path, RULE.text, None),
        ReplaceFile(UNIT, "unit", None),
        ReplaceFile(HOOK, "hook", None, 0o755),
    )
    assert "stays on vfio-pci until vfiomgr unbind" in made.notes[0]
    assert "rebuild it" in made.notes[-1]


def test_forgetting_what_is_not_there_does_nothing() -> None:
    assert plan(host_with(), ForgetPersisted(every=True)).already == ("no persistent bindings",)
    made = plan(host_with(), ForgetPersisted((GPU.address,)))
    assert made.already == ("no rule for 0000:04:00.0",)
    assert made.is_empty


def test_a_rule_that_cannot_be_read_can_still_be_removed() -> None:
    broken = TextFile(RULE.path, "nothing")
    made = plan(host_with(broken), ForgetPersisted((GPU.address,)))
    assert made.steps == (ReplaceFile(RULE.path, "nothing", None),)


def driverctl(name: str, driver: str) -> TextFile:
    return TextFile(f"/etc/driverctl.d/{name}", f"{driver}\n")


def test_driverctl_is_noted_and_taken_over_where_it_is_for_vfio() -> None:
    ours = driverctl("0000:04:00.0", "vfio-pci")
    absent, other = driverctl("0000:09:00.0", "vfio-pci"), driverctl("0000:05:00.0", "nouveau")
    second = replace(pci_device("0000:05:00.0"), iommu_group=5)
    host = with_facts(host_of(BOUND, second), files=(ours, absent, other), has_systemd=True)
    assert "vfiomgr bind --persist --driverctl" in plan(host, replace(BIND, persist=False)).notes[0]
    made = plan(host, ImportDriverctl())
    assert made.steps == (
        ReplaceFile(RULE.path, None, RULE.text),
        ReplaceFile(ours.path, ours.text, None),
    )
    why = "device not found, so its identity cannot be recorded"
    assert made.notes == (
        "not importing 0000:05:00.0: nouveau is not a VFIO driver",
        f"not importing 0000:09:00.0: {why}",
    )
    left = with_facts(host, files=(absent, other))
    assert plan(left, ImportDriverctl()).is_empty

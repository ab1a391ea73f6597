from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from tests.unit.defined_vgpus import (
    AUTO,
    BROKEN,
    DEFINITION,
    DOCUMENT,
    FIRST,
    GPU,
    OTHER,
    UUID,
    definition_text,
    document,
    host_with,
    vendor_host,
    with_active,
)
from tests.unit.devices import with_facts
from tests.unit.vgpus import a40_type, vgpu_host
from vfiomgr.definitions.model import (
    INSTANCE,
    RULE,
    SERVICE,
    WANTED,
    FunctionDefinition,
    MdevctlRule,
    VgpuAttribute,
    definition_file,
    gpu_file,
    parse_gpu_definition,
    render_definition,
    render_gpu_definition,
)
from vfiomgr.definitions.plan import (
    render_instance,
    render_registration_rule,
    render_service,
    render_wanted,
)
from vfiomgr.definitions.requests import DefineVgpu, UndefineVgpu
from vfiomgr.documents.text import TextFile
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal, UnknownDevice, UsageError
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.installed_layout import BOOT
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.vgpu.model import GpuMode

PROGRAM = "/usr/bin/vfiomgr"
DEFINE = DefineVgpu(UUID, "mtty", "mtty-1", program=PROGRAM)
STARTERS = [
    ReplaceFile(SERVICE, None, render_service(PROGRAM)),
    ReplaceFile(INSTANCE, None, render_instance(PROGRAM)),
    ReplaceFile(WANTED, None, render_wanted()),
    ReplaceFile(RULE, None, render_registration_rule()),
]
WRITTEN = tuple(TextFile(step.path, step.after or "") for step in STARTERS)


def test_a_definition_is_written_as_mdevctl_would() -> None:
    made = plan(host_with(), DEFINE)
    assert made.steps == (ReplaceFile(DEFINITION.path, None, render_definition(DEFINITION)),)
    assert made.locks == ("vgpu-definitions", f"vgpu-{UUID}")
    again = plan(host_with(definition_text(DEFINITION)), DEFINE)
    assert again.is_empty
    assert again.already == (f"vGPU {UUID} (mtty-1 on mtty) is already defined",)


def test_parent_and_type_are_those_of_the_active_one() -> None:
    host = with_active(host_with(attributes=(VgpuAttribute(UUID, "nvidia/vgpu_params", "a=1"),)))
    (step,) = plan(host, DefineVgpu(UUID)).steps
    wanted = replace(DEFINITION, attributes=(("nvidia/vgpu_params", "a=1"),))
    assert step == ReplaceFile(DEFINITION.path, None, render_definition(wanted))


def test_what_is_not_told_stays_as_it_is_defined_with_keys_that_nobody_knows() -> None:
    text = '{"vm": "win", "mdev_type": "mtty-1", "start": "manual", "attrs": [{"a": "1"}]}'
    (step,) = plan(
        host_with(definition_text(DEFINITION, text)), DefineVgpu(UUID, type="mtty-2")
    ).steps
    assert isinstance(step, ReplaceFile)
    assert step.before == text
    assert json.loads(step.after or "") == json.loads(text) | {"mdev_type": "mtty-2"}
    (step,) = plan(
        host_with(definition_text(DEFINITION, text)),
        DefineVgpu(UUID, attributes=(), autostart=True),
    ).steps
    assert isinstance(step, ReplaceFile)
    assert json.loads(step.after or "") == json.loads(text) | {"start": "auto", "attrs": []}


def test_types_go_by_their_names_where_the_parent_is_there() -> None:
    made = plan(host_with(), replace(DEFINE, type="single port serial"))
    assert made.steps[0] == plan(host_with(), DEFINE).steps[0]
    with pytest.raises(
        UnknownDevice, match=r"no vGPU type mtty-3; available: mtty-1 \(.*\), mtty-2"
    ):
        plan(host_with(), replace(DEFINE, type="mtty-3"))


def test_a_parent_may_still_come() -> None:
    made = plan(host_with(), DefineVgpu(UUID, "04:00.0", "nvidia-1"))
    assert made.summary == f"define vGPU {UUID} (nvidia-1 on 0000:04:00.0)"
    assert made.notes == ("0000:04:00.0 does not support vGPUs now; the vGPU starts when it does",)


def test_a_gpu_whose_functions_make_the_vgpus_is_no_parent() -> None:
    with pytest.raises(UsageError, match="need one of its virtual functions as parent") as caught:
        plan(vgpu_host((a40_type(2),)), DefineVgpu(UUID, "01:00.0", "A40-2Q"))
    assert caught.value.hint == "name one, e.g. --parent 0000:01:01.0"


def test_a_virtual_functions_type_goes_by_its_short_name() -> None:
    made = plan(vgpu_host((a40_type(2),)), DefineVgpu(UUID, "01:01.4", "a40-2q"))
    assert made.summary == f"define vGPU {UUID} (nvidia-5023 on 0000:01:01.4)"
    assert not made.notes


def test_virtual_functions_that_nothing_creates_at_boot_are_told() -> None:
    wanted = DefineVgpu(UUID, "01:01.4", "A40-2Q", autostart=True)
    host = vgpu_host((a40_type(2),))
    assert plan(host, wanted).notes[0].startswith("virtual functions of 0000:01:00.0 are lost")
    installed = with_facts(host, files=(TextFile(BOOT, ""),))
    assert not any("lost" in note for note in plan(installed, wanted).notes)


@pytest.mark.parametrize(
    ("intent", "words"),
    [
        (DefineVgpu(UUID), "missing options: --parent and --type"),
        (DefineVgpu(UUID, "mtty"), "missing option: --type"),
        (DefineVgpu(UUID, "..", "mtty-1"), "invalid device name"),
        (replace(DEFINE, attributes=(("../x", "1"),)), "is not a path below"),
        (replace(DEFINE, attributes=(("remove", "1"),)), "would remove the device"),
        (replace(DEFINE, attributes=(("nvidia/vgpu_params", "1"),) * 2), "is specified twice"),
        (DefineVgpu("0000:04:00.0"), "is not a virtual function"),
    ],
)
def test_what_is_no_definition_is_told(intent: DefineVgpu, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        plan(host_with(), intent)
    assert caught.value.hint


def test_one_uuid_on_several_parents_wants_the_parents_name() -> None:
    elsewhere = replace(DEFINITION, parent="other")
    host = host_with(definition_text(DEFINITION), definition_text(elsewhere))
    with pytest.raises(Refusal, match="is defined on several parents: mtty, other"):
        plan(host, DefineVgpu(UUID, autostart=True))
    (step,) = plan(host, DefineVgpu(UUID, "other", autostart=True)).steps
    assert isinstance(step, ReplaceFile)
    assert step.path == elsewhere.path


def test_a_file_that_says_nothing_is_not_overwritten_and_can_be_removed() -> None:
    host = host_with(definition_text(DEFINITION, "{"))
    with pytest.raises(Refusal, match=r"cannot use .*: not JSON") as caught:
        plan(host, DEFINE)
    assert caught.value.hint == f"correct the file, or first run: vfiomgr vgpu undefine {UUID}"
    made = plan(host, UndefineVgpu((UUID,)))
    assert made.steps == (ReplaceFile(DEFINITION.path, "{", None),)


def test_what_else_is_to_be_known_is_told() -> None:
    host = with_active(host_with(callouts=("/etc/mdevctl.d/scripts.d/callouts/ap",)), "mtty-2")
    notes = plan(host, DEFINE).notes
    assert f"it stays active as mtty-2 on mtty until: vfiomgr vgpu stop {UUID}" in notes
    assert notes[-1].startswith("vfiomgr does not run mdevctl's callouts: /etc/mdevctl.d")


# ---- who starts it


def test_mdevctls_rule_starts_mediated_devices() -> None:
    assert len(plan(host_with(), replace(DEFINE, autostart=True)).steps) == 1


@pytest.mark.parametrize("rule", [None, BROKEN])
def test_where_no_rule_of_mdevctls_works_vfiomgrs_does(rule: MdevctlRule | None) -> None:
    made = plan(host_with(mdevctl=rule), replace(DEFINE, autostart=True))
    assert list(made.steps[1:]) == STARTERS
    told = [note for note in made.notes if "/usr/sbin/mdevctl, which does not exist" in note]
    assert len(told) == (rule is BROKEN)
    whole = host_with(definition_text(AUTO), *WRITTEN, mdevctl=rule)
    assert plan(whole, replace(DEFINE, autostart=True)).is_empty


def test_what_starts_it_is_written_anew_where_vfiomgr_moved() -> None:
    host = host_with(definition_text(AUTO), *WRITTEN, mdevctl=None)
    made = plan(host, replace(DEFINE, program="/opt/vfiomgr"))
    assert [step.path for step in made.steps if isinstance(step, ReplaceFile)] == [
        SERVICE,
        INSTANCE,
    ]
    assert plan(host, replace(DEFINE, program=None)).is_empty


def test_the_last_that_starts_by_itself_takes_what_starts_it_along() -> None:
    other = replace(AUTO, uuid=OTHER)
    host = host_with(definition_text(AUTO), definition_text(other), *WRITTEN, mdevctl=None)
    assert len(plan(host, UndefineVgpu((UUID,))).steps) == 1
    gone = plan(host, UndefineVgpu((UUID, OTHER))).steps
    removed = [step.path for step in gone if isinstance(step, ReplaceFile) and step.after is None]
    assert removed == [AUTO.path, other.path, SERVICE, INSTANCE, WANTED, RULE]
    host = host_with(definition_text(AUTO), *WRITTEN, mdevctl=None)
    assert len(plan(host, DefineVgpu(UUID, autostart=False)).steps) == 5


def test_without_systemd_or_program_it_is_told_who_has_to_start_it() -> None:
    host = host_with(mdevctl=None)
    made = plan(with_facts(host, has_systemd=False), replace(DEFINE, autostart=True))
    assert len(made.steps) == 1
    assert made.notes[-1].startswith("systemd not found: run `vfiomgr vgpu restore --boot`")
    made = plan(host, replace(DEFINE, autostart=True, program=None))
    assert len(made.steps) == 1
    assert "is not installed as a command" in made.notes[-1]
    assert plan(host, DEFINE).notes == ()


# ---- forgetting


def test_undefine_takes_the_files_and_leaves_what_is_active() -> None:
    elsewhere = replace(DEFINITION, parent="other")
    host = with_active(host_with(definition_text(DEFINITION), definition_text(elsewhere)))
    made = plan(host, UndefineVgpu((UUID, OTHER)))
    assert [step.path for step in made.steps if isinstance(step, ReplaceFile)] == [
        DEFINITION.path,
        elsewhere.path,
    ]
    assert made.notes == (f"vGPU {UUID} stays active; remove it with: vfiomgr vgpu remove {UUID}",)
    assert made.already == (f"vGPU definition not found: {OTHER}",)
    (step,) = plan(host, UndefineVgpu((UUID,), "other")).steps
    assert isinstance(step, ReplaceFile)
    assert step.path == definition_file("other", UUID)


# ---- virtual functions of the vendor's own interface


HOST = vendor_host()


def test_a_virtual_function_is_kept_with_all_of_its_gpu() -> None:
    (step,) = plan(HOST, DefineVgpu("0000:41:00.4")).steps
    assert step == ReplaceFile(gpu_file(GPU.address), None, render_gpu_definition(DOCUMENT))
    assert plan(vendor_host(document(DOCUMENT)), DefineVgpu("0000:41:00.4")).is_empty


def test_a_free_one_is_defined_by_the_name_of_its_type() -> None:
    parameters = (("nvidia/vgpu_params", "frame_rate_limiter=0"),)
    intent = DefineVgpu(
        "0000:41:00.5", type="L40S-2Q", attributes=parameters, autostart=True, program=PROGRAM
    )
    mode = GpuMode(str(GPU.address), heterogeneous=True, mig=False, framebuffer=None)
    made = plan(vendor_host(document(DOCUMENT), mode=mode), intent)
    first, *starters = made.steps
    assert isinstance(first, ReplaceFile)
    written = parse_gpu_definition(TextFile(first.path, first.after or ""))
    second = FunctionDefinition(
        PciAddress.parse("0000:41:00.5"), "1148", "NVIDIA L40S-2Q", "frame_rate_limiter=0", "auto"
    )
    assert written == replace(DOCUMENT, vgpus=(FIRST, second), heterogeneous=True)
    assert starters == [STARTERS[0], STARTERS[2]]
    assert made.summary == "define vGPU 0000:41:00.5 (NVIDIA L40S-2Q)"


@pytest.mark.parametrize(
    ("intent", "words"),
    [
        (DefineVgpu("0000:41:00.5"), "is not an active vGPU"),
        (DefineVgpu("0000:41:00.5", type="L40S-99Q"), "has no vGPU type L40S-99Q"),
        (DefineVgpu("0000:41:00.4", attributes=(("x", "1"),)), "support only nvidia/vgpu_params"),
        (DefineVgpu("0000:41:00.0"), "is not a virtual function"),
    ],
)
def test_what_no_virtual_function_can_be_is_told(intent: DefineVgpu, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan(HOST, intent)


def test_the_document_of_another_gpu_or_one_that_says_nothing_stays() -> None:
    other = replace(DOCUMENT, gpu=replace(GPU.identity, device_id="2222"))
    with pytest.raises(Refusal, match="is for another device") as caught:
        plan(vendor_host(document(other)), DefineVgpu("0000:41:00.4"))
    assert "vfiomgr vgpu undefine 0000:41:00.4" in caught.value.hint
    broken = TextFile(DOCUMENT.path, "{}")
    with pytest.raises(Refusal, match="cannot use "):
        plan(vendor_host(broken), DefineVgpu("0000:41:00.4"))
    mode = GpuMode(str(GPU.address), heterogeneous=None, mig=True, framebuffer=None)
    with pytest.raises(Refusal, match="is in MIG mode"):
        plan(vendor_host(mode=mode), DefineVgpu("0000:41:00.4"))


def test_a_virtual_function_is_forgotten_and_the_last_takes_the_document_along() -> None:
    second = replace(FIRST, address=PciAddress.parse("0000:41:00.5"), start="auto")
    both = replace(DOCUMENT, vgpus=(FIRST, second))
    host = vendor_host(document(both), WRITTEN[0], WRITTEN[2])
    (step,) = plan(host, UndefineVgpu(("0000:41:00.4",))).steps
    left = replace(DOCUMENT, vgpus=(second,))
    assert step == ReplaceFile(both.path, document(both).text, document(left).text)
    gone = plan(host, UndefineVgpu(("0000:41:00.4", "0000:41:00.5")))
    assert gone.steps[0] == ReplaceFile(both.path, document(both).text, None)
    assert [s.path for s in gone.steps if isinstance(s, ReplaceFile)][1:] == [SERVICE, WANTED]
    assert gone.already == ()

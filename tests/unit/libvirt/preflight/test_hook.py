"""Domains whose devices libvirt's hook binds: what it would do is no mistake of theirs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.devices import with_facts
from tests.unit.libvirt.preflight.situations import (
    BOTH,
    GPU,
    GPU_ELEMENT,
    MDEV_ELEMENT,
    SOUND,
    UUID,
    found,
    function,
    host,
    judge,
    managed_element,
    troubles,
    xml,
)
from vfiomgr.definitions.model import DefinitionFacts, VgpuDefinition, render_definition
from vfiomgr.documents.text import TextFile
from vfiomgr.libvirt.model import NAMESPACE
from vfiomgr.paths import SCRIPT

MARK = f"<metadata><v:devices xmlns:v='{NAMESPACE}' bind='yes'/></metadata>"
INSTALLED = (TextFile(str(SCRIPT), "#!/bin/sh\n"),)
WAITING = (replace(GPU, driver="nouveau"), replace(SOUND, driver="snd_hda_intel"))


def marked(devices: str = BOTH) -> str:
    return xml(devices).replace("<vcpu>", f"{MARK}<vcpu>")


def test_what_the_hook_binds_blocks_no_start() -> None:
    there = host(*WAITING, files=INSTALLED)
    assert troubles(judge(marked(), there)) == []
    assert troubles(judge(xml(), there)) == ["on-host-driver"]
    no = marked().replace("bind='yes'", "bind='no'")
    assert "on-host-driver" in troubles(judge(no, there))


def test_a_hook_that_is_not_installed_is_what_blocks() -> None:
    report = judge(marked(), host(*WAITING))
    assert troubles(report) == ["hook-not-installed"]
    finding = found(report, "hook-not-installed")
    assert finding is not None
    assert "vfiomgr libvirt hook install" in finding.remedy
    assert "0000:01:00.0, 0000:01:00.1" in finding.summary
    assert troubles(judge(marked(), host())) == [], "nothing waits for it"


def test_what_the_hook_would_refuse_is_told_before() -> None:
    display = replace(GPU, driver="nouveau", is_boot_display=True)
    report = judge(marked(), host(display, WAITING[1], files=INSTALLED))
    finding = found(report, "hook-refused")
    assert finding is not None
    assert troubles(report) == ["hook-refused"]
    assert finding.remedy.endswith(
        f"run before the start: vfiomgr bind {GPU.address} --allow boot-display"
    )
    stranger = function("0000:03:00.0", driver="e1000e", iommu_group=GPU.iommu_group)
    report = judge(marked(), host(*WAITING, stranger, files=INSTALLED))
    assert troubles(report) == ["hook-refused"]
    finding = found(report, "hook-refused")
    assert finding is not None
    assert f"run before the start: vfiomgr bind {GPU.address} --with-group, or" in finding.remedy
    assert "--allow" not in finding.remedy


def test_the_hook_takes_nothing_that_libvirt_manages() -> None:
    stays = managed_element(GPU) + managed_element(SOUND)
    assert troubles(judge(marked(stays), host(*WAITING))) == troubles(
        judge(xml(stays), host(*WAITING))
    )


@pytest.mark.parametrize("is_defined", [True, False])
def test_the_hook_starts_vgpus_that_are_defined(*, is_defined: bool) -> None:
    definition = VgpuDefinition("0000:42:00.4", UUID, "nvidia-558")
    file = TextFile(str(definition.path), render_definition(definition))
    there = host(vgpus=(), files=INSTALLED)
    facts = with_facts(there, definitions=DefinitionFacts(files=(file,) if is_defined else ()))
    expected = [] if is_defined else ["vgpu-missing"]
    assert troubles(judge(marked(MDEV_ELEMENT), facts)) == expected


def test_the_group_that_the_hook_binds_needs_no_other_bind() -> None:
    """The GPU is bound, its sound in the same group is not: bind takes the slot whole."""
    there = host(WAITING[1], files=INSTALLED)
    only_gpu = xml(GPU_ELEMENT).replace("<vcpu>", f"{MARK}<vcpu>")
    assert troubles(judge(only_gpu, there)) == []
    assert troubles(judge(xml(GPU_ELEMENT), there)) == ["group-not-viable"]

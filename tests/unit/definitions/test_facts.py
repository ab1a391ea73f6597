from __future__ import annotations

from pathlib import Path

import pytest

from tests import api
from tests.fakes.hosts import workstation
from tests.unit.definitions.test_gpu_definition import DEFINITION
from vfiomgr.definitions.facts import read_definitions
from vfiomgr.definitions.model import (
    RULE,
    DefinitionFacts,
    MdevctlRule,
    VgpuAttribute,
    gpu_file,
    render_gpu_definition,
)
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import MDEV_DEVICES
from vfiomgr.snapshot.document import read_snapshot, write_snapshot
from vfiomgr.vgpu.steps import CreateVgpu

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
OTHER = "3deab9a4-200a-4c54-99b1-5eb0722d1d81"
TEXT = '{"mdev_type":"mbochs-small","start":"auto","attrs":[{"power/control":"on"}]}'
STARTER = (
    'ACTION=="change", ENV{MDEV_STATE}=="registered", TEST=="/etc/mdevctl.d/$kernel", '
    "RUN+=\"/bin/sh -c '{ /usr/sbin/mdevctl start-parent-mdevs %k 2>&3 | logger; } 3>&1'\"\n"
)


def put(root: Path, path: str, text: str) -> None:
    place = root / path.removeprefix("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def read(root: Path) -> DefinitionFacts:
    return read_definitions(HostTree(root), ())


def test_a_host_without_definitions_has_none(tmp_path: Path) -> None:
    assert read(tmp_path) == DefinitionFacts()


def test_both_places_are_read_and_nothing_else(tmp_path: Path) -> None:
    put(tmp_path, f"/etc/mdevctl.d/mbochs/{UUID}", TEXT)
    put(tmp_path, f"/etc/mdevctl.d/mbochs/.{UUID}.123", "half wri")
    put(tmp_path, "/etc/mdevctl.d/scripts.d/callouts/ap.sh", "#!/bin/sh\n")
    put(tmp_path, "/usr/lib/mdevctl/scripts.d/callouts/ccw", "#!/bin/sh\n")
    put(tmp_path, gpu_file(DEFINITION.gpu.address), render_gpu_definition(DEFINITION))
    put(tmp_path, RULE, "# a rule\n")
    (tmp_path / "etc/mdevctl.d/mbochs" / OTHER).mkdir()
    facts = read(tmp_path)
    assert [(d.parent, d.uuid) for d in facts.vgpus] == [("mbochs", UUID)]
    assert facts.gpus == (DEFINITION,)
    assert facts.problems == ()
    assert facts.file(RULE) == "# a rule\n"
    assert [name.rpartition("/")[2] for name in facts.callouts] == ["ap.sh", "ccw"]


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    put(tmp_path, f"/etc/mdevctl.d/mbochs/{UUID}", TEXT)
    directory = tmp_path / "etc/mdevctl.d/mbochs"
    (directory / OTHER).symlink_to("nowhere")
    (tmp_path / "etc/mdevctl.d/far").mkdir()
    (tmp_path / "etc/mdevctl.d/far" / OTHER).symlink_to("/etc/hostname")
    (directory / "README").write_bytes(b"\xff")
    facts = read(tmp_path)
    assert len(facts.vgpus) == 1
    told = {problem.path: problem.reason for problem in facts.problems}
    assert told == {
        f"/etc/mdevctl.d/mbochs/{OTHER}": "cannot be read",
        f"/etc/mdevctl.d/far/{OTHER}": "cannot be read",
        "/etc/mdevctl.d/mbochs/README": (
            "the file name is not a lower-case UUID, which mdevctl requires"
        ),
    }


def test_mdevctls_rule_counts_where_its_program_is(tmp_path: Path) -> None:
    place = "/usr/lib/udev/rules.d/60-mdevctl.rules"
    put(tmp_path, place, STARTER)
    facts = read(tmp_path)
    assert facts.mdevctl == MdevctlRule(place, "/usr/sbin/mdevctl", has_program=False)
    assert not facts.is_started_by_mdevctl
    put(tmp_path, "/usr/sbin/mdevctl", "")
    assert read(tmp_path).is_started_by_mdevctl


@pytest.mark.parametrize("text", ["", "# RUN+=/usr/sbin/mdevctl start-parent-mdevs %k\n", None])
def test_a_rule_that_is_masked_starts_nothing(tmp_path: Path, text: str | None) -> None:
    put(tmp_path, "/usr/lib/udev/rules.d/60-mdevctl.rules", STARTER)
    put(tmp_path, "/usr/sbin/mdevctl", "")
    put(tmp_path, "/etc/udev/rules.d/60-mdevctl.rules", text or "")
    if text is None:
        (tmp_path / "etc/udev/rules.d/60-mdevctl.rules").unlink()
        (tmp_path / "etc/udev/rules.d/60-mdevctl.rules").symlink_to("/dev/null")
    assert read(tmp_path).mdevctl is None


def test_active_vgpus_tell_their_attributes_and_a_snapshot_keeps_it_all(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    put(Path(kernel.root), f"/etc/mdevctl.d/mbochs/{UUID}", TEXT)
    put(Path(kernel.root), f"/etc/mdevctl.d/mbochs/{OTHER}", "{")
    api.apply(CreateVgpu((UUID,), "mbochs-small", parent="mbochs"), tree=kernel)
    place = kernel.resolve(MDEV_DEVICES / UUID)
    assert place is not None
    kernel.sysfs.put(place / "power/control", "auto")
    kernel.sysfs.put(place / "nvidia/vgpu_params", "a=1")
    host = api.scan(kernel)
    assert host.definitions is not None
    assert host.definitions.attributes == (
        VgpuAttribute(UUID, "nvidia/vgpu_params", "a=1"),
        VgpuAttribute(UUID, "power/control", "auto"),
    )
    again = read_snapshot(write_snapshot(host), "a snapshot")
    assert again.defined.vgpus == host.defined.vgpus
    assert again.defined.problems == host.defined.problems
    assert len(again.defined.problems) == 1
    assert again.definitions == host.definitions

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest
from msgspec.structs import replace

from tests.unit.containers.cdi_cases import ALL, CASES, GOOD, KATA, RUST, Case, devices, edits, spec
from tests.unit.containers.test_cdi_generate import AUDIO, GPU, at, with_nodes
from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.containers.cdi.check import CdiReport, FileVerdict, check, host_files, other_nodes
from vfiomgr.containers.cdi.model import CdiFile
from vfiomgr.containers.cdi.rules import CONSUMERS, consumers_named
from vfiomgr.errors import UsageError
from vfiomgr.vgpu.model import Vgpu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.snapshot.model import HostSnapshot


def etc(text: str, name: str = "x.json") -> CdiFile:
    return CdiFile(f"/etc/cdi/{name}", text)


def run(text: str, name: str = "y.json") -> CdiFile:
    return CdiFile(f"/run/cdi/{name}", text)


def rules(report: CdiReport) -> set[str]:
    return {finding.rule for finding in report.findings}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_consumer_takes_or_refuses_a_file(case: Case) -> None:
    file = etc(case.text, case.file)
    report = check([file], CONSUMERS)
    told = {v.consumer: v.verdict for v in report.verdicts}
    assert {name for name, verdict in told.items() if verdict.startswith("br")} == case.broken
    assert {name for name, verdict in told.items() if verdict == "not read"} == case.unread
    errors = [finding for finding in report.findings if finding.severity == "blocker"]
    assert {finding.rule for finding in errors} == case.rules
    assert all(finding.remedy for finding in report.findings)
    assert report.is_broken == bool(case.broken)
    if case.line is not None:
        assert min(finding.line for finding in errors) == case.line


def test_there_are_forty_cases_and_each_rule_of_a_file_is_in_one() -> None:
    assert len(CASES) > 40
    assert len(GOOD) >= 10


@pytest.mark.parametrize("case", [c for c in CASES if c.broken], ids=lambda case: case.name)
def test_kata_loses_all_devices_by_one_file_and_others_those_of_the_file(case: Case) -> None:
    bad, good = etc(case.text, case.file), run(spec(kind="other.com/gpu"))
    report = check([bad, good], CONSUMERS)
    for consumer in case.broken:
        verdict = report.verdict(bad.path, consumer)
        assert verdict == ("breaks all" if consumer in KATA else "broken")
    breaking = {name for finding in report.findings for name in finding.breaks_all}
    assert breaking == case.broken & KATA


def test_one_finding_tells_of_all_consumers_that_it_concerns() -> None:
    (finding,) = check([etc(spec(kind="gpu"))], CONSUMERS).findings
    assert set(finding.consumers) == ALL


# ---- several files


def test_one_name_in_two_files_of_a_directory_counts_nowhere() -> None:
    report = check([etc(spec()), etc(spec(), "z.yaml")], CONSUMERS)
    (finding,) = report.findings
    assert (finding.rule, finding.subject) == ("conflict", "/etc/cdi/z.yaml")
    assert "also in /etc/cdi/x.json" in finding.summary
    assert report.verdict("/etc/cdi/x.json", "kata-go") == "breaks all"
    assert report.verdict("/etc/cdi/x.json", "containerd-2.3") == "partly"


def test_a_file_that_nobody_reads_conflicts_with_none() -> None:
    broken = spec(devices=[*devices("one"), {"name": "two", "containerEdits": {"env": ["="]}}])
    report = check([etc(spec()), etc(broken, "z.yaml")], CONSUMERS)
    assert rules(report) == {"env"}


class Counting(tuple[FileVerdict, ...]):
    """Verdicts that count how often they are read."""

    __slots__ = ()
    readings: ClassVar[list[int]] = []

    def __iter__(self) -> Iterator[FileVerdict]:
        """Iterate, and count it."""
        self.readings.append(1)
        return super().__iter__()


def test_verdicts_are_looked_up_without_reading_all_of_them() -> None:
    verdicts = Counting(FileVerdict(f"/etc/cdi/{number}", "podman", "ok") for number in range(9))
    report = CdiReport((), (), verdicts=verdicts)
    assert {report.verdict(f"/etc/cdi/{number}", "podman") for number in range(9)} == {"ok"}
    assert len(verdicts.readings) == 1


def test_one_name_in_both_directories_is_read_in_opposite_order() -> None:
    report = check([etc(edits(env=["A=1"])), run(edits(env=["A=2"]))], CONSUMERS)
    told = {
        name: f.summary for f in report.findings for name in f.consumers if f.rule == "shadowed"
    }
    assert "/etc/cdi is used" in told["kata-rs"]
    assert all("/run/cdi is used" in told[name] for name in ALL - RUST)
    assert not report.is_broken
    assert check([etc(spec()), run(spec())], CONSUMERS).findings == ()


def test_a_file_below_a_directory_is_read_by_runtime_rs_alone() -> None:
    report = check([etc("{", "old/x.json")], CONSUMERS)
    assert {v.consumer for v in report.verdicts if v.verdict == "breaks all"} == RUST
    assert report.verdict("/etc/cdi/old/x.json", "kata-go") == "not read"


def test_a_file_that_cannot_be_read_breaks_who_reads_it() -> None:
    report = check([CdiFile("/etc/cdi/x.json", None, "not UTF-8 text in line 3")], CONSUMERS)
    assert "not UTF-8 text in line 3" in report.findings[0].summary
    assert report.verdict("/etc/cdi/x.json", "kata-go") == "breaks all"


# ---- what is behind


def vfio(path: str, name: str = "0000:04:00.0", **parts: str) -> str:
    nodes = [{"path": path, **parts}]
    return spec(devices=[{"name": name, "containerEdits": {"deviceNodes": nodes}}])


READY = with_nodes(host_of(GPU, AUDIO, at(GPU, 5)))


@pytest.mark.parametrize(
    ("text", "rule", "told"),
    [
        (vfio("/dev/vfio/4"), None, ""),
        (vfio("/dev/vfio/devices/vfio0"), None, ""),
        (vfio("/dev/x", hostPath="/dev/vfio/4"), None, ""),
        (vfio("/dev/vfio/9"), "stale", "no such IOMMU group: 9"),
        (vfio("/dev/vfio/devices/vfio9"), "stale", "no function has the VFIO device"),
        (vfio("/dev/vfio/noiommu-0"), "stale", "no-IOMMU"),
        (vfio("/dev/vfio/5"), "leads-elsewhere", "leads to 0000:05:00.0"),
        (vfio("/dev/vfio/5", "gpu5"), None, ""),
        (vfio("/dev/vfio/5", "0000:05:ff.0"), "leads-elsewhere", "leads to 0000:05:00.0"),
        (
            vfio("/dev/nvidia9", "gpu9"),
            "node-missing",
            "does not exist on this host, which has /dev/nvidia0",
        ),
        (vfio("/dev/nvidia0", "gpu0"), None, ""),
    ],
)
def test_what_is_behind_a_device_is_looked_at(text: str, rule: str | None, told: str) -> None:
    nodes = {"/dev/nvidia0": True, "/dev/nvidia9": False, "/dev/nvidiactl": True}
    report = check([etc(text)], CONSUMERS, READY, nodes)
    assert rules(report) == ({rule} if rule else set())
    if rule:
        assert told in report.findings[0].summary
        assert report.verdict("/etc/cdi/x.json", "kata-go") == "partly"
        assert report.findings[0].breaks_all == ()


@pytest.mark.parametrize(
    ("host", "told"),
    [
        (host_of(replace(pci_device(), driver="nvidia")), "0000:04:00.0 is on nvidia"),
        (
            host_of(GPU, replace(AUDIO, driver="snd_hda_intel", vfio_device=None)),
            "not viable: 0000:04:00.1 is on snd_hda_intel",
        ),
    ],
)
def test_a_group_that_left_vfio_is_stale(host: HostSnapshot, told: str) -> None:
    report = check([etc(vfio("/dev/vfio/4"), "vfiomgr-a.json")], CONSUMERS, host, {})
    (finding,) = report.findings
    assert (finding.rule, told in finding.summary) == ("stale", True)
    assert finding.remedy == (
        "vfiomgr bind 0000:04:00.0 --with-group, or vfiomgr cdi remove --stale"
    )


def test_the_remedy_of_a_group_names_no_bridge() -> None:
    port = replace(pci_device("0000:00:01.0"), class_code="060400", driver="pcieport")
    host = host_of(port, replace(pci_device(), driver="nvidia"))
    report = check([etc(vfio("/dev/vfio/4", "4"), "vfiomgr-a.json")], CONSUMERS, host, {})
    assert [f.remedy for f in report.findings if f.rule == "stale"] == [
        "vfiomgr bind 0000:04:00.0 --with-group, or vfiomgr cdi remove --stale"
    ]


def test_runtime_rs_plugs_each_node_of_a_device() -> None:
    nodes = [{"path": "/dev/vfio/vfio"}, {"path": "/dev/vfio/4"}]
    text = spec(devices=[{"name": "a", "containerEdits": {"deviceNodes": nodes}}])
    (finding,) = check([etc(text)], CONSUMERS, READY, {}).findings
    assert (finding.rule, finding.consumers) == ("not-plugged", ("kata-rs-3.31", "kata-rs"))


def test_kata_attaches_no_mediated_device() -> None:
    uuid = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
    mediated = Vgpu(uuid, "mdev", "0000:06:00.0", "nvidia-558", None, "nvidia", 30, None, None)
    groups = (*READY.groups, replace(READY.groups[0], number=30, members=(uuid,)))
    host = with_facts(READY, vgpus=(mediated,), groups=groups)
    (finding,) = check([etc(vfio("/dev/vfio/30", uuid))], CONSUMERS, host, {}).findings
    assert (finding.rule, frozenset(finding.consumers)) == ("mediated", KATA)


def test_one_device_under_two_names_is_told() -> None:
    files = [
        etc(vfio("/dev/vfio/4")),
        run(vfio("/dev/vfio/devices/vfio0").replace("example.com", "other.com")),
    ]
    (finding,) = check(files, CONSUMERS, READY, {}).findings
    assert (finding.rule, finding.severity) == ("twice-published", "warning")
    assert "as a group there" in finding.summary


def test_nodes_that_are_not_vfios_are_asked_for_and_told_where_nobody_could_look() -> None:
    text = vfio("/dev/nvidia0", "gpu0")
    assert other_nodes([etc(text), etc(vfio("/dev/vfio/4"))]) == {"/dev/nvidia0"}
    report = check([etc(text)], CONSUMERS, READY, None)
    assert (report.findings, len(report.unknown)) == ((), 1)


@pytest.mark.parametrize(
    ("name", "count"), [("any", 14), ("kata", 3), ("containerd", 7), ("kata-rs", 1)]
)
def test_consumers_are_named_alone_or_by_family(name: str, count: int) -> None:
    assert len(consumers_named(name)) == count


def test_a_consumer_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown CDI consumer:"):
        consumers_named("docker")


def test_mounts_and_hooks_of_missing_files_break_the_devices_of_a_file() -> None:
    mount = {"hostPath": "/usr/lib/a.so.1", "containerPath": "/a"}
    hook = {"hookName": "createContainer", "path": "/usr/bin/nvidia-ctk"}
    file = etc(edits(mounts=[mount], hooks=[hook]))
    assert host_files([file]) == {"/usr/lib/a.so.1", "/usr/bin/nvidia-ctk"}
    known = {"/usr/bin/nvidia-ctk": True}
    assert rules(check([file], CONSUMERS, host_of(), known)) == set(), "the other is unknown"
    (found,) = check([file], CONSUMERS, host_of(), {**known, "/usr/lib/a.so.1": False}).findings
    assert (found.rule, found.severity) == ("file-missing", "blocker")
    assert "/usr/lib/a.so.1 does not exist" in found.summary
    assert not found.breaks_all


@pytest.mark.parametrize(
    ("args", "is_found"),
    [
        (["nvidia-ctk", "hook", "chmod", "--mode", "755", "--path", "/dev/dri"], True),
        (["nvidia-ctk", "hook", "chmod", "--mode", "755", "--path", "/run/x"], False),
        (["nvidia-ctk", "hook", "update-ldcache", "--folder", "/dev/x"], False),
    ],
)
def test_a_hook_that_changes_modes_of_nodes_is_named(args: list[str], *, is_found: bool) -> None:
    hook = {"hookName": "createContainer", "path": "/usr/bin/nvidia-ctk", "args": args}
    found = check([etc(edits(hooks=[hook]))], CONSUMERS).findings
    assert [each.rule for each in found] == ["hook-chmod"] * is_found
    assert all(each.severity == "warning" for each in found)


def test_a_name_with_a_digit_needs_a_newer_file_or_a_letter() -> None:
    files = [etc(spec(cdiVersion="0.4.0", devices=devices(name))) for name in ("0", "a")]
    (found,) = check(files[:1], consumers_named("podman-5.4")).findings
    assert (
        found.remedy == "write cdiVersion 0.5.0, or for older readers begin the name with a letter"
    )
    assert not check(files[1:], consumers_named("podman-5.4")).findings

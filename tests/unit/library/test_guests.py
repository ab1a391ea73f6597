"""What guests and containers read, from Python: the same that the commands print."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import vfiomgr
from tests.unit.kata_nodes import KIND, POD, KataNode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

GPU = "0000:02:00.0"


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def host(kernel: FakeKernel, notes: list[str]) -> vfiomgr.Host:
    return vfiomgr.Host(kernel, on_note=notes.append)


def test_hostdevs_are_those_of_the_command(host: vfiomgr.Host, run: Run, notes: list[str]) -> None:
    answer = run("libvirt", "hostdev", "02:00.0", "--guest-bus", "3", "--boot-order", "1")
    assert vfiomgr.libvirt.hostdev_xml(host, "02:00.0", guest_bus=3, boot_order=1) == answer.stdout
    assert notes == answer.stderr.splitlines()
    assert any(f"vfiomgr bind {GPU}" in note for note in notes)


def test_a_domain_is_that_of_the_command(host: vfiomgr.Host, run: Run, notes: list[str]) -> None:
    host.bind("02:00.0")
    notes.clear()
    words = ["--memory", "8G", "--vcpus", "2", "--device", f"{GPU},rom=off", "--os", "windows"]
    answer = run("libvirt", "domain", "win", *words, "--disk", "/vm/win.qcow2", "--explain")
    xml = vfiomgr.libvirt.domain_xml(
        host,
        "win",
        memory="8G",
        vcpus=2,
        devices=[f"{GPU},rom=off"],
        system="windows",
        disks=["/vm/win.qcow2"],
        explain=True,
    )
    assert xml == answer.stdout
    assert notes == answer.stderr.splitlines()


def test_a_domain_is_checked_as_text_and_as_a_file(
    host: vfiomgr.Host, run: Run, tmp_path: Path
) -> None:
    xml = vfiomgr.libvirt.domain_xml(host, "win", memory="8G", vcpus=2, devices=["02:00.0"])
    file = tmp_path / "win.xml"
    file.write_text(xml)
    report = vfiomgr.libvirt.check_domain(host, xml)
    of_file = vfiomgr.libvirt.check_domain(host, file)
    assert [one.rule for one in report.findings] == [one.rule for one in of_file.findings]
    assert report.is_blocked
    with pytest.raises(vfiomgr.UsageError, match="cannot read domain /absent"):
        vfiomgr.libvirt.check_domain(host, "/absent.xml")
    (told,) = json.loads(run("check", "domain", str(file), "--format", "json").stdout)["items"]
    found = {finding.rule for finding in report.findings}
    assert found == {finding["id"] for finding in told["findings"]}


def test_a_libvirt_is_asked(host: vfiomgr.Host) -> None:
    found = vfiomgr.libvirt.hypervisor("test:///default")
    assert [domain.name for domain in found.domains] == ["test"]
    xml = "<domain type='kvm'><name>new</name><memory>4194304</memory><vcpu>2</vcpu></domain>"
    asked = vfiomgr.libvirt.check_domain(host, xml, found)
    assert [one.rule for one in asked.findings] == ["no-kvm"]
    assert not vfiomgr.libvirt.check_domain(host, xml).is_blocked


def test_a_specification_is_that_of_the_command(host: vfiomgr.Host, run: Run) -> None:
    host.bind("02:00.0")
    words = ["--kind", KIND, "--name-by", "index"]
    made = vfiomgr.cdi.specification(host, "02:00.0", kind=KIND, name_by="index")
    text = vfiomgr.cdi.to_json(made)
    assert text == run("cdi", "generate", GPU, *words).stdout
    request = vfiomgr.cdi.request(host, "02:00.0", kind=KIND, name_by="index", lifetime="dynamic")
    assert host.plan(request).steps
    assert vfiomgr.cdi.write(host, "02:00.0", kind=KIND, name_by="index").is_changed
    (written,) = host.scan().cdi_files
    assert written.path.startswith("/etc/cdi/")
    assert written.text == text


def test_what_a_specification_leaves_out_is_noted(host: vfiomgr.Host, notes: list[str]) -> None:
    host.bind("02:00.0")
    host.create_vgpu(type="mbochs-small", parent="mbochs")
    notes.clear()
    vfiomgr.cdi.specification(host)
    assert [
        note
        for note in notes
        if (
            "mediated vGPUs are omitted, because Kata cannot attach them; use --consumer "
            "containerd or podman"
        )
        in note
    ]


def test_katas_configuration_is_that_of_the_command(
    host: vfiomgr.Host, run: Run, notes: list[str]
) -> None:
    answer = run("kata", "config", "02:00.0", "--kata-version", "4.1.0", "--memory", "16G")
    made = vfiomgr.kata.configuration(host, "02:00.0", version="4.1.0", memory="16G")
    assert str(made) == made.text == answer.stdout
    assert notes == answer.stderr.splitlines()
    assert made.plan.value("default_memory") == 16384


def test_a_pod_is_explained_as_by_the_command(tmp_path: Path, run: Run) -> None:
    node = KataNode(tmp_path / "node", "go")
    file = tmp_path / "pod.yaml"
    file.write_text(POD)
    host = vfiomgr.Host(node.kernel)
    answer = run("--root", node.kernel.root, "check", "pod", str(file), "--format", "json")
    found = vfiomgr.kata.explain_pod(host, file)
    told = json.loads(answer.stdout)["items"]
    assert [step.state for one in found for step in one.steps] == [
        step["state"] for one in told for step in one["steps"]
    ]
    assert [one.pod for one in found] == ["cuda"]


@pytest.mark.parametrize(
    ("mistake", "command"),
    [
        (
            lambda host: vfiomgr.libvirt.hostdev_xml(host, "02:00"),
            ["libvirt", "hostdev", "02:00"],
        ),
        (
            lambda host: vfiomgr.libvirt.hostdev_xml(host, GPU, version="ten"),
            ["libvirt", "hostdev", GPU, "--libvirt-version", "ten"],
        ),
        (
            lambda host: vfiomgr.libvirt.hostdev_xml(host, GPU, qemu_version="ten"),
            ["libvirt", "hostdev", GPU, "--qemu-version", "ten"],
        ),
        (
            lambda host: vfiomgr.libvirt.domain_xml(
                host, "a", memory="1G", vcpus=1, version="12.8", qemu_version="nine"
            ),
            [
                *["libvirt", "domain", "a", "--memory", "1G", "--vcpus", "1"],
                *["--libvirt-version", "12.8", "--qemu-version", "nine"],
            ],
        ),
        (
            lambda host: vfiomgr.libvirt.domain_xml(host, "a", memory="16", vcpus=1),
            ["libvirt", "domain", "a", "--memory", "16", "--vcpus", "1"],
        ),
        (
            lambda host: vfiomgr.libvirt.domain_xml(host, "a", memory="1G", vcpus=1, initrd="/i"),
            ["libvirt", "domain", "a", "--memory", "1G", "--vcpus", "1", "--initrd", "/i"],
        ),
        (
            lambda host: vfiomgr.cdi.specification(host, kind="gpu"),
            ["cdi", "generate", "--kind", "gpu"],
        ),
        (vfiomgr.cdi.specification, ["cdi", "generate"]),
        (
            lambda host: vfiomgr.kata.configuration(host, "zz", version="4.1"),
            ["kata", "config", "zz", "--kata-version", "4.1"],
        ),
        (
            lambda host: vfiomgr.kata.configuration(host, whole="/a", beside="/b"),
            ["kata", "config", "--whole", "/a", "--beside", "/b"],
        ),
        (
            lambda host: vfiomgr.kata.explain_pod(host, "/absent.yaml"),
            ["check", "pod", "/absent.yaml"],
        ),
    ],
)
def test_mistakes_raise_what_the_command_prints(
    host: vfiomgr.Host, run: Run, mistake: Callable[[vfiomgr.Host], object], command: list[str]
) -> None:
    with pytest.raises(vfiomgr.VfiomgrError) as raised:
        mistake(host)
    answer = run(*command)
    told = [line for line in answer.stderr.splitlines() if not line.startswith("  explain: ")]
    *_, error, remedy = told
    is_refused = isinstance(raised.value, vfiomgr.Refusal)
    assert error == f"vfiomgr: {'refused' if is_refused else 'error'}: {raised.value.message}"
    assert remedy == f"  remedy: {raised.value.hint}"
    assert answer.status == raised.value.exit_code


GUEST = ["libvirt", "domain", "a", "--memory", "1G", "--vcpus"]


@pytest.mark.parametrize(
    ("call", "arguments", "options", "command"),
    [
        (vfiomgr.libvirt.hostdev_xml, [GPU], {"guest_bus": 0}, ["libvirt", "hostdev", GPU]),
        (vfiomgr.libvirt.hostdev_xml, [GPU], {"boot_order": 0}, ["libvirt", "hostdev", GPU]),
        (vfiomgr.libvirt.domain_xml, ["a"], {"vcpus": 0}, GUEST[:-1]),
        (vfiomgr.libvirt.domain_xml, ["a"], {"spare_ports": 65}, [*GUEST, "1"]),
        (vfiomgr.libvirt.domain_xml, ["a"], {"address_bits": 64}, [*GUEST, "1"]),
        (vfiomgr.libvirt.domain_xml, ["a"], {"hugepages": "3M"}, [*GUEST, "1"]),
        (vfiomgr.libvirt.domain_xml, ["a"], {"firmware": "uefi"}, [*GUEST, "1"]),
        (vfiomgr.libvirt.domain_xml, ["a"], {"viommu": "arm"}, [*GUEST, "1"]),
        (vfiomgr.cdi.specification, [], {"name_by": "slot"}, ["cdi", "generate"]),
        (vfiomgr.cdi.specification, [], {"node": "none"}, ["cdi", "generate"]),
        (vfiomgr.cdi.request, [], {"lifetime": "ever"}, ["cdi", "generate", "--write"]),
        (vfiomgr.kata.configuration, [], {"hypervisor": "xen"}, ["kata", "config"]),
        (vfiomgr.kata.configuration, [], {"plug": "warm"}, ["kata", "config"]),
        (vfiomgr.kata.explain_pod, [GPU], {"cri": "docker"}, ["check", "pod", GPU]),
        (vfiomgr.Host.bind, [GPU], {"allow": ["all"]}, ["bind", GPU]),
        (vfiomgr.Host.bind, [GPU], {"reset_method": "off"}, ["bind", GPU]),
        (vfiomgr.Host.unbind, [GPU], {"allow": ["boot-display"]}, ["unbind", GPU]),
        (vfiomgr.Host.reset, [GPU], {"method": "off"}, ["reset", GPU]),
        (vfiomgr.Host.recover, [], {"allow": ["all"]}, ["recover"]),
        (vfiomgr.Host.create_vgpu, [], {"heads": 0}, ["vgpu", "create"]),
    ],
)
def test_words_and_numbers_without_a_meaning_are_told_as_by_the_command(  # noqa: PLR0913, PLR0917 - fixtures
    host: vfiomgr.Host,
    run: Run,
    call: Callable[..., object],
    arguments: list[str],
    options: dict[str, object],
    command: list[str],
) -> None:
    ((name, value),) = options.items()
    known: dict[str, object] = {"memory": "1G", "vcpus": 1} if arguments == ["a"] else {}
    with pytest.raises(vfiomgr.UsageError) as raised:
        call(host, *arguments, **{**known, **options})
    word = value[0] if isinstance(value, list) else value
    option = {"cri": "runtime"}.get(name, name.replace("_", "-"))
    answer = run(*command, f"--{option}", str(word))
    assert answer.stderr.splitlines()[0] == f"vfiomgr: error: {raised.value.message}"
    assert answer.status == raised.value.exit_code

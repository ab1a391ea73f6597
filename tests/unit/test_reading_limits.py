"""The work for a hostile document grows with its length, and what is printed about it is short."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.devices import host_of, pci_device
from vfiomgr.containers.cdi.check import check
from vfiomgr.containers.cdi.model import CdiFile
from vfiomgr.containers.cdi.rules import CONSUMERS
from vfiomgr.diagnostic import finding
from vfiomgr.documents import reader
from vfiomgr.documents.json_text import read_json
from vfiomgr.documents.reader import read_values
from vfiomgr.documents.text import TooMany, parse_json, parse_toml
from vfiomgr.errors import InvalidDocument
from vfiomgr.kata.explain.pod import read_objects
from vfiomgr.layout.document import find_flaws
from vfiomgr.layout.vgpu_device_manager import layouts_of, read_vgpu_configs
from vfiomgr.libvirt.preflight.plan import preflight
from vfiomgr.libvirt.xml import elements
from vfiomgr.libvirt.xml.read import read_domain
from vfiomgr.node.simulation.objects import read_simulation
from vfiomgr.node.simulation.selectors import Selectors
from vfiomgr.paths import HostPath
from vfiomgr.rules.runner import Report

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.conftest import Run

_FEW, _MANY = 60, 240


def check_cdi(*files: dict[str, Any]) -> object:
    """Check specifications, in /etc/cdi and then in /run/cdi, on a host with one function."""
    start = {"cdiVersion": "0.5.0", "kind": "example.com/gpu"}
    places = (HostPath("/etc/cdi/a.json"), HostPath("/run/cdi/a.json"))
    texts = [json.dumps({**start, **file}) for file in files]
    found = tuple(CdiFile(path, text) for path, text in zip(places, texts, strict=False))
    return check(found, CONSUMERS, host_of(pci_device("0000:01:00.0")))


def device(number: int, **edits: object) -> dict[str, Any]:
    return {"name": f"gpu{number}", "containerEdits": edits}


def cdi_devices(count: int, **edits: object) -> dict[str, Any]:
    return {"devices": [device(number, **edits) for number in range(count)]}


def cdi_nodes(count: int) -> dict[str, Any]:
    nodes = [{"path": f"/dev/x{number}"} for number in range(count)]
    return {"devices": [device(0, deviceNodes=nodes)]}


def cdi_interfaces(count: int) -> dict[str, Any]:
    return cdi_devices(count, netDevices=[{"hostInterfaceName": "eth0", "name": "eth0"}])


def cdi_nothing(count: int) -> dict[str, Any]:
    return {"devices": [{**device(number), "unknown": 1} for number in range(count)]}


def pod(name: str, containers: list[dict[str, Any]], **spec: object) -> dict[str, Any]:
    meta = {"name": name}
    return {"kind": "Pod", "metadata": meta, "spec": {"containers": containers, **spec}}


def one_pod(count: int) -> object:
    limits = [{f"example.com/gpu{number}": "1"} for number in range(count)]
    containers = [{"name": "a", "resources": {"limits": limit}} for limit in limits]
    return read_objects(json.dumps(pod("a", containers)), "pod.json").pods[0].resources


def kinds(count: int) -> object:
    others = [{"kind": f"Other{number}"} for number in range(count)]
    items = {"kind": "List", "items": [*others, pod("a", [])]}
    return read_objects(json.dumps(items), "pod.json")


def claims(count: int) -> object:
    """Pods with claims that are not in the file, which has others."""
    version = "resource.k8s.io/v1"
    names = [f"claim-{number}" for number in range(count)]
    pods = [pod("a", [], resourceClaims=[{"resourceClaimName": f"{n}-of-mine"}]) for n in names]
    own = [
        {"apiVersion": version, "kind": "ResourceClaim", "metadata": {"name": n}, "spec": {}}
        for n in names
    ]
    text = json.dumps({"kind": "List", "items": pods + own})
    with pytest.raises(InvalidDocument) as caught:
        read_simulation(text, "pods.json", Selectors())
    return caught


def vgpu_configs(count: int) -> object:
    entries = [
        {"devices": "all", "device-filter": [f"0x{n:04x}10DE"], "vgpu-devices": {"A40-4Q": 1}}
        for n in range(count)
    ]
    text = json.dumps({"version": "v1", "vgpu-configs": {"a": entries}})
    return layouts_of(read_vgpu_configs(text, "config.yaml"), None, [])


def rules(*selectors: object) -> str:
    devices = [{"select": select, "state": "passthrough"} for select in selectors]
    return json.dumps({"version": "vfiomgr/v1", "layouts": {"lab": {"devices": devices}}})


def rules_of_a_function(count: int) -> object:
    return find_flaws(
        rules(*({"address": "0000:01:00.0", "numa_node": node} for node in range(count)))
    )


def addresses_twice(count: int) -> object:
    addresses = [f"{number:04x}:01:00.0" for number in range(count)]
    return find_flaws(rules({"address": addresses}, {"address": addresses}))


def domain(devices: str, rest: str = "") -> bytes:
    start = "<domain type='kvm'><name>a</name><memory>1048576</memory>"
    return f"{start}{rest}<devices>{devices}</devices></domain>".encode()


def hostdevs(count: int) -> object:
    text = "".join(
        f"<hostdev mode='subsystem' type='pci'><source><address domain='{number}' bus='1'/>"
        "</source></hostdev>"
        for number in range(count)
    )
    host = host_of(pci_device("0000:01:00.0"))
    return preflight(host, [read_domain(domain(text), "a.xml")])


def smmus(count: int) -> object:
    """Devices, each behind all of many SMMUs."""
    text = "".join(
        "<iommu model='smmuv3'><driver accel='on'/></iommu><hostdev mode='subsystem' type='pci'>"
        f"<source><address domain='{number}' bus='1'/></source></hostdev>"
        for number in range(count)
    )
    host = host_of(pci_device("0000:01:00.0"))
    return preflight(host, [read_domain(domain(text), "a.xml")])


def calls(of: Callable[[int], object], count: int) -> int:
    """The calls of functions and the steps of generators for a document."""
    found = 0

    def tell(_: object, event: str, __: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(tell)
    try:
        of(count)
    finally:
        sys.setprofile(None)
    return found


WORK: dict[str, Callable[[int], object]] = {
    "CDI: many devices": lambda n: check_cdi(cdi_devices(n, env=["A=B"])),
    "CDI: devices without edits": lambda n: check_cdi(cdi_nothing(n)),
    "CDI: devices with interfaces": lambda n: check_cdi(cdi_interfaces(n)),
    "CDI: one device with many nodes": lambda n: check_cdi(cdi_nodes(n)),
    "CDI: in two directories": lambda n: check_cdi(
        cdi_devices(n, env=["A=B"]), cdi_devices(n, env=["A=C"])
    ),
    "one pod with many resources": one_pod,
    "other objects than pods": kinds,
    "claims that are missing": claims,
    "vgpu-device-manager": vgpu_configs,
    "rules for one function": rules_of_a_function,
    "addresses twice": addresses_twice,
    "domain with many devices": hostdevs,
    "domain with many SMMUs": smmus,
}


@pytest.mark.parametrize("name", WORK)
def test_the_work_grows_with_the_length_of_a_document(name: str) -> None:
    WORK[name](2)  # what is imported and compiled once
    few, many = calls(WORK[name], _FEW), calls(WORK[name], _MANY)
    assert many <= 1.5 * few * _MANY / _FEW


def test_the_meant_key_is_looked_for_in_the_first_errors_of_a_specification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []

    def close(word: str, *_: object) -> list[str]:
        compared.append(word)
        return []

    monkeypatch.setattr("difflib.get_close_matches", close)
    check_cdi({**cdi_devices(1, env=["A=B"]), **{f"key{number}": 1 for number in range(500)}})
    assert len(compared) == 2 * 100, "for each of the two libraries"


def specifications(root: Path, *, keys: int) -> list[str]:
    """130 files that no consumer reads, and one with unknown keys."""
    start = {"cdiVersion": "0.5.0", "kind": "example.com/gpu", **cdi_devices(1, env=["A=B"])}
    odd = [root / f"a{number}.txt" for number in range(130)]
    path = root / "b.json"
    path.write_text(json.dumps({**start, **{f"key{number}": 1 for number in range(keys)}}))
    for file in odd:
        file.write_text(json.dumps(start))
    return [str(file) for file in (*odd, path)]


def test_a_hundred_findings_are_printed_errors_first_and_the_others_counted(
    run: Run, tmp_path: Path
) -> None:
    files = specifications(tmp_path, keys=1)
    answer = run("check", "cdi", *files)
    assert answer.status == 1
    assert answer.stdout.startswith("error: ")
    assert answer.stdout.count("\nwarning: ") == 99
    assert "\nand 31 more\n" in answer.stdout
    document = json.loads(run("check", "cdi", *files, "--format", "json").stdout)
    assert (len(document["items"]), document["omitted"]) == (100, 31)
    assert document["items"][0]["severity"] == "error"


def test_no_error_in_a_specification_is_omitted(run: Run, tmp_path: Path) -> None:
    files = specifications(tmp_path, keys=120)
    answer = run("check", "cdi", *files)
    assert answer.stdout.count("is not a CDI key") == 120
    assert "\nand 130 more\n" in answer.stdout
    document = json.loads(run("check", "cdi", *files, "--format", "json").stdout)
    assert {item["severity"] for item in document["items"]} == {"error"}
    assert (len(document["items"]), document["omitted"]) == (120, 130)


def test_check_all_omits_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuple(finding("r", "ok", f"fine {number}", (), "it matters") for number in range(130))
    monkeypatch.setattr("vfiomgr.check.plan.check", lambda _host: Report(found, ()))
    assert run("check", "--all").stdout.count("ok: fine") == 130
    document = json.loads(run("check", "--all", "--format", "json").stdout)
    assert (len(document["items"]), "omitted" in document) == (130, False)
    document = json.loads(run("check", "--format", "json").stdout)
    assert (len(document["items"]), document["omitted"]) == (100, 30)


def test_a_hundred_errors_of_a_layout_are_printed_and_the_others_counted(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "lab.json"
    path.write_text(rules(*({"id": f"x{number}"} for number in range(130))))
    answer = run("check", "layout", str(path))
    assert len(answer.stdout.splitlines()) == 101
    assert answer.stdout.endswith("lab.json: and 30 more\n")
    document = json.loads(run("check", "layout", str(path), "--format", "json").stdout)
    assert (len(document["items"][0]["findings"]), document["items"][0]["omitted"]) == (100, 30)


def test_errors_in_pods_are_counted_beyond_those_that_are_printed() -> None:
    pods = {"kind": "List", "items": [{"metadata": {}}] * 90}
    with pytest.raises(InvalidDocument, match=r"^pods.json: 90 errors$") as caught:
        read_objects(json.dumps(pods, indent=1), "pods.json")
    assert len(caught.value.details) == 41
    assert caught.value.details[-1] == "and 50 more"


def test_a_document_with_too_many_values_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader, "_yaml", None)
    for text in ("- a\n" * 200_001, "[" + "a," * 200_001 + "a]", "a: b\r" * 200_001):
        with pytest.raises(InvalidDocument, match=r"it has more than 200,000 values"):
            read_values(text if text[0] == "-" else f"# \n{text}", "a.yaml", "")
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(TooMany, match=r"more than 1,000,000 values"):
        read_json("[" + "0," * 1_000_001 + "0]")
    with pytest.raises(TooMany, match=r"more than 3,000,000 values"):
        parse_json("[" + "[]," * 3_000_001 + "0]")
    with pytest.raises(TooMany, match=r"more than 3,000,000 values"):
        parse_toml("a = [" + "[]," * 3_000_001 + "]")


def test_more_controllers_than_libvirt_can_number_are_refused() -> None:
    with pytest.raises(InvalidDocument, match="more than 65535 PCI controllers"):
        read_domain(domain("<controller type='pci'/>" * 65_537), "a.xml")


def test_the_numbers_of_all_pins_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "_MOST_TOGETHER", 1000)
    pins = "<cputune>{}</cputune>"
    pin = "<vcpupin vcpu='0' cpuset='0-511'/>"
    assert len(read_domain(domain("", pins.format(pin)), "a.xml").cpu.pins) == 1
    with pytest.raises(InvalidDocument, match="the sets have more than 1,000 numbers"):
        read_domain(domain("", pins.format(pin * 2)), "a.xml")


def test_a_broader_rule_is_found_however_many_others_are_before_it() -> None:
    others = [{"id": f"10de:{number:04x}", "numa_node": number} for number in range(250)]
    broad: dict[str, object] = {"id": "8086:*"}
    _, flaws = find_flaws(rules(*others, broad, *others[:3], {"id": "8086:1234", "numa_node": 7}))
    found = [flaw.summary for flaw in flaws if "8086" in flaw.summary]
    assert len(found) == 1
    assert "rule 251 (id 8086:*) selects all its devices" in found[0]

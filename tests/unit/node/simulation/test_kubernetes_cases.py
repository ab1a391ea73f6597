"""The verdicts of the simulation on the cases of Kubernetes' own allocator."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

from tests.unit.node.simulation.made import NODE, cluster
from vfiomgr.errors import InvalidDocument
from vfiomgr.node.dra.model import Consumption, CounterSet, DraDevice, Pool, Taint, Target
from vfiomgr.node.model import Inventory
from vfiomgr.node.simulation.objects import read_simulation
from vfiomgr.node.simulation.scheduler import Scheduler, template_of
from vfiomgr.node.simulation.selectors import SelectorError, Selectors, facts_of
from vfiomgr.units import parse_quantity, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vfiomgr.node.simulation.model import PodResult
    from vfiomgr.node.simulation.scheduler import NodeTemplate

Case = dict[str, Any]
DOCUMENT: dict[str, Any] = YAML(typ="safe").load(Path(__file__).parent / "allocator_cases.yaml")
CASES: dict[str, Case] = {**DOCUMENT["cases"], **DOCUMENT["further"]}
CLASSES = {
    f"class-{each}": [f'device.attributes["vfiomgr.io"].driver == "driver-{each}"'] for each in "ab"
}
OWN = {"driver": "driver-a"}
ALL_CASES, ALL_EXPRESSIONS = 223, 71
SELECTORS: dict[str, Any] = YAML(typ="safe").load(Path(__file__).parent / "cel_cases.yaml")


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_is_that_of_kubernetes(name: str) -> None:
    case = CASES[name]
    expected = case["expected"]
    found = _result(case)
    if expected in ("pending", "error"):
        assert found is None or (found.node is None and found.reasons)
        assert expected == "error" or found is not None
        return
    assert found is not None
    devices: list[dict[str, set[str]]] = [{} for _ in expected]
    for each in found.devices:
        chosen = devices[int(each.claim.removeprefix("claim-"))].setdefault(each.request, set())
        chosen.add(f"{each.pool.removeprefix(NODE).lstrip('/')}/{each.device}")
    assert devices == [
        {request: set(_expanded(*names)) for request, names in claim.items()} for claim in expected
    ]


@pytest.mark.parametrize("name", SELECTORS["cases"])
def test_a_selector_selects_as_in_kubernetes(name: str) -> None:
    case = SELECTORS["cases"][name]
    facts = facts_of(_device("a", {"capacity": case.get("capacity", {}), **case}, own={}))
    if case["expected"] == "error":
        with pytest.raises(SelectorError):
            Selectors().matches(case["expression"], facts)
    else:
        assert Selectors().matches(case["expression"], facts) is case["expected"]


@pytest.mark.parametrize(
    ("document", "count", "what"),
    [(DOCUMENT, ALL_CASES, "cases"), (SELECTORS, ALL_EXPRESSIONS, "expressions")],
)
def test_every_case_of_kubernetes_is_compared_or_says_why_not(
    document: dict[str, Any], count: int, what: str
) -> None:
    others = [name for names in document["not_compared"].values() for name in names]
    assert len(document["cases"]) + len(others) == count
    assert not document["cases"].keys() & set(others)
    counts = f"{len(document['cases'])} of the {count} {what}"
    assert counts in (Path(__file__).parents[4] / "docs/kubernetes.md").read_text()


def _result(case: Case) -> PodResult | None:
    """The pod of a case; None if its file is refused."""
    selectors = Selectors()
    try:
        objects = read_simulation("---\n".join(_documents(case)), "f.yaml", selectors)
    except InvalidDocument:
        return None
    placed = Scheduler(cluster(**{NODE: _node(case)}), selectors).place(objects.workloads)
    return placed.pods[0]


def _documents(case: Case) -> Iterator[str]:
    for name, expressions in case.get("classes", CLASSES).items():
        selectors = [_selector(each) for each in expressions]
        yield _document("DeviceClass", name, {"selectors": selectors})
    claims = case.get("claims", ())
    for number, claim in enumerate(claims):
        requests = [_request(each) for each in claim["requests"]]
        devices = {"requests": requests, "constraints": claim.get("constraints", [])}
        yield _document("ResourceClaim", f"claim-{number}", {"devices": devices})
    names = [f"claim-{number}" for number in range(len(claims))]
    own = [{"name": name, "resourceClaimName": name} for name in names]
    yield _document("Pod", "pod", {"resourceClaims": own, "containers": [{"name": "a"}]})


def _document(kind: str, name: str, spec: Mapping[str, Any]) -> str:
    version = "v1" if kind == "Pod" else "resource.k8s.io/v1"
    metadata = {"name": name}
    found = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
    return json.dumps(found) + "\n"


def _request(written: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(written)
    if "exactly" in found:
        found["exactly"] = _request(found["exactly"])
    if "firstAvailable" in found:
        found["firstAvailable"] = [_request(each) for each in found["firstAvailable"]]
    if "selectors" in found:
        found["selectors"] = [_selector(each) for each in found["selectors"]]
    return found


def _selector(expression: str | None) -> dict[str, Any]:
    return {} if expression is None else {"cel": {"expression": expression}}


def _node(case: Case) -> NodeTemplate:
    pools = tuple(_pools(case))
    used = {tuple(each.rsplit("/", 1)) for each in case.get("used", ())}
    found = template_of(lambda _: pools, Inventory(), NODE, {})
    keys = frozenset((f"/{pool}", device) for pool, device in used)
    return type(found)(found.stock, found.resources, keys, found.labels)


def _pools(case: Case) -> Iterator[Pool]:
    for name, devices in case.get("pools", {}).items():
        counters = case.get("counters", {}).get(name, {})
        sets = tuple(CounterSet(each, _numbers(own)) for each, own in counters.items())
        own = tuple(
            _device(each, written)
            for names, written in devices.items()
            for each in _expanded(names)
        )
        yield Pool(f"{NODE}/{name}", own, sets)


def _device(name: str, written: Mapping[str, Any], own: Mapping[str, Any] = OWN) -> DraDevice:
    groups = written.get("groups", {})
    attributes: dict[str, Any] = written.get("attributes", {})
    attributes = {k: tuple(v) if isinstance(v, list) else v for k, v in attributes.items()}
    return DraDevice(
        name,
        Target(),
        {**attributes, **{key: written.get(key, value) for key, value in own.items()}},
        _numbers(written.get("capacity", {})),
        tuple(
            Consumption(each, _numbers(own), tuple(groups.get(each, ())))
            for each, own in written.get("consumes", {}).items()
        ),
        tuple(Taint(**each) for each in written.get("taints", ())),
    )


def _numbers(written: Mapping[str, str | int]) -> dict[str, int]:
    return {name: whole(parse_quantity(str(n)) or Fraction(0)) for name, n in written.items()}


def _expanded(*names: str) -> Iterator[str]:
    """The names; `device-0..3` are four."""
    for name in names:
        match = re.fullmatch(r"(.*-)(\d+)\.\.(\d+)", name)
        if match is None:
            yield name
        else:
            first, last = int(match[2]), int(match[3])
            yield from (f"{match[1]}{number}" for number in range(first, last + 1))

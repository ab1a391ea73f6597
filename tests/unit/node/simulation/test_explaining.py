"""`check pod`: what claims get of this host, and what is against each device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.fakes.hosts import workstation
from tests.unit.node.made import A40, at, node_of
from tests.unit.node.simulation.made import cel, claim, exactly
from vfiomgr.diagnostic import Diagnostic, blocker
from vfiomgr.node.simulation.explaining import verdicts
from vfiomgr.users.node_agent import ClaimStatus, DeviceStatus, NodeStatus, ResourceStatus

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import Run
    from vfiomgr.kata.explain.context import ClaimVerdict
    from vfiomgr.snapshot.model import HostSnapshot

FIRST, SECOND = "0000:41:00.0", "0000:42:00.0"
NVIDIA = replace(A40, driver="nvidia", vfio_device=None)
POD = """\
---
kind: Pod
metadata: {name: guest}
spec:
  resourceClaims: [{name: gpu, resourceClaimTemplateName: gpu}]
  containers: [{name: a, image: x}]
"""
MODEL = cel('device.attributes["vfiomgr.io"].device == "2235"')
ANY = claim(f"[{exactly()}]") + POD
ORIGIN = "bound from nvidia at 1970-01-01T00:00:00Z; returns to nvidia when the claim ends"


def status(address: str, reasons: tuple[Diagnostic, ...] = (), pod: str = "") -> DeviceStatus:
    used_by = pod and f"{pod}/main"
    return DeviceStatus(address, (address,), (), not reasons, used_by, used_by, reasons)


def agent(*devices: DeviceStatus, dra: bool | None = True, **fields: Any) -> NodeStatus:
    offered = (ResourceStatus("vfiomgr.io/A40", "kata", True, devices),)  # noqa: FBT003
    found = {"resources": offered, "is_dra_registered": dra, **fields}
    return NodeStatus(7, "/p", has_kubelet=True, **found)


AGENT = agent()


def judged(
    host: HostSnapshot, text: str = ANY, known: NodeStatus | None = AGENT
) -> ClaimVerdict | None:
    users = replace(host.users, agent=known, processes=())
    (found,) = verdicts(replace(host, users=users), None, text, "f.yaml", None)
    return found


def problem(
    host: HostSnapshot, text: str = ANY, known: NodeStatus | None = AGENT
) -> tuple[str, tuple[str, ...], str]:
    """The only one: what, the evidence and the remedies."""
    found = judged(host, text, known)
    assert found is not None
    assert not found.is_known
    (one,) = found.breaks
    return one.summary, one.evidence, one.remedy


def test_a_claim_that_gets_its_devices_names_them() -> None:
    found = judged(node_of(A40, at(A40, 0x42)), claim(f"[{exactly('count: 2')}]") + POD)
    assert found is not None
    assert (found.parts, found.breaks) == ((f"claim gpu: {FIRST}", f"claim gpu: {SECOND}"), ())
    assert found.is_known


def test_nothing_is_certain_without_an_agent() -> None:
    found = judged(node_of(A40), known=None)
    assert found is not None
    assert found.parts[1:] == (
        "no node agent answers on this host: unknown whether it offers them",
    )
    assert not found.breaks
    assert not found.is_known


def test_each_device_has_its_own_reason() -> None:
    host = node_of(A40, *(at(A40, bus) for bus in (0x42, 0x43, 0x44)), at(NVIDIA, 0x45))
    third, fourth = "0000:43:00.0", "0000:44:00.0"
    reason = blocker("reset-failed", third, f"cannot reset {third}", "reboot the node")
    own = ClaimStatus(SECOND, "lab/other", "nvidia", 0.0, returns=True)
    known = agent(
        status(FIRST, pod="lab/guest"),
        status(SECOND),
        status(third, (reason,)),
        status(fourth),
        claims=(own,),
    )
    request = exactly(
        cel('device.attributes["resource.kubernetes.io"].pciBusID != "' + fourth + '"')
    )
    what, evidence, remedy = problem(host, claim(f"[{request}]") + POD, known)
    assert what == "request gpu: 1 device of class vfio.vfiomgr.io requested, none is available"
    mismatch = f'device.attributes["resource.kubernetes.io"].pciBusID != "{fourth}" is false'
    assert evidence == (
        f"{FIRST}: in use by pod lab/guest",
        f"{SECOND}: in use by claim lab/other ({ORIGIN})",
        f"{third}: cannot reset {third}",
        f"{fourth} (resource.kubernetes.io/pciBusID is {fourth}): {mismatch}",
        "0000:45:00.0: on nvidia, and not offered to claims",
    )
    assert "wait until pod lab/guest ends" in remedy
    assert "reboot the node" in remedy
    assert "vfiomgr bind 0000:45:00.0" in remedy


def test_devices_with_the_same_reason_are_one_line() -> None:
    host = node_of(A40, at(A40, 0x42))
    reasons = (blocker("wedged", device, f"{device} does not answer") for device in host.devices)
    known = agent(
        *(status(name, (why,)) for name, why in zip((FIRST, SECOND), reasons, strict=True))
    )
    _, evidence, _ = problem(host, claim(f"[{exactly()}]") + POD, known)
    assert evidence == (f"{FIRST}, {SECOND}: does not answer",)


def test_devices_that_claims_bind_are_those_that_the_agent_reports() -> None:
    known = agent(on_demand=(status(FIRST),))
    found = judged(node_of(NVIDIA), ANY, known)
    assert found is not None
    assert (found.parts, found.is_known) == ((f"claim gpu: {FIRST}",), True)
    reason = blocker("mig-mode", FIRST, f"{FIRST} is in MIG mode", "turn it off")
    known = agent(on_demand=(status(FIRST, (reason,)),))
    assert problem(node_of(NVIDIA), ANY, known)[1] == (f"{FIRST}: {FIRST} is in MIG mode",)


def test_a_device_that_does_not_match_is_not_offered_for_binding() -> None:
    text = claim(f"[{exactly(MODEL.replace('2235', '2236'))}]") + POD
    _, evidence, remedy = problem(node_of(A40, at(NVIDIA, 0x42)), text)
    assert [each.partition(": ")[0] for each in evidence] == [f"{FIRST} (device is 2235)"]
    assert "bind" not in remedy


def test_an_attribute_that_is_missing_fails_the_pod_everywhere() -> None:
    selector = cel('device.attributes["vfiomgr.io"].modell == "A40"')
    what, *_ = problem(node_of(A40), claim(f"[{exactly(selector)}]") + POD)
    assert "no such key: modell; Kubernetes then schedules the pod on no node" in what


def test_devices_that_a_constraint_keeps_apart_are_compared() -> None:
    host = node_of(replace(A40, numa_node=0), replace(at(A40, 0x42), numa_node=1))
    same = "{matchAttribute: resource.kubernetes.io/numaNode}"
    what, evidence, _ = problem(host, claim(f"[{exactly('count: 2')}]", same) + POD)
    assert what.endswith("no free devices satisfy matchAttribute resource.kubernetes.io/numaNode")
    assert evidence == (
        f"{FIRST}: resource.kubernetes.io/numaNode is 0",
        f"{SECOND}: resource.kubernetes.io/numaNode is 1",
    )


def test_a_taint_that_the_claim_tolerates_is_no_reason() -> None:
    reason = blocker("reset-failed", FIRST, "no reset", "reboot the node")
    tolerating = exactly("tolerations: [{key: vfiomgr.io/reset-failed, operator: Exists}]")
    known = agent(status(FIRST, (reason,)))
    found = judged(node_of(A40), claim(f"[{tolerating}]") + POD, known)
    assert found is not None
    assert not found.breaks
    assert problem(node_of(A40), ANY, known)[1] == (f"{FIRST}: no reset",)


@pytest.mark.parametrize(
    ("dra", "expected"),
    [
        (None, "the node agent serves no claims"),
        (False, "the DRA driver of the node agent is not registered with the kubelet"),
    ],
)
def test_an_agent_that_serves_no_claims(dra: bool | None, expected: str) -> None:  # noqa: FBT001
    assert problem(node_of(A40), ANY, agent(status(FIRST), dra=dra))[0] == expected


def test_what_the_driver_refuses_is_told_before_the_pod_exists() -> None:
    opaque = "{driver: vfiomgr.io, parameters: {apiVersion: vfiomgr.io/v1alpha1, kind: %s, %s}}"
    config = "      config: [{opaque: " + opaque % ("VfioDeviceConfig", "reste: true") + "}]\n"
    what, _, remedy = problem(node_of(A40), claim(f"[{exactly()}]") + config + POD)
    assert what.startswith("f.yaml:10: vfiomgr.io refuses the parameters: ")
    assert remedy == "did you mean reset?"
    right = judged(node_of(A40), claim(f"[{exactly()}]") + config.replace("reste", "reset") + POD)
    assert right is not None
    assert right.is_known
    what, *_ = problem(node_of(A40), claim(f"[{exactly('adminAccess: true')}]") + POD)
    assert what.startswith("request gpu: vfiomgr refuses claims with adminAccess")


def test_claims_of_other_drivers_are_not_judged() -> None:
    assert judged(node_of(A40), claim(f"[{exactly('', 'gpu.nvidia.com')}]") + POD) is None
    other = (
        "---\napiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: gpu.nvidia.com}\n"
    )
    other += "spec: {selectors: [{cel: {expression: 'device.driver == \"gpu.nvidia.com\"'}}]}\n"
    assert judged(node_of(A40), other + claim(f"[{exactly('', 'gpu.nvidia.com')}]") + POD) is None


def test_a_resource_of_a_class_is_a_claim() -> None:
    own = "---\napiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: a40}\nspec:\n"
    own += "  extendedResourceName: example.com/a40\n"
    own += "  selectors: [{cel: {expression: 'device.driver == \"vfiomgr.io\"'}}]\n"
    pod = "---\nkind: Pod\nmetadata: {name: a}\nspec:\n  containers:\n"
    pod += "  - {name: a, image: x, resources: {limits: {example.com/a40: 2}}}\n"
    what, *_ = problem(node_of(A40), own + pod)
    assert what.endswith("2 devices of class a40 requested, 1 is available")
    found = judged(node_of(A40, at(A40, 0x42)), own + pod)
    assert found is not None
    assert found.names == ("example.com/a40",)
    assert judged(node_of(A40), pod) is None


def test_a_claim_that_is_not_in_the_file_is_not_checked() -> None:
    found = judged(node_of(A40), POD)
    assert found is not None
    assert not found.breaks
    assert found.parts == (
        "not checked: f.yaml:5: no ResourceClaimTemplate 'gpu' in namespace default",
    )


def test_a_layout_lets_claims_bind_a_device_of_the_host(run: Run, tmp_path: Path) -> None:
    host = workstation(tmp_path / "h")
    pod, layout = tmp_path / "pod.yaml", tmp_path / "mixed.yaml"
    selector = cel('device.attributes["vfiomgr.io"].device == "2684"')
    pod.write_text(claim(f"[{exactly(selector)}]") + POD)
    rule = "{select: {address: '0000:01:00.0'}, state: on-demand}"
    layout.write_text(f"{{version: vfiomgr/v1, layouts: {{a: {{devices: [{rule}]}}}}}}")
    command = ("--root", str(host.root), "check", "pod", str(pod))
    refused = run(*command)
    assert refused.status == 1
    assert "on nvidia, and not offered to claims" in refused.stdout
    allowed = run(*command, "--with-layout", str(layout))
    assert allowed.status == 0
    assert "claim gpu: 0000:01:00.0" in allowed.stdout

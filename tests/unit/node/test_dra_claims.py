"""ResourceClaims as the API server sends them, and errors that name the claim and the field."""

from __future__ import annotations

from typing import Any

import pytest

from vfiomgr.errors import Refusal, UsageError
from vfiomgr.node.dra.claims import POD_CLAIM_NAME, parameters_of, read_claim
from vfiomgr.node.dra.model import AllocatedDevice, Claim, Parameters

POOLS = {"node-1", "node-1/gpu-0000-41-00-0"}


def result(device: str, request: str = "gpu", **fields: Any) -> dict[str, Any]:
    return {
        "driver": "vfiomgr.io",
        "pool": "node-1",
        "device": device,
        "request": request,
        **fields,
    }


def entry(source: str, *requests: str, driver: str = "vfiomgr.io", **said: Any) -> dict[str, Any]:
    opaque = {"driver": driver, "parameters": said}
    return {"source": source, "requests": list(requests), "opaque": opaque}


def document(*results: Any, config: Any = None, **metadata: Any) -> dict[str, Any]:
    devices = {"results": list(results), **({"config": config} if config is not None else {})}
    return {
        "metadata": {"namespace": "ml", "name": "train", "uid": "u1", **metadata},
        "status": {"allocation": {"devices": devices}},
    }


def as_said(parameters: object, _where: str) -> Parameters:
    assert isinstance(parameters, dict)
    return Parameters(**parameters)


def read(found: dict[str, Any]) -> Claim:
    return read_claim(found, POOLS, as_said)


def test_the_devices_of_this_driver_are_read() -> None:
    other = {**result("nic-0"), "driver": "nic.example.com", "pool": "elsewhere"}
    claim = read(document(result("pci-a"), other, result("pci-b", "alternatives/big")))
    assert claim == Claim(
        "ml",
        "train",
        "u1",
        devices=(
            AllocatedDevice("gpu", "node-1", "pci-a"),
            AllocatedDevice("alternatives/big", "node-1", "pci-b"),
        ),
    )


def test_the_name_in_the_pod_is_read_from_the_annotation() -> None:
    claim = read(document(result("pci-a"), annotations={POD_CLAIM_NAME: "accelerator"}))
    assert claim.pod_claim_name == "accelerator"


def test_parameters_of_the_class_come_first() -> None:
    config = [
        entry("FromClaim", "gpu", form="cdev"),
        entry("FromClass", reset=True),
        entry("FromClaim", driver="nic.example.com", unknown=1),
    ]
    claim = read(document(result("pci-a"), config=config))
    expected = (Parameters(reset=True), Parameters(("gpu",), form="cdev"))
    assert claim.parameters == expected
    assert parameters_of(claim, "gpu") == expected[1]
    assert parameters_of(claim, "gpu/big") == expected[1]
    assert parameters_of(claim, "other") == expected[0]


def test_without_parameters_the_defaults_apply() -> None:
    assert parameters_of(read(document(result("pci-a"))), "gpu") == Parameters()


def test_errors_of_parameters_name_their_place() -> None:
    def reject(_parameters: object, where: str) -> Parameters:
        raise UsageError(where)

    with pytest.raises(UsageError) as told:
        read_claim(document(config=[entry("FromClass", reset=1)]), POOLS, reject)
    place = "claim ml/train: status.allocation.devices.config[0].opaque.parameters"
    assert told.value.message == place


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            document(result("a"), result("b", pool="node-2")),
            "status.allocation.devices.results[1].pool: this node does not have the pool node-2",
        ),
        (
            document(result("a", adminAccess=True)),
            (
                "status.allocation.devices.results[0].adminAccess: a VFIO device cannot be shared "
                "with an administrator"
            ),
        ),
        (
            {"metadata": {"namespace": "ml", "name": "train", "uid": "u1"}, "status": {}},
            "status.allocation: it is missing",
        ),
    ],
)
def test_claims_that_this_node_cannot_prepare_are_refused(
    found: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refusal) as told:
        read(found)
    assert told.value.message == f"cannot prepare claim ml/train: {message}"
    assert told.value.hint


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (document("x"), "status.allocation.devices.results[0]: expected an object, not 'x'"),
        (
            document(result("")),
            "status.allocation.devices.results[0].device: expected a string, not ''",
        ),
        (
            document(result("a"), config={}),
            "status.allocation.devices.config: expected a list, not {}",
        ),
        (
            document(result("a"), config=[{**entry("FromClass"), "requests": [1]}]),
            "status.allocation.devices.config[0].requests: expected a list of strings",
        ),
        (
            document(result("a"), config=[entry("FromHere")]),
            (
                "status.allocation.devices.config[0].source: expected FromClass or FromClaim, "
                "not 'FromHere'"
            ),
        ),
        (document(uid=7), "metadata.uid: expected a string, not 7"),
        (
            {**document(), "status": {"allocation": {"devices": 3}}},
            "status.allocation.devices: expected an object, not 3",
        ),
    ],
)
def test_fields_of_the_wrong_type_are_named(found: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as told:
        read(found)
    assert told.value.message == f"cannot read claim ml/train: {message}"


@pytest.mark.parametrize("metadata", [None, {}, {"name": "x"}, []])
def test_a_document_without_a_name_is_rejected(metadata: object) -> None:
    with pytest.raises(UsageError, match="cannot read claim"):
        read({"metadata": metadata, "status": {}})

"""ResourceClaims as the API server sends them, and errors that name the claim and the field."""

from __future__ import annotations

from typing import Any

import pytest

from vfiomgr.errors import Refusal, UsageError
from vfiomgr.node.dra.claims import API_VERSION, KIND, POD_CLAIM_NAME, parameters_of, read_claim
from vfiomgr.node.dra.model import AllocatedDevice, Claim, Parameters


def result(device: str, request: str = "gpu", **fields: Any) -> dict[str, Any]:
    return {
        "driver": "vfiomgr.io",
        "pool": "node-1",
        "device": device,
        "request": request,
        **fields,
    }


def entry(source: str, *requests: str, driver: str = "vfiomgr.io", **said: Any) -> dict[str, Any]:
    parameters = {"apiVersion": API_VERSION, "kind": KIND, **said}
    opaque = {"driver": driver, "parameters": parameters}
    return {"source": source, "requests": list(requests), "opaque": opaque}


def document(*results: Any, config: Any = None, **metadata: Any) -> dict[str, Any]:
    devices = {"results": list(results), **({"config": config} if config is not None else {})}
    return {
        "metadata": {"namespace": "ml", "name": "train", "uid": "u1", **metadata},
        "status": {"allocation": {"devices": devices}},
    }


def without(status: dict[str, Any]) -> dict[str, Any]:
    """A claim that is not allocated."""
    return {"metadata": document()["metadata"], **status}


NOT_ALLOCATED: tuple[dict[str, Any], ...] = (
    {},
    {"status": None},
    {"status": {}},
    {"status": {"allocation": None}},
    {"status": {"allocation": {}}},
)


def read(found: dict[str, Any]) -> Claim:
    return read_claim(found, "node-1")


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


def test_of_other_drivers_only_the_driver_is_read() -> None:
    theirs = {"driver": "gpu.nvidia.com", "request": 7, "adminAccess": "yes"}
    config = [
        {**entry("FromPod", driver="gpu.nvidia.com"), "requests": 7},
        {"source": "FromHere", "opaque": {"driver": "gpu.nvidia.com", "parameters": 3}},
        {"opaque": {"parameters": {}}},
        {"source": "FromClass", "opaque": None, "another": {}},
        entry("FromClaim", form="cdev"),
    ]
    claim = read(document(theirs, result("pci-a"), config=config))
    assert claim.devices == (AllocatedDevice("gpu", "node-1", "pci-a"),)
    assert claim.parameters == (Parameters(form="cdev"),)


def test_null_is_absent() -> None:
    found = document(result("pci-a", adminAccess=None), annotations=None)
    assert read(found) == read(document(result("pci-a")))
    devices = found["status"]["allocation"]["devices"]
    devices["config"] = [{**entry("FromClass", reset=True), "requests": None}]
    assert read(found).parameters == (Parameters(reset=True),)
    devices |= {"results": None, "config": None}
    assert read(found) == Claim("ml", "train", "u1")
    found["status"]["allocation"] = {"devices": None, "allocationTimestamp": "2026-01-01T00:00:00Z"}
    assert read(found) == Claim("ml", "train", "u1")


@pytest.mark.parametrize("metadata", [None, {}, {"name": "x"}, [], "x", 7])
def test_a_document_without_a_name_is_rejected(metadata: object) -> None:
    with pytest.raises(UsageError, match="cannot read claim"):
        read({"metadata": metadata, "status": {}})


def test_a_document_without_metadata_is_rejected() -> None:
    with pytest.raises(UsageError) as told:
        read({})
    assert told.value.message == "cannot read claim ?/?: metadata: the field is missing"


def test_errors_of_parameters_name_their_place() -> None:
    with pytest.raises(UsageError) as told:
        read(document(config=[entry("FromClass", reset=1)]))
    place = "claim ml/train: status.allocation.devices.config[0].opaque.parameters"
    expected = f"cannot read the parameters of {place}: reset: Expected `bool`, got `int`"
    assert told.value.message == expected


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
        *((without(status), "status.allocation: it is missing") for status in NOT_ALLOCATED),
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
        (
            document({**result("a"), "driver": None}),
            "status.allocation.devices.results.0.driver: Expected `str`, got `null`",
        ),
        (
            document(config=[{**entry("FromClass"), "opaque": 7}]),
            "status.allocation.devices.config.0.opaque: Expected `object | null`, got `int`",
        ),
        (document("x"), "status.allocation.devices.results.0: Expected `object`, got `str`"),
        (
            document(result("")),
            "status.allocation.devices.results.0.device: Expected `str` of length >= 1",
        ),
        (
            document(result("a"), config={}),
            "status.allocation.devices.config: Expected `array | null`, got `object`",
        ),
        (
            document(result("a"), config=[{**entry("FromClass"), "requests": [1]}]),
            "status.allocation.devices.config.0.requests.0: Expected `str`, got `int`",
        ),
        (
            document(result("a"), config=[entry("FromHere")]),
            "status.allocation.devices.config.0.source: Invalid enum value 'FromHere'",
        ),
        (document(uid=7), "metadata.uid: Expected `str`, got `int`"),
        (
            {**document(), "status": {"allocation": {"devices": 3}}},
            "status.allocation.devices: Expected `object | null`, got `int`",
        ),
    ],
)
def test_fields_of_the_wrong_type_are_named(found: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as told:
        read(found)
    assert told.value.message == f"cannot read claim ml/train: {message}"

"""The parameters of claims: what is read, and why others are refused."""

from __future__ import annotations

import pytest

from vfiomgr.errors import UsageError
from vfiomgr.node.dra.claims import API_VERSION, KIND, read_parameters
from vfiomgr.node.dra.model import Parameters

HEAD = {"apiVersion": API_VERSION, "kind": KIND}
WHERE = "claim research/gpu"


@pytest.mark.parametrize(
    ("settings", "read"),
    [
        ({}, Parameters()),
        ({"reset": True}, Parameters(reset=True)),
        ({"form": "cdev"}, Parameters(form="cdev")),
        ({"form": "group", "reset": False}, Parameters(form="group")),
    ],
)
def test_parameters_are_read(settings: dict[str, object], read: Parameters) -> None:
    assert read_parameters(HEAD | settings, WHERE) == read


@pytest.mark.parametrize(
    ("document", "cause", "remedy"),
    [
        ([], "Expected `object`", f"set apiVersion: {API_VERSION} and kind: {KIND}"),
        ({}, "apiVersion: the field is missing", f"set apiVersion: {API_VERSION}"),
        (HEAD | {"apiVersion": "vfiomgr.io/v2"}, "apiVersion: Invalid", API_VERSION),
        (HEAD | {"kind": "GpuConfig"}, "kind: Invalid", KIND),
        (HEAD | {"rset": True}, "rset: unknown field", "did you mean reset?"),
        (HEAD | {"colour": "red"}, "colour: unknown field", "use reset and form only"),
        (HEAD | {"reset": "yes"}, "reset: Expected `bool`", "reset is true or false"),
        (HEAD | {"form": "both"}, "form: Invalid enum value 'both'", "form is group or cdev"),
        (HEAD | {"numaPolicy": "single"}, "numaPolicy: unknown field", "matchAttribute"),
    ],
)
def test_a_refusal_names_the_claim_the_field_and_the_remedy(
    document: object, cause: str, remedy: str
) -> None:
    with pytest.raises(UsageError) as refused:
        read_parameters(document, WHERE)
    assert refused.value.message.startswith(f"cannot read the parameters of {WHERE}: ")
    assert cause in refused.value.message
    assert remedy in (refused.value.hint or "")

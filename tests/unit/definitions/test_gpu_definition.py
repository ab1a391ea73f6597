from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.devices import pci_device
from vfiomgr.definitions.model import (
    DefinitionFacts,
    FunctionDefinition,
    GpuDefinition,
    gpu_file,
    parse_gpu_definition,
    render_gpu_definition,
)
from vfiomgr.documents.text import TextFile
from vfiomgr.errors import InvalidDocument
from vfiomgr.pci.model import PciAddress

GPU = pci_device().identity
FIRST, SECOND = PciAddress.parse("0000:04:00.4"), PciAddress.parse("0000:04:00.5")
FUNCTION = FunctionDefinition(FIRST, "1148", "NVIDIA L40S-2Q", "frame_rate_limiter=0", "auto")
DEFINITION = GpuDefinition("vfiomgr/v1", GPU, 32, (FUNCTION,), heterogeneous=True, mig=("1g.6gb",))


def file(document: object, address: PciAddress = GPU.address) -> TextFile:
    text = document if isinstance(document, str) else json.dumps(document)
    return TextFile(gpu_file(address), text)


def document(**changes: Any) -> dict[str, Any]:
    found = json.loads(render_gpu_definition(DEFINITION))
    assert isinstance(found, dict)
    return found | changes


def test_a_document_is_read_as_it_was_written() -> None:
    text = render_gpu_definition(DEFINITION)
    read = parse_gpu_definition(file(text))
    assert read == DEFINITION
    assert render_gpu_definition(read) == text
    assert list(document()) == [
        *("version", "gpu", "virtual_functions", "vgpus", "heterogeneous", "mig")
    ]
    assert document()["vgpus"][0]["address"] == "0000:04:00.4"


def test_what_may_be_left_out_is_as_it_comes() -> None:
    vgpus = [{"address": "0000:04:00.4", "type_id": "1148"}]
    whole = document(vgpus=vgpus)
    del whole["heterogeneous"], whole["mig"]
    read = parse_gpu_definition(file(whole))
    assert (read.heterogeneous, read.mig) == (False, None)
    assert read.vgpus == (FunctionDefinition(FIRST, "1148"),)
    assert read.autostarting == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": "vfiomgr/v2"}, "version: Invalid enum value"),
        ({"surprise": 1}, "surprise: unknown field"),
        ({"virtual_functions": "many"}, "virtual_functions: "),
        ({"virtual_functions": 0}, "1 vGPUs need more than 0 functions"),
        ({"gpu": {}}, "gpu.address: the field is missing"),
        ({"vgpus": [{"address": "04", "type_id": "1"}]}, "vgpus.0.address: "),
        ({"vgpus": [{"address": "04:00.4", "type_id": "nvidia-1"}]}, "invalid type number"),
        ({"vgpus": [{"address": "04:00.4", "type_id": "0"}]}, "invalid type number"),
        (
            {"vgpus": [{"address": "04:00.4", "type_id": "1"}] * 2},
            "a virtual function is defined twice",
        ),
        ({"vgpus": [{"address": "04:00.4", "type_id": "1", "uuid": ""}]}, "vgpus.0.uuid: "),
    ],
)
def test_a_document_that_fits_not_is_rejected_with_the_place(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidDocument, match=reason):
        parse_gpu_definition(file(document(**changes)))


def test_the_name_of_a_file_is_its_gpus() -> None:
    with pytest.raises(
        InvalidDocument, match=r"the file name does not match the GPU address 0000:04:00\.0"
    ):
        parse_gpu_definition(file(document(), FIRST))


def test_one_file_that_says_nothing_hides_no_other() -> None:
    broken = file("{", FIRST)
    facts = DefinitionFacts((broken, file(document())))
    assert facts.gpus == (DEFINITION,)
    assert [problem.path for problem in facts.problems] == [broken.path]


def test_functions_are_kept_in_their_order_and_the_last_takes_its_gpu_along() -> None:
    second = FunctionDefinition(SECOND, "1149")
    both = replace(DEFINITION, vgpus=(second,)).with_function(FUNCTION)
    assert both.vgpus == (FUNCTION, second)
    assert both.with_function(replace(second, start="auto")).autostarting[1].address == SECOND
    assert both.function(SECOND) == second
    only = both.without(FIRST)
    assert only is not None
    assert only.vgpus == (second,)
    assert only.without(SECOND) is None

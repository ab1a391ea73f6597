"""The files that describe the devices of a claim, and where containers see them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from vfiomgr.containers.cdi.document import render_specification
from vfiomgr.host.tree import HostTree
from vfiomgr.node.answers import specification_of
from vfiomgr.node.dra.model import Claim, PreparedClaim, PreparedDevice
from vfiomgr.node.dra.records import (
    attributes_of,
    metadata_name,
    remove_metadata,
    write_metadata,
)
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.node.dra.model import AttributeValue

GPU = "0000:41:00.0"
MDEV = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
PLUGIN = HostPath("/var/lib/kubelet/plugins/vfiomgr.io")
FILES = PLUGIN / "dra-device-metadata/ml_train"
CLAIM = Claim("ml", "train", "u1")


def device(request: str, unit: str = GPU) -> PreparedDevice:
    return PreparedDevice(request, "node-1", f"dev-{request.partition('/')[0]}", unit, (), ())


def written(tree: HostTree, request: str) -> dict[str, Any]:
    text = tree.read_text(FILES / request / "metadata.json")
    assert text is not None
    found: dict[str, Any] = json.loads(text)
    return found


def test_kubevirt_finds_the_address_or_the_uuid() -> None:
    published = {"model": "A40", "resource.kubernetes.io/pciBusID": GPU}
    function = "0000:41:00.4"
    assert attributes_of(published, function)["resource.kubernetes.io/pciBusID"] == function
    assert attributes_of(published, MDEV) == {**published, "mdevUUID": MDEV}


def test_each_request_has_a_file(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    attributes: dict[str, AttributeValue] = {"model": "A40", "numa": 1, "viable": True}
    found = [(device("gpu"), attributes), (device("net/fast"), {})]
    write_metadata(tree, CLAIM, found, PLUGIN)
    assert written(tree, "gpu") == {
        "kind": "DeviceMetadata",
        "apiVersion": "metadata.resource.k8s.io/v1alpha1",
        "metadata": {"name": "train", "namespace": "ml", "uid": "u1"},
        "requests": [
            {
                "name": "gpu",
                "devices": [
                    {
                        "driver": "vfiomgr.io",
                        "pool": "node-1",
                        "name": "dev-gpu",
                        "attributes": {
                            "model": {"string": "A40"},
                            "numa": {"int": 1},
                            "viable": {"bool": True},
                        },
                    }
                ],
            }
        ],
    }
    assert [each["name"] for each in written(tree, "net")["requests"]] == ["net/fast"]


def test_two_devices_of_a_request_are_in_one_file(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    write_metadata(tree, CLAIM, [(device("gpu"), {}), (device("gpu", MDEV), {})], PLUGIN)
    (request,) = written(tree, "gpu")["requests"]
    assert len(request["devices"]) == 2


def test_the_name_in_the_pod_is_said_and_is_in_the_path(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    claim = replace(CLAIM, pod_claim_name="accelerator")
    (mounting,) = write_metadata(tree, claim, [(device("gpu"), {})], PLUGIN)
    assert written(tree, "gpu")["podClaimName"] == "accelerator"
    (mount,) = mounting.edits.mounts
    assert mount.container_path == (
        "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/accelerator/gpu/"
        "vfiomgr.io-metadata.json"
    )


def test_containers_see_the_file_of_their_request(tmp_path: Path) -> None:
    none: dict[str, AttributeValue] = {}
    found = [(device(request), none) for request in ("gpu", "net/fast", "gpu")]
    devices = write_metadata(HostTree(tmp_path), CLAIM, found, PLUGIN)
    assert [f"vfiomgr.io/metadata={each.name}" for each in devices] == [
        metadata_name("u1", "gpu"),
        metadata_name("u1", "net/fast"),
    ]
    rendered = json.loads(render_specification(specification_of("vfiomgr.io/metadata", devices)))
    assert rendered["devices"][1]["containerEdits"]["mounts"] == [
        {
            "hostPath": f"{FILES}/net/metadata.json",
            "containerPath": "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/train/"
            "net/vfiomgr.io-metadata.json",
            "options": ["ro", "bind", "nosuid", "nodev", "noexec"],
        }
    ]


def test_nothing_is_left_of_a_claim(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    devices = (device("gpu"), device("net/fast"))
    write_metadata(tree, CLAIM, [(each, {}) for each in devices], PLUGIN)
    write_metadata(tree, replace(CLAIM, name="other"), [(devices[0], {})], PLUGIN)
    claim = PreparedClaim("ml", "train", "u1", "boot", devices)
    remove_metadata(tree, claim, PLUGIN)
    assert tree.children(FILES.parent) == ["ml_other"]
    remove_metadata(tree, claim, PLUGIN)


def test_further_functions_have_files_by_which_kubevirt_finds_them(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    card = replace(device("gpu"), functions=("0000:41:00.1", "0000:41:00.2"))
    other = device("gpu-function-2", "0000:42:00.0")
    mountings = write_metadata(tree, CLAIM, [(card, {"model": "A40"}), (other, {})], PLUGIN)
    assert [request["name"] for request in written(tree, "gpu")["requests"]] == ["gpu"]
    (request,) = written(tree, "gpu-function-1")["requests"]
    (found,) = request["devices"]
    assert (request["name"], found["name"]) == ("gpu-function-1", "dev-gpu")
    assert found["attributes"] == {"resource.kubernetes.io/pciBusID": {"string": "0000:41:00.1"}}
    (real,) = written(tree, "gpu-function-2")["requests"]  # of the claim itself
    assert real["devices"][0]["name"] == "dev-gpu-function-2"
    paths = [[m.container_path.split("/")[-2] for m in each.edits.mounts] for each in mountings]
    assert paths == [["gpu", "gpu-function-1"], ["gpu-function-2"]]
    remove_metadata(tree, PreparedClaim("ml", "train", "u1", "boot", (card, other)), PLUGIN)
    assert tree.children(FILES.parent) == []


def test_a_request_of_several_devices_has_no_further_functions(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    card = replace(device("gpu"), functions=("0000:41:00.1",))
    write_metadata(tree, CLAIM, [(card, {}), (card, {})], PLUGIN)
    assert tree.children(FILES) == ["gpu"]

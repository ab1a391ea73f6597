"""The bytes of messages, from the numbers of their fields in the kubelet's api.proto files."""

from __future__ import annotations

import pytest

from vfiomgr.node.kubelet import (
    CLAIM_METHODS,
    CLAIMS,
    DEVICES,
    HEALTH,
    HEALTH_METHODS,
    METHODS,
    PLUGIN_METHODS,
    PLUGINS,
    PODS,
)


def text(number: int, value: str) -> bytes:
    """A field of text, or of a message."""
    return field(number, value.encode())


def field(number: int, value: bytes) -> bytes:
    """A field with a length (wire type 2)."""
    return bytes((number << 3 | 2, len(value))) + value


def number(position: int, value: int) -> bytes:
    """A field with a small number or a truth (wire type 0)."""
    return bytes((position << 3, value))


NODE = field(1, number(1, 3))
DEVICE = text(1, "0000:01:00.0") + text(2, "Healthy") + field(3, NODE)
MOUNT = text(1, "/c") + text(2, "/h") + number(3, 1)
SPEC = text(1, "/c") + text(2, "/h") + text(3, "rw")
ENTRY = text(1, "KEY") + text(2, "VALUE")
ANSWER = b"".join(
    (field(1, ENTRY), field(2, MOUNT), field(3, SPEC), field(4, ENTRY), field(5, text(1, "k=n")))
)
OPTIONS = number(1, 1) + number(2, 1)
PREPARED = text(1, "r") + text(2, "p") + text(3, "d") + text(4, "k=n")
CONTAINER = text(1, "c0") + field(2, text(1, "vfiomgr.io/A40") + text(2, "a") + text(2, "b"))


@pytest.mark.parametrize(
    ("message", "data"),
    [
        (
            DEVICES.RegisterRequest(
                version="v1beta1",
                endpoint="x.sock",
                resource_name="vfiomgr.io/A40",
                options={
                    "pre_start_required": True,
                    "get_preferred_allocation_available": True,
                },
            ),
            text(1, "v1beta1") + text(2, "x.sock") + text(3, "vfiomgr.io/A40") + field(4, OPTIONS),
        ),
        (
            DEVICES.ListAndWatchResponse(
                devices=[
                    {
                        "ID": "0000:01:00.0",
                        "health": "Healthy",
                        "topology": {"nodes": [{"ID": 3}]},
                    }
                ]
            ),
            field(1, DEVICE),
        ),
        (
            DEVICES.AllocateResponse(
                container_responses=[
                    {
                        "envs": {"KEY": "VALUE"},
                        "mounts": [{"container_path": "/c", "host_path": "/h", "read_only": True}],
                        "devices": [
                            {"container_path": "/c", "host_path": "/h", "permissions": "rw"}
                        ],
                        "annotations": {"KEY": "VALUE"},
                        "cdi_devices": [{"name": "k=n"}],
                    }
                ]
            ),
            field(1, ANSWER),
        ),
        (
            DEVICES.AllocateRequest(container_requests=[{"devices_ids": ["a", "b"]}]),
            field(1, text(1, "a") + text(1, "b")),
        ),
        (DEVICES.PreStartContainerRequest(devices_ids=["a"]), text(1, "a")),
        (
            DEVICES.PreferredAllocationRequest(
                container_requests=[
                    {
                        "available_deviceIDs": ["a"],
                        "must_include_deviceIDs": ["b"],
                        "allocation_size": 2,
                    }
                ]
            ),
            field(1, text(1, "a") + text(2, "b") + number(3, 2)),
        ),
        (
            DEVICES.PreferredAllocationResponse(container_responses=[{"deviceIDs": ["a"]}]),
            field(1, text(1, "a")),
        ),
        (
            PODS.ListPodResourcesResponse(
                pod_resources=[
                    {
                        "name": "cuda",
                        "namespace": "default",
                        "containers": [
                            {
                                "name": "c0",
                                "devices": [
                                    {
                                        "resource_name": "vfiomgr.io/A40",
                                        "device_ids": ["a", "b"],
                                    }
                                ],
                            }
                        ],
                    }
                ]
            ),
            field(1, text(1, "cuda") + text(2, "default") + field(3, CONTAINER)),
        ),
        (
            CLAIMS.NodePrepareResourcesRequest(
                claims=[{"namespace": "default", "uid": "7", "name": "gpu"}]
            ),
            field(1, text(1, "default") + text(2, "7") + text(3, "gpu")),
        ),
        (
            CLAIMS.NodePrepareResourcesResponse(
                claims={
                    "7": CLAIMS.NodePrepareResourceResponse(
                        devices=[
                            {
                                "request_names": ["r"],
                                "pool_name": "p",
                                "device_name": "d",
                                "cdi_device_ids": ["k=n"],
                            }
                        ],
                        error="e",
                    )
                }
            ),
            field(1, text(1, "7") + field(2, field(1, PREPARED) + text(2, "e"))),
        ),
        (
            CLAIMS.NodeUnprepareResourcesResponse(
                claims={"7": CLAIMS.NodeUnprepareResourceResponse(error="e")}
            ),
            field(1, text(1, "7") + field(2, text(1, "e"))),
        ),
        (
            HEALTH.NodeWatchResourcesResponse(
                devices=[
                    {
                        "device": {"pool_name": "p", "device_name": "d"},
                        "health": 2,
                        "last_updated_time": 5,
                        "health_check_timeout_seconds": 60,
                        "message": "m",
                    }
                ]
            ),
            field(
                1,
                field(1, text(1, "p") + text(2, "d"))
                + number(2, 2)
                + number(3, 5)
                + number(4, 60)
                + text(5, "m"),
            ),
        ),
        (
            PLUGINS.PluginInfo(
                type="DRAPlugin", name="n", endpoint="/s", supported_versions=["a", "b"]
            ),
            text(1, "DRAPlugin") + text(2, "n") + text(3, "/s") + text(4, "a") + text(4, "b"),
        ),
        (
            PLUGINS.RegistrationStatus(plugin_registered=True, error="e"),
            number(1, 1) + text(2, "e"),
        ),
    ],
)
def test_fields_have_the_kubelets_numbers(message: object, data: bytes) -> None:
    assert message.SerializeToString() == data  # type: ignore[attr-defined]
    assert type(message).FromString(data) == message  # type: ignore[attr-defined]


def test_fields_of_later_kubelets_are_ignored() -> None:
    topology = field(3, field(1, number(1, 1)))
    memory = field(4, text(1, "hugepages-2Mi") + number(2, 7))
    devices = text(1, "vfiomgr.io/A40") + text(2, "a") + topology
    later = text(1, "cuda") + field(3, text(1, "c0") + field(2, devices) + number(3, 5) + memory)
    pod = PODS.ListPodResourcesResponse.FromString(field(1, later)).pod_resources[0]
    assert list(pod.containers[0].devices[0].device_ids) == ["a"]


@pytest.mark.parametrize(
    ("messages", "methods"),
    [
        (DEVICES, METHODS),
        (CLAIMS, CLAIM_METHODS),
        (HEALTH, HEALTH_METHODS),
        (PLUGINS, PLUGIN_METHODS),
    ],
)
def test_each_method_has_its_messages(
    messages: object, methods: dict[str, tuple[str, str]]
) -> None:
    for request, response in methods.values():
        assert hasattr(messages, request)
        assert hasattr(messages, response)

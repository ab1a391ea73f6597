"""Claims of pods that the scheduler is about to place on this node, before the kubelet knows them.

A device with binding conditions (KEP-5007) is allocated to a claim, then the scheduler waits, for
600 s at most, until the driver reports in the status of the claim that it is ready, and only then
places the pod. If it has failed, the claim is allocated again, perhaps on another node.

The API selects no claims by their node. But before the scheduler waits, it writes the name of the
node to `status.nominatedNodeName` of the pod (KEP-5278, Kubernetes 1.35), by which the API selects
pods. The field is removed when the pod is placed, or cannot be. An agent therefore watches few
pods, and reads their claims by name. It does so again until they are allocated: that comes after
the name of the node, and after a preemption without any change of the pod.

A claim that is deallocated or deleted before the kubelet has seen its pod is never unprepared by
the kubelet. Such claims are therefore read until the kubelet asks for them.

Sources: bindingCycle in pkg/scheduler/schedule_one.go, and PreBind and PostFilter of the plugin
dynamicresources there (kubernetes/kubernetes 1.36).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from vfiomgr.errors import Refusal, UsageError, VfiomgrError
from vfiomgr.node.api_server import (
    CLAIM_STATUS,
    CLAIMS,
    CONFLICT,
    NOT_FOUND,
    PODS,
    ApiError,
    Trouble,
)
from vfiomgr.node.dra.claims import is_of_node, read_claim
from vfiomgr.node.dra.model import BIND_FAILED, BOUND, DRIVER
from vfiomgr.node.dra.publisher import Mirror
from vfiomgr.node.processes import BinderAway, StillRunning
from vfiomgr.node.serving import text_of

if TYPE_CHECKING:
    from vfiomgr.node.api_server import Api, Object
    from vfiomgr.node.dra.model import AllocatedDevice, Claim, PreparedClaim, PreparedDevice

_Device = tuple[str, str]
"""A pool and a device."""
_SOON, _LATE = 0.5, 5.0
"""Seconds until a claim is read again, doubled each time; the scheduler looks each 5 s."""


class Nominated:
    """Has claims prepared before the kubelet asks, and released if it never will.

    `known` are the claims that have devices of this node, prepared so or by the kubelet. `prepare`
    raises VfiomgrError if a claim cannot be prepared, and leaves nothing then. With `is_on` False
    only what was prepared is released.
    `denied` is called if the right to list pods is found to be missing, or there again.
    """

    def __init__(  # noqa: PLR0913 - each is a part of the agent
        self,
        api: Api,
        node: str,
        *,
        is_on: bool,
        known: Callable[[], Iterable[PreparedClaim]],
        prepare: Callable[[Claim], Awaitable[object]],
        release: Callable[[PreparedClaim], Awaitable[object]],
        denied: Callable[[bool], object],
        tell: Callable[[str], None],
    ) -> None:
        self._api, self._node, self._is_on = api, node, is_on
        self._known, self._prepare, self._release = known, prepare, release
        self._tell = tell
        self._wake = asyncio.Event()
        fields = {"status.nominatedNodeName": node}
        self._pods = Mirror(api, PODS, fields, tell, self._wake.set)
        self._pods.report_denied = denied

    async def run(self) -> None:
        """Follow pods and claims until the task is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self._is_on:
                tasks.create_task(self._pods.run())
            followed: dict[str, asyncio.Task[None]] = {}
            while True:
                followed = {name: task for name, task in followed.items() if not task.done()}
                for name in self._names - followed.keys():
                    followed[name] = tasks.create_task(self._follow(name))
                await self._wake.wait()
                self._wake.clear()

    @property
    def _early(self) -> tuple[PreparedClaim, ...]:
        """The claims that were prepared before the kubelet asked, which it has not done since."""
        return tuple(claim for claim in self._known() if claim.is_early)

    @property
    def _names(self) -> set[str]:
        """The claims to read, NAMESPACE/NAME: those of the pods, and those that are to be ended."""
        names = {name for pod in self._pods.objects.values() for name in claims_of(pod)}
        return names | {str(claim) for claim in self._early}

    async def _follow(self, name: str) -> None:
        """Read a claim while it matters."""
        trouble, pause = Trouble(self._tell), _SOON
        while name in self._names:
            try:
                await self._tend(name)
            except VfiomgrError as error:
                trouble.report(f"claim {name}, before its pod is placed: {text_of(error)}")
            else:
                trouble.end()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LATE)
        self._wake.set()  # it may matter again since

    async def _tend(self, name: str) -> None:
        """Do what the present state of a claim demands.

        Raises:
            VfiomgrError: it could not be done, and is tried again.
        """
        namespace, _, own = name.partition("/")
        document: Object = {}
        try:
            document = await self._api.get(CLAIMS, own, namespace)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
        for record in self._early:
            if str(record) == name and not self._has(document, record):
                await self._release(record)
        awaited = _awaited(document, self._node)
        if awaited and not self._is_in_use(document, awaited):
            await self._bind(document, awaited)

    def _has(self, document: Object, record: PreparedClaim) -> bool:
        """Whether a claim still has the devices that were prepared for it."""
        try:
            claim = read_claim(document, self._node) if document else None
        except (Refusal, UsageError):
            return False
        if claim is None or claim.uid != record.uid:
            return False
        return _devices(claim.devices) == _devices(record.devices)

    def _is_in_use(self, document: Object, awaited: set[_Device]) -> bool:
        """Whether another claim still has a device.

        The API frees the device of a pod that is deleted by force before the kubelet has ended the
        pod and released its claim (kubernetes/kubernetes#141471).
        """
        uid = document["metadata"].get("uid")
        others = (record for record in self._known() if record.uid != uid)
        return any(not awaited.isdisjoint(_devices(record.devices)) for record in others)

    async def _bind(self, document: Object, awaited: set[_Device]) -> None:
        """Prepare a claim, and write into its status that its devices are bound, or why not."""
        condition = _condition(BOUND, "Bound", "the device is on its VFIO driver")
        try:
            await self._prepare(read_claim(document, self._node))
        except BinderAway:
            raise
        except StillRunning:
            return
        except VfiomgrError as error:
            if isinstance(error, ApiError) and error.is_passing:
                raise
            reason = "Refused" if isinstance(error, Refusal) else "Failed"
            condition = _condition(BIND_FAILED, reason, text_of(error))
        metadata, namespace = document["metadata"], document["metadata"]["namespace"]
        devices = _with_condition(document["status"], awaited, condition)
        change = {
            "metadata": {name: metadata[name] for name in ("uid", "resourceVersion")},
            "status": {"devices": devices},
        }
        try:
            await self._api.patch(CLAIM_STATUS, metadata["name"], namespace, change)
        except ApiError as error:
            if error.status not in (CONFLICT, NOT_FOUND):  # else it is read again
                raise


def claims_of(pod: Object) -> Iterator[str]:
    """The claims of a pod that is to be placed, NAMESPACE/NAME, as far as they exist."""
    metadata, spec, status = (pod.get(part) or {} for part in ("metadata", "spec", "status"))
    if spec.get("nodeName") or metadata.get("deletionTimestamp"):
        return
    made = {
        each.get("name"): each.get("resourceClaimName")
        for each in status.get("resourceClaimStatuses") or ()
    }
    extended = status.get("extendedResourceClaimStatus") or {}
    for each in (*(spec.get("resourceClaims") or ()), extended):
        if name := each.get("resourceClaimName") or made.get(each.get("name")):
            yield f"{metadata.get('namespace')}/{name}"


def _awaited(document: Object, node: str) -> set[_Device]:
    """The devices of a claim for which the scheduler waits: none was reported as bound or failed.

    It waits for those that it allocated with the condition.
    """
    status = document.get("status") or {}
    results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
    reported = {
        _key(each)
        for each in status.get("devices") or ()
        for condition in each.get("conditions") or ()
        if condition.get("type") in (BOUND, BIND_FAILED) and condition.get("status") == "True"
    }
    return {
        (each["pool"], each["device"])
        for each in results
        if each.get("driver") == DRIVER
        and is_of_node(each["pool"], node)
        and BOUND in (each.get("bindingConditions") or ())
        and _key(each) not in reported
    }


def _with_condition(
    status: Object, devices: set[_Device], condition: dict[str, str]
) -> list[dict[str, Any]]:
    """The status of all devices of a claim, of which these have a new condition."""
    found = {_key(each): each for each in status.get("devices") or ()}
    for pool, device in sorted(devices):
        own = {"driver": DRIVER, "pool": pool, "device": device}
        before = found.get(_key(own), own)
        others = (c for c in before.get("conditions") or () if c.get("type") != condition["type"])
        found[_key(own)] = {**before, "conditions": [*others, condition]}
    return list(found.values())


def _condition(kind: str, reason: str, message: str) -> dict[str, str]:
    """A condition that is true (metav1.Condition)."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "type": kind,
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": now,
    }


def _key(device: Object) -> tuple[object, ...]:
    """What distinguishes devices in the status of a claim."""
    return tuple(device.get(part) for part in ("driver", "pool", "device", "shareID"))


def _devices(devices: Iterable[AllocatedDevice | PreparedDevice]) -> set[_Device]:
    return {(each.pool, each.device) for each in devices}

"""Annotations that change Kata's configuration for one pod.

Annotations in src/runtime/virtcontainers/pkg/annotations/annotations.go, addAnnotations in
src/runtime/pkg/oci/utils.go, update_config_by_annotation in
src/libs/kata-types/src/annotations/mod.rs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from vfiomgr.kata.explain.context import COLD_PLUG, HOT_PLUG, HYPERVISOR_ANNOTATION
from vfiomgr.kata.explain.model import chain_break
from vfiomgr.kata.explain.pod import KATA_ANNOTATION
from vfiomgr.kata.model import LEAST_GUEST_MIB, MAX_PORTS
from vfiomgr.kata.settings import VFIO_MODES
from vfiomgr.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.kata.explain.context import PodContext
    from vfiomgr.kata.keys import KeyType
    from vfiomgr.kata.settings import KataSettings

_VFIO_MODE = f"{KATA_ANNOTATION}runtime.vfio_mode"
_PORTS, _PORT_LIMIT = ("pcie_root_port", "pcie_switch_port"), Version(3, 17)
"""Annotations that runtime-rs limits to MAX_PORTS, and the release that introduced the check."""
_KERNEL_PARAMS, _MEMORY = "kernel_params", "default_memory"
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}


def annotation_breaks(situation: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """What Kata refuses or ignores in annotations, except COLD_PLUG and HOT_PLUG."""
    for name, value in _hypervisor_annotations(situation):
        yield from _hypervisor_breaks(situation, settings, name, value)
    mode = situation.pod.annotation(_VFIO_MODE)
    if mode is None:
        return
    remedy = f"remove the annotation {_VFIO_MODE}: containers need guest-kernel"
    if mode not in VFIO_MODES:
        yield chain_break(
            "kata-vfio-mode",
            _VFIO_MODE,
            f"invalid vfio_mode in an annotation: {mode!r}",
            remedy,
        )
    elif mode == "vfio" and not settings.has_iommu:
        yield chain_break(
            "kata-vfio-without-iommu",
            _VFIO_MODE,
            "vfio_mode is annotated as 'vfio', but enable_iommu is not set: VFIO in the guest "
            "needs an IOMMU there, so containers with a device do not start",
            remedy,
            is_certain=False,
        )


def with_annotations(situation: PodContext) -> PodContext:
    """The pod with the settings from its own annotations.

    Annotated ports are omitted: Kata looks for devices before it reads annotations.
    """
    settings = situation.settings
    if settings is None:
        return situation
    document: dict[str, Any] = dict(settings.document)
    for name, text in _hypervisor_annotations(situation):
        value = _value(situation, settings, name, text)
        if value is not None and settings.allows_annotation(name):
            _put(document, ("hypervisor", settings.hypervisor), name, value)
    mode = situation.pod.annotation(_VFIO_MODE)
    if mode in VFIO_MODES:
        _put(document, ("runtime",), "vfio_mode", mode)
    effective = replace(settings, document=document)
    return replace(situation, configuration=replace(situation.configuration, settings=effective))


def _hypervisor_annotations(situation: PodContext) -> Iterator[tuple[str, str]]:
    for key, value in situation.pod.annotations:
        name = key.removeprefix(HYPERVISOR_ANNOTATION)
        if name != key and name not in (COLD_PLUG, HOT_PLUG):
            yield name, value


def _hypervisor_breaks(
    situation: PodContext, settings: KataSettings, name: str, value: str
) -> Iterator[Diagnostic]:
    full, out = f"{HYPERVISOR_ANNOTATION}{name}", "remove the annotation"
    allow = f"{out}, or allow it: vfiomgr kata config --annotations {name}"
    is_taken = situation.keys.takes_annotation(situation.release, name)
    if not settings.allows_annotation(name) and not situation.is_rs:
        yield not_enabled(full, allow if is_taken else out)
    elif not settings.allows_annotation(name):
        what = f"runtime-rs ignores annotation {full}: enable_annotations does not allow it"
        yield chain_break(
            "kata-annotation-ignored", full, what, allow if is_taken else out, is_certain=False
        )
    elif not is_taken and situation.is_rs:
        yield not_known(full, out)
    elif not is_taken:
        what = f"{situation.release} does not support annotation {full}, and ignores it"
        yield chain_break("kata-annotation-unknown", full, what, out, is_certain=False)
    elif _is_refused(situation, name, value):
        what = f"the pod fails: annotation {full} has the invalid value {value!r}"
        yield chain_break("kata-annotation-value", full, what, _wanted(name, value))


def not_enabled(annotation: str, remedy: str) -> Diagnostic:
    """The Go runtime fails because of an annotation that is not allowed."""
    what = f"the pod fails with 'annotation {annotation} is not enabled': "
    what += "enable_annotations of the configuration does not allow it"
    return chain_break("kata-annotation-not-enabled", annotation, what, remedy)


def not_known(annotation: str, remedy: str) -> Diagnostic:
    """runtime-rs fails because of an annotation that is allowed but unknown."""
    what = f"runtime-rs fails: annotation {annotation} is allowed, but not supported"
    return chain_break("kata-annotation-refused", annotation, what, remedy)


def _wanted(name: str, value: str) -> str:
    if name == _MEMORY:
        return f'write MiB as a string, {LEAST_GUEST_MIB} or more: {name}: "8192"'
    return f"replace {value!r} by a valid value of {name}, or remove the annotation"


def _is_refused(situation: PodContext, name: str, text: str) -> bool:
    kind = _type(situation, name)
    if kind == "integer":
        return not text.isdecimal() or _is_out_of_range(situation, name, int(text))
    return kind == "boolean" and text.lower() not in (*_BOOLEANS, "t", "f")


def _is_out_of_range(situation: PodContext, name: str, number: int) -> bool:
    if situation.is_rs:
        has_limit = name in _PORTS and situation.release.version >= _PORT_LIMIT
        return has_limit and number > MAX_PORTS
    return name == _MEMORY and number < LEAST_GUEST_MIB


def _type(situation: PodContext, name: str) -> KeyType | None:
    form = situation.keys.form(situation.release, "hypervisor", name)
    return None if form is None else form.type


def _value(
    situation: PodContext, settings: KataSettings, name: str, text: str
) -> str | int | bool | None:
    """The value for its key; None if it sets none."""
    kind = _type(situation, name)
    is_taken = situation.keys.takes_annotation(situation.release, name)
    if not is_taken or _is_refused(situation, name, text):
        return None
    if kind == "integer":
        return int(text)
    if kind == "boolean":
        return _BOOLEANS.get(text.lower())
    if name == _KERNEL_PARAMS:
        return f"{settings.kernel_params} {text}".strip()
    return text if kind == "string" else None


def _put(document: dict[str, Any], place: tuple[str, ...], key: str, value: object) -> None:
    table = document
    for name in place:
        inner = table.get(name)
        table[name] = dict(inner) if isinstance(inner, dict) else {}
        table = table[name]
    table[key] = value

"""The settings for devices in Kata's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from vfiomgr.kata.check import check_keys, container_timeout
from vfiomgr.kata.explain.context import (
    COLD_PLUG,
    HOT_PLUG,
    HYPERVISOR_ANNOTATION,
    KUBELET_TIMEOUT,
    SETTINGS,
    annotation_breaks,
    chain_break,
    judged,
    not_enabled,
    not_known,
)
from vfiomgr.kata.facts import NO_PORT
from vfiomgr.rules.runner import RuleSet, reading, register, rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.kata.explain.context import PodContext, TraceStep
    from vfiomgr.kata.facts import KataSettings
    from vfiomgr.paths import HostPath

_UNKNOWN_KEY, _NO_IOMMU = "kata-unknown-key", "kata-vfio-without-iommu"
_DROP_IN_KEYS = ("kata-drop-in-key-ignored", "kata-drop-in-key-refused")


def configuration(context: PodContext) -> TraceStep:
    """The configuration, and how it plugs devices."""
    facts, settings = context.configuration, context.settings
    breaks = RULES.find(context)
    if settings is None:
        why = facts.problem or "no readable configuration"
        what = f"cannot find Kata's configuration: {why}"
        return judged("configuration", what, facts.looked_for, breaks, "unknown")
    read = (str(settings.path), *map(str, settings.drop_ins))
    port = settings.cold_plug
    plugged = f"devices are plugged before the guest starts ({COLD_PLUG} = {port})"
    if context.is_hot and port == NO_PORT:
        plugged = f"devices are plugged with their container ({HOT_PLUG} = {settings.hot_plug})"
    elif port == NO_PORT:
        plugged = f"no device is plugged ({COLD_PLUG} = {port})"
    what = f"{plugged}, vfio_mode {settings.vfio_mode}"
    kubelet = context.kubelet
    is_open = kubelet is not None and bool(kubelet.problem)
    if kubelet is not None and is_open:
        what += f"; the timeout of the kubelet is unknown: {kubelet.problem}"
    return judged("configuration", what, read, breaks, "unknown" if is_open else "ok")


def _unusable(context: PodContext) -> Iterator[Diagnostic]:
    """A configuration of the handler that does not exist or is not readable."""
    facts, entry = context.configuration, context.entry
    if context.settings is not None:
        return
    if facts.file is not None:
        path, remedy = facts.file.path, "correct it: every pod of the handler fails until then"
        what = f"cannot read {path}: {facts.problem}"
        yield chain_break("kata-configuration-unreadable", path, what, remedy)
    elif entry is not None and entry.config_path in facts.looked_for:
        yield chain_break(
            "kata-configuration-missing",
            entry.config_path,
            f"{entry.config_path} does not exist, but {entry.source} names it for {entry.name}: "
            "every pod of the handler fails",
            f"vfiomgr kata config --whole BASE --output {entry.config_path}",
        )


def _asked(context: PodContext) -> list[str]:
    """The device plug keys that annotations of the pod set."""
    keys = {HYPERVISOR_ANNOTATION + key: key for key in (COLD_PLUG, HOT_PLUG)}
    return [keys[name] for name, _ in context.pod.annotations if name in keys]


def _mismatched(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """A shim with a configuration of the other runtime."""
    shim, own = context.shim_runtime, settings.stated_runtime
    if shim is None or own is None or shim == own:
        return
    names = {"rs": "runtime-rs", "go": "the Go runtime"}
    has = "has a hypervisor_name" if own == "rs" else "has no hypervisor_name"
    entry = context.entry
    where = "" if entry is None else f" (vfiomgr runtime install {entry.name} --kata)"
    yield chain_break(
        "kata-configuration-other-runtime",
        settings.path,
        f"the handler has the shim of {names[shim]}, but {settings.path} is for {names[own]}: "
        f"[runtime] {has}",
        f"use a configuration for {names[shim]}, or the shim of {names[own]}{where}",
        is_certain=False,
    )


def _annotated_blindly(context: PodContext) -> Iterator[Diagnostic]:
    """Number 1, if the configuration is unknown, so that the annotation may have no effect."""
    for key in _asked(context) if context.settings is None else ():
        yield chain_break(
            "kata-annotation-alone",
            key,
            f"{key} is annotated; it has no effect unless the configuration sets it too, because "
            "Kata looks for devices before it reads annotations",
            f"set {key} in the configuration: vfiomgr kata config",
            is_certain=False,
        )


def _annotated(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """Number 1: CDI names are resolved with the file's settings, before annotations are read."""
    for key in _asked(context):
        annotation = HYPERVISOR_ANNOTATION + key
        remedy = f"remove the annotation, and set {key} in {settings.path}: vfiomgr kata config"
        allowed = settings.allows_annotation(key)
        in_file = settings.hypervisor_text(key) or NO_PORT
        if context.is_rs and allowed:
            yield not_known(annotation, remedy)
        elif not context.is_rs and not allowed:
            yield not_enabled(annotation, remedy)
        elif key == COLD_PLUG and in_file == NO_PORT:
            how = "runtime-rs ignores it" if context.is_rs else "Kata looks for devices before it"
            what = f"{key} is only set by annotation, and {how}: no device is injected"
            yield chain_break("kata-annotation-alone", annotation, what, remedy)


def _plugging(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    cold, release = settings.cold_plug, context.release
    if cold != NO_PORT and not release.knows("hypervisor", COLD_PLUG):
        first = release.first("hypervisor", COLD_PLUG)
        what = f"{release} does not support {COLD_PLUG} (added in {first})"
        yield chain_break(
            "kata-no-cold-plug", COLD_PLUG, what, "use a later Kata or its other runtime"
        )
    if cold == NO_PORT and not context.is_hot and not _asked(context):
        yield _unplugged(context, settings)


def _refused(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """What Kata refuses in the combined settings, and keys that it refuses in its own file."""
    release, name = context.release, settings.path
    (_, own), *_ = context.configuration.documents
    found = [f for f in check_keys(settings.document, release) if f.rule != _UNKNOWN_KEY]
    found += [f for f in check_keys(own, release) if f.rule == _UNKNOWN_KEY]
    for finding in found:
        if finding.severity == "blocker" or finding.rule == _NO_IOMMU:
            yield replace(finding, summary=f"{name}: {finding.summary}", evidence=())


def _unplugged(context: PodContext, settings: KataSettings) -> Diagnostic:
    hot = f"; runtime-rs ignores {HOT_PLUG}" if settings.hot_plug != NO_PORT else ""
    what = (
        f"{settings.path} sets {COLD_PLUG} = no-port{hot}: devices are not plugged into the guest"
    )
    remedy = f"set {COLD_PLUG} = root-port; vfiomgr kata config prints a drop-in for it"
    if context.is_rs:
        return chain_break("kata-not-plugged-silently", settings.path, what, remedy)
    issue = "kata-containers/kata-containers#9014"
    return chain_break("kata-not-plugged", settings.path, what, remedy, evidence=(issue,))


def _drop_ins(context: PodContext, _settings: KataSettings) -> Iterator[Diagnostic]:
    """Number 6: all files of config.d apply to all configurations beside it."""
    documents = context.configuration.documents
    for number, (path, document) in enumerate(documents[1:], 1):
        others = [*documents[:number], *documents[number + 1 :]]
        if not path.endswith(".toml"):
            yield _stray(path, document, others)
        yield from _unknown_keys(context, path, document)
        yield from _kernel_params(path, document, [d for _, d in documents[:number]])
    file = context.configuration.file
    if file is not None and file.drop_ins and file.neighbours:
        yield chain_break(
            "kata-drop-ins-shared",
            file.drop_in_directory,
            f"{file.drop_in_directory} also applies to {', '.join(map(str, file.neighbours))}: "
            "configurations in one directory share their drop-ins",
            "give the handler its own directory, as vfiomgr runtime install --kata does",
            is_certain=False,
        )


def _stray(
    path: HostPath, document: Mapping[str, Any], others: list[tuple[HostPath, Mapping[str, Any]]]
) -> Diagnostic:
    known: dict[tuple[str, ...], object] = {}
    for _, other in others:
        known.update(_leaves(other))
    changed = [key[-1] for key, value in _leaves(document) if known.get(key) != value]
    does = f"it overrides {', '.join(changed)}" if changed else "it currently changes nothing"
    return chain_break(
        "kata-drop-in-ending",
        path,
        f"{path} is read too, whatever its suffix: {does}",
        f"move it out of {path.parent}",
        is_certain=bool(changed),
    )


def _leaves(
    document: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object]]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _unknown_keys(
    context: PodContext, path: HostPath, document: Mapping[str, Any]
) -> Iterator[Diagnostic]:
    """Number 6: keys of one drop-in."""
    for found in check_keys(document, context.release, is_drop_in=True):
        if found.rule == _UNKNOWN_KEY and found.severity != "info":
            rule = _DROP_IN_KEYS[found.severity == "blocker"]
            yield replace(found, rule=rule, summary=f"{path}: {found.summary}", evidence=())


def _kernel_params(
    path: HostPath, document: Mapping[str, Any], before: list[Mapping[str, Any]]
) -> Iterator[Diagnostic]:
    """A string replaces the previous one."""
    for key, value in _leaves(document):
        if key[-1] != "kernel_params" or not isinstance(value, str):
            continue
        old = [v for d in before for k, v in _leaves(d) if k == key and isinstance(v, str)]
        lost = [word for word in (old[-1] if old else "").split() if word not in value.split()]
        if lost:
            yield chain_break(
                "kata-kernel-params-replaced",
                path,
                f"kernel_params in {path} replaces the previous one, so {' '.join(lost)} is lost",
                f"add the lost parameters to {path}",
                is_certain=False,
            )


def _timeouts(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    """Number 10."""
    key, timeout = container_timeout(context.release, settings)
    kubelet = context.kubelet
    if kubelet is not None and kubelet.problem:
        return
    limit = KUBELET_TIMEOUT if kubelet is None else kubelet.request_timeout
    if limit >= timeout:
        return
    source = "by default" if kubelet is None else f"in {kubelet.source}"
    yield chain_break(
        "kata-kubelet-timeout",
        key,
        f"the kubelet times out after {limit:g} s (runtimeRequestTimeout {source}), before "
        f"Kata's {key} of {timeout:g} s: guests with much pinned memory or a large image may "
        "need longer",
        f"set runtimeRequestTimeout: {timeout:g}s in the kubelet's configuration, and restart "
        "the kubelet",
        is_certain=False,
    )


RULES: RuleSet[PodContext] = register(
    RuleSet(
        "a pod with Kata: the configuration",
        rules=(
            rule(_unusable, "kata-configuration-unreadable", "kata-configuration-missing"),
            rule(_annotated_blindly, "kata-annotation-alone"),
            reading(
                SETTINGS,
                _annotated,
                "kata-annotation-alone",
                "kata-annotation-not-enabled",
                "kata-annotation-refused",
            ),
            reading(
                SETTINGS,
                annotation_breaks,
                "kata-annotation-ignored",
                "kata-annotation-not-enabled",
                "kata-annotation-refused",
                "kata-annotation-unknown",
                "kata-annotation-value",
                "kata-vfio-mode",
                _NO_IOMMU,
            ),
            reading(SETTINGS, _mismatched, "kata-configuration-other-runtime"),
            reading(
                SETTINGS,
                _plugging,
                "kata-no-cold-plug",
                "kata-not-plugged",
                "kata-not-plugged-silently",
            ),
            reading(
                SETTINGS,
                _refused,
                "kata-both-plugs",
                "kata-both-ports",
                "kata-port",
                "kata-too-many-ports",
                "kata-vfio-mode",
                "kata-wrong-type",
                _NO_IOMMU,
                _UNKNOWN_KEY,
            ),
            reading(
                SETTINGS,
                _drop_ins,
                *_DROP_IN_KEYS,
                "kata-drop-in-ending",
                "kata-drop-ins-shared",
                "kata-kernel-params-replaced",
            ),
            reading(SETTINGS, _timeouts, "kata-kubelet-timeout"),
        ),
    )
)

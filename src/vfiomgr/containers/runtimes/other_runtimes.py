"""Entries for CRI-O, Docker, k3s and rke2: drop-ins, daemon.json, templates.

CRI-O: a separate drop-in (crio.conf.d(5)), whose handler tables are merged. Docker: daemon.json,
merged as JSON (dockerd(8)). k3s and rke2: config-v3.toml.tmpl if it exists, else config.toml.tmpl,
else their own; each is a Go template around a configuration of version 3 or 2 (k3s,
pkg/agent/containerd/config.go). So a new config-v3.toml.tmpl would disable an existing
config.toml.tmpl.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from vfiomgr.containers.runtimes import text, values
from vfiomgr.containers.runtimes.containerd import (
    CRI_V2,
    CRI_V3,
    kata_table,
    oci_table,
    refuse_name,
)
from vfiomgr.containers.runtimes.handlers import read_crio
from vfiomgr.containers.runtimes.model import Key, RuntimeFacts, RuntimeRequest, Setting, shown
from vfiomgr.containers.runtimes.record import EMPTY_JSON, HEAD, Decision, Edit
from vfiomgr.diagnostic import refuse
from vfiomgr.errors import InvalidDocument
from vfiomgr.units import Version

_RUNTIMES: Key = ("crio", "runtime", "runtimes")
_DEFAULT: Key = ("crio", "runtime", "default_runtime")
_CRIO_KNOWS_CDI = Version(1, 24)


def decide_crio(facts: RuntimeFacts, request: RuntimeRequest) -> Decision:
    """Decide how to add an entry to CRI-O's configuration.

    Raises:
        InvalidDocument: a file is not readable.
        Refusal: an entry of another program has the name.
    """
    entry = (*_RUNTIMES, request.name)
    for file in (facts.main, *facts.imported, facts.drop_in):
        data = {} if file.text is None else text.parse(file.text, file.path)
        if values.found(data, entry) is not values.ABSENT:
            refuse_name(request, f"CRI-O, in {file.path}")
    if facts.effective and values.found(facts.effective, entry) is not values.ABSENT:
        refuse_name(request, "CRI-O")
    settings = [Setting(entry, _crio_table(facts, request))]
    if request.set_default:
        _refuse_later_default(facts, request)
        settings.append(Setting(_DEFAULT, request.name))
    return Decision(
        (Edit(facts.drop_in, tuple(settings), HEAD),),
        tuple(_crio_notes(facts, request)),
        ours=(entry, *((_DEFAULT,) if request.set_default else ())),
        expected=tuple(settings),
    )


def _refuse_later_default(facts: RuntimeFacts, request: RuntimeRequest) -> None:
    """Make sure that no file after the drop-in sets another default."""
    for file in facts.imported:
        data = {} if file.text is None else text.parse(file.text, file.path)
        named = values.found(data, _DEFAULT)
        is_later = file.path.name > facts.drop_in.path.name
        if is_later and named not in (values.ABSENT, "", request.name):
            message = f"{file.path} sets {named} as the default, and CRI-O reads it last"
            refuse(
                "runtime-default-taken",
                file.path,
                message,
                "remove that setting, or omit --set-default",
            )


def _crio_table(facts: RuntimeFacts, request: RuntimeRequest) -> dict[str, Any]:
    """The table of the entry (crio.conf(5), "CRIO.RUNTIME.RUNTIMES TABLE").

    Another handler's monitor_path is used: CRI-O does not start where it finds no conmon.
    """
    if request.config_path is None:
        files = (facts.main, *facts.imported, facts.drop_in)
        entries = read_crio((file.path, file.text or "") for file in files).handlers
        monitor = next((entry.monitor_path for entry in entries if entry.monitor_path), "")
        own = {"monitor_path": monitor} if monitor else {}
        return {"runtime_path": request.path, "runtime_type": "oci", **own}
    return {
        "runtime_path": request.path,
        "runtime_type": "vm",
        "runtime_root": "/run/vc",
        "runtime_config_path": request.config_path,
        "privileged_without_host_devices": True,
    }


def _crio_notes(facts: RuntimeFacts, request: RuntimeRequest) -> Iterator[str]:
    if not request.enable_cdi or request.is_kata:
        return
    if facts.version is not None and facts.version < _CRIO_KNOWS_CDI:
        message = f"CRI-O {facts.version} does not support CDI"
        refuse(
            "runtime-without-cdi", "CRI-O", message, "omit --cdi, or install CRI-O 1.24 or later"
        )
    yield "--cdi is not needed: CRI-O always reads CDI specifications"


_TAKES_SHIMS = Version(23, 0)
"""runtimeType and options in daemon.json."""
_DOCKER_KNOWS_CDI = Version(25, 0)
_NEEDS_NEWER_KATA = Version(26, 0)
_BUILT_IN = frozenset({"runc", "io.containerd.runc.v2"})


def decide_docker(facts: RuntimeFacts, request: RuntimeRequest) -> Decision:
    """Decide how to add an entry to daemon.json.

    Raises:
        InvalidDocument: the file is not readable.
        Refusal: the name is in use, or this Docker does not support such entries.
    """
    main = facts.main
    data = {} if main.text is None else text.parse(main.text, main.path)
    if data and not text.is_json(main.text or "", main.path):
        message = f"{main.path} is not JSON, which Docker requires"
        raise InvalidDocument(message, "name Docker's own file (default: /etc/docker/daemon.json)")
    entry = ("runtimes", request.name)
    if values.found(data, entry) is not values.ABSENT or request.name in _BUILT_IN:
        refuse_name(request, f"Docker, in {main.path}")
    if request.is_kata and facts.version is not None and facts.version < _TAKES_SHIMS:
        message = f"Docker {facts.version} does not support shims such as Kata's in {main.path}"
        refuse("runtime-too-old", "Docker", message, "install Docker 23.0 or later")
    settings = [Setting(entry, _docker_table(request)), *_further(facts, data, request)]
    notes = tuple(
        f"{path} is not changed: the rootless Docker of that user reads it, and restarts with: "
        "systemctl --user restart docker"
        for path in facts.rootless
    )
    if request.is_kata and (facts.version is None or facts.version >= _NEEDS_NEWER_KATA):
        notes = ("with Docker 26 or later, Kata 3.29 or later is required", *notes)
    return Decision(
        (Edit(main, tuple(settings), EMPTY_JSON),),
        notes,
        ours=tuple(setting.key for setting in settings),
        expected=tuple(settings),
    )


def _docker_table(request: RuntimeRequest) -> dict[str, Any]:
    if request.config_path is None:
        return {"path": request.path}
    return {"runtimeType": request.path, "options": {"ConfigPath": request.config_path}}


def _further(facts: RuntimeFacts, data: values.Data, request: RuntimeRequest) -> Iterator[Setting]:
    if request.set_default:
        yield Setting(("default-runtime",), request.name)
    if request.is_kata or not request.enable_cdi:
        return
    if facts.version is not None and facts.version < _DOCKER_KNOWS_CDI:
        message = f"Docker {facts.version} does not support CDI"
        refuse(
            "runtime-without-cdi", "Docker", message, "omit --cdi, or install Docker 25 or later"
        )
    if values.found(data, ("features", "cdi")) is not True:
        yield Setting(("features", "cdi"), value=True, is_shared=True)


BASE = '{{ template "base" . }}\n'
"""Includes everything that k3s would write without a template (since autumn 2023)."""
V3_NAME = "config-v3.toml.tmpl"
_END = "# vfiomgr: end\n"
_HAS_CDI_ON = Version(2, 0)


def decide_k3s(facts: RuntimeFacts, request: RuntimeRequest) -> Decision:
    """Decide how to add an entry to a template; `facts.main` is its last result.

    Raises:
        Refusal: an entry of another program has the name, or it cannot be set here.
    """
    template, rendered = facts.drop_in, facts.main
    plugin = CRI_V3 if template.path.endswith(V3_NAME) else CRI_V2
    runtimes = ("plugins", plugin, "containerd", "runtimes")
    there = {} if rendered.text is None else text.parse(rendered.text, rendered.path)
    is_made = values.found(there, (*runtimes, request.name)) is not values.ABSENT
    if request.set_default:
        has = f", and already has {request.name} ({rendered.path})" if is_made else ""
        refuse(
            "runtime-default-elsewhere",
            request.program,
            f"{request.program} sets its default runtime itself{has}",
            f"start {request.program} with --default-runtime {request.name}, or set "
            f"runtimeClassName: {request.name} in the pods, with a RuntimeClass",
        )
    if has_runtime(template.text or "", request.name):
        refuse_name(request, f"{request.program}, in {template.path}")
    if is_made and not facts.was_ours:
        refuse_name(request, f"{request.program}, in {rendered.path}")
    table = (
        kata_table(request) if request.is_kata else oci_table(request, _options(there, runtimes))
    )
    _require_readable_template(facts, request)
    settings = [Setting((*runtimes, request.name), table)]
    block = (
        f"{beginning_of(request.name)}{text.with_settings('', settings, '/template.toml')}{_END}"
    )
    return Decision(
        (Edit(template, (), BASE, block),),
        tuple(_k3s_notes(facts, request, there, plugin)),
        expected=tuple(settings),
        ours=((*runtimes, request.name),),
    )


_BASE_SINCE = (Version(1, 24, 17), Version(1, 25, 13), Version(1, 26, 8), Version(1, 27, 5))


def _has_base(release: Version) -> bool:
    """Whether a release of k3s or rke2 has the template "base" (docs.k3s.io, "Base template")."""
    same = [one for one in _BASE_SINCE if one.minor == release.minor]
    return release >= (same[0] if same else Version(1, 28, 1))


_INCLUDES_BASE = re.compile(r'\{\{-?\s*template\s+"base"')
_VERSION_LINE = re.compile(r"^\s*version\s*=\s*(\d+)", re.MULTILINE)
_OF_ONE_RELEASE = re.compile(r"/data/[0-9a-f]{32,}/")
"""The directory to which k3s and rke2 unpack a release, named by its hash."""


def _require_readable_template(facts: RuntimeFacts, request: RuntimeRequest) -> None:
    """Refuse where the entry would be in another schema, or in a copy of one release's result.

    A file without a version is schema 1, whose tables are [plugins.cri…] (k3s 1.23 wrote such).
    Before the releases of September 2023 the template "base" does not exist (k3s PR 7991).
    """
    template, rendered, program = facts.drop_in, facts.main, request.program
    includes = template.text is None or _INCLUDES_BASE.search(template.text) is not None
    read = rendered if includes else template
    named = _VERSION_LINE.search(read.text or "")
    stated = int(named[1]) if named else 1
    is_v3 = template.path.endswith(V3_NAME)
    base = f"replace what {program} wrote in {template.path} by {BASE.strip()}"
    if (read.text or not includes) and (stated != 3 if is_v3 and not includes else stated < 2):  # noqa: PLR2004
        plugin = CRI_V3 if is_v3 else CRI_V2
        shown_version = f"has version {stated}" if named else "has no version line (version 1)"
        message = f'{read.path} {shown_version}: tables of plugins."{plugin}" are not read there'
        older = f"upgrade {program} to a release with containerd 1.7 or later"
        hint = f"{older if includes else base}; then run the command again"
        refuse("runtime-config-version", read.path, message, hint)
    release = facts.distribution
    if release is not None and template.text is None and not _has_base(release):
        message = f'{program} {release} has no template "base", which a new template would include'
        hint = f"upgrade {program}, e.g. to 1.28.1 or later; then run the command again"
        refuse("runtime-too-old", program, message, hint)
    if not includes and _OF_ONE_RELEASE.search(template.text or ""):
        message = (
            f"{template.path} is a copy of what one release of {program} wrote: its paths are "
            f"removed by an upgrade of {program}"
        )
        hint = f"{base}; then run the command again"
        refuse("runtime-template-stale", template.path, message, hint)


def _k3s_notes(
    facts: RuntimeFacts, request: RuntimeRequest, there: values.Data, plugin: str
) -> Iterator[str]:
    """Notes about CDI, whose key is in a table outside the template."""
    told = values.found(there, ("plugins", plugin, "enable_cdi"))
    is_new = plugin == CRI_V3 or (facts.version is not None and facts.version >= _HAS_CDI_ON)
    is_on = told is True or (told is values.ABSENT and is_new)
    if not request.enable_cdi or is_on:
        return
    message = f"cannot enable CDI in {request.program} with an entry in a template"
    if not request.is_kata:
        hint = f"omit --cdi, or use a {request.program} with containerd 2, which enables CDI"
        refuse("runtime-without-cdi", request.program, message, hint)
    yield f"{message}: devices in annotations need containerd 2"


def _options(there: values.Data, runtimes: tuple[str, ...]) -> dict[str, Any]:
    """The options of runc, such as SystemdCgroup, in the last result."""
    found = values.found(there, (*runtimes, "runc", "options"))
    options = found if isinstance(found, dict) else {}
    return {name: value for name, value in options.items() if name != "BinaryName"}


def beginning_of(name: str) -> str:
    """The first line of the block of an entry in a template."""
    return f"# vfiomgr: {name}\n"


def has_runtime(template: str, name: str) -> bool:
    """Whether a template has a table, or a block of vfiomgr, for a runtime of this name."""
    quoted = "|".join(re.escape(form) for form in (shown((name,)), f'"{name}"', f"'{name}'"))
    table = re.compile(rf"^\s*\[[^]#\n]*\.runtimes\.({quoted})\s*\]", re.MULTILINE)
    return beginning_of(name) in template or table.search(template) is not None

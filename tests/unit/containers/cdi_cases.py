"""Good and bad specifications, and which consumers refuse each for which rule.

What Podman 4.3 makes of them was compared with the library that it has, 0.5.2, as Debian 12 ships
it (golang-github-container-orchestrated-devices-container-device-interface-dev).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from vfiomgr.containers.cdi.rules import CONSUMERS

ALL = frozenset(consumer.name for consumer in CONSUMERS)
OLD_CRATE = frozenset({"kata-rs-3.31"})
"""0.1.2, which ignores unknown keys, does not look for edits, and refuses valid types of nodes."""
RUST = frozenset({"kata-rs", *OLD_CRATE})
GO = ALL - RUST
STRICT = ALL - OLD_CRATE
KATA = frozenset({"kata-go", *RUST})
OLD = frozenset({"containerd-1.7", "podman-4.3"})
"""Libraries of CDI 0.5."""
UP_TO_0_6 = frozenset({*OLD, "kata-go", "containerd-1.7.12", "podman-4.9"})
UP_TO_0_7 = frozenset({*UP_TO_0_6, "containerd-1.7.16", *OLD_CRATE})
UP_TO_0_8 = frozenset({*UP_TO_0_7, "containerd-1.7.27", "containerd-2.0", "podman-5.4"})
UP_TO_1_0 = frozenset({*UP_TO_0_8, "containerd-2.1", "podman-5.8"})
FROM_1_0 = ALL - UP_TO_0_8
NONE: frozenset[str] = frozenset()
_NODE = {"deviceNodes": [{"path": "/dev/null"}]}


@dataclass(frozen=True)
class Case:
    """A file, who refuses it, and for which rules."""

    name: str
    text: str
    broken: frozenset[str] = NONE
    rules: frozenset[str] = NONE
    line: int | None = None
    """Where the first finding is."""
    file: str = "x.json"
    unread: frozenset[str] = NONE


def spec(**parts: Any) -> str:
    """A specification with one device, but for what is given."""
    document = {
        "cdiVersion": "0.5.0",
        "kind": "example.com/gpu",
        "devices": [{"name": "one", "containerEdits": _NODE}],
    }
    return json.dumps({k: v for k, v in (document | parts).items() if v is not ...}, indent=1)


def edits(version: str = "0.5.0", **parts: Any) -> str:
    """A specification whose device has these edits."""
    return spec(cdiVersion=version, devices=[{"name": "one", "containerEdits": parts}])


def node(**parts: Any) -> str:
    """A specification whose device has this node."""
    return edits(deviceNodes=[{"path": "/dev/null", **parts}])


def devices(*names: str) -> list[dict[str, Any]]:
    """Devices of these names."""
    return [{"name": name, "containerEdits": _NODE} for name in names]


def bad(
    name: str, text: str, rules: str, broken: frozenset[str] = ALL, line: int | None = None
) -> Case:
    """A file that some refuse."""
    return Case(name, text, broken, frozenset(rules.split()), line)


_YAML = """\
---
# the same in YAML
cdiVersion: 0.5.0
kind: example.com/gpu
devices:
- name: 0000:41:00.0
  containerEdits:
    deviceNodes:
    - path: /dev/vfio/vfio
    - {path: /dev/vfio/23, hostPath: /dev/vfio/23, permissions: rw}
containerEdits:
  env: [GPU=1]
"""

GOOD = (
    Case("plain", spec()),
    Case("yaml", _YAML, file="x.yaml"),
    Case("tabs", spec().replace("\n ", "\n\t")),
    Case("number-as-name", spec(devices=[{"name": 23, "containerEdits": _NODE}])),
    Case("v0.3", spec(cdiVersion="0.3.0")),
    Case("all-of-0.5", edits(
        env=["A=1", "B="],
        deviceNodes=[{
            "path": "/dev/a", "hostPath": "/dev/b", "major": 1, "minor": 3,
            "fileMode": 432, "permissions": "rwm", "uid": 0, "gid": 44,
        }],
        mounts=[{"hostPath": "/a", "containerPath": "/b", "options": ["ro"], "type": "bind"}],
        hooks=[{"hookName": "createContainer", "path": "/bin/true", "args": ["true"],
                "env": ["X=1"], "timeout": 3}],
    )),
    Case("negative-major", node(major=-1, minor=-1)),
    Case("empty-common-edits", spec(containerEdits={})),
    Case("null-list", edits(env=None, deviceNodes=[{"path": "/dev/null"}])),
    Case("one-letter-device", spec(devices=devices("g"))),
    Case("tag", "cdiVersion: !text 0.5.0\nkind: example.com/gpu\n"
                "devices: [{name: a, containerEdits: {env: [A=1]}}]\n", file="x.yaml"),
)  # fmt: skip

BAD = (
    bad("not-json", '{"cdiVersion": "0.5.0",\n', "unreadable", line=2),
    bad("empty-file", "", "unreadable", line=1),
    bad("a-list", "[]", "type-wrong", line=1),
    bad("second-document", f"{spec()}\n---\n{spec()}", "document-second", RUST),
    bad("key-twice", spec().replace('"kind"', '"kind": "a.b/cc",\n"kind"'), "key-twice", line=4),
    bad("key-unknown", spec(vendor="x"), "key-unknown", STRICT),
    bad("key-unknown-deep", node(majr=1), "key-unknown", STRICT, line=11),
    bad("container-path-of-a-node", node(containerPath="/dev/x"), "key-unknown", STRICT),
    bad("key-case", spec().replace("cdiVersion", "cdiversion"), "key-case", RUST, line=2),
    bad("key-case-optional", node(Permissions="rw"), "key-case", frozenset({"kata-rs"})),
    bad("wrong-type", node(major="195"), "type-wrong", line=11),
    bad("env-is-a-mapping", edits(env={"A": "1"}), "type-wrong"),
    bad("negative-gid", node(gid=-1), "type-wrong"),
    bad("version-unknown", spec(cdiVersion="0.9.0"), "version-unknown", line=2),
    bad("version-short", spec(cdiVersion="0.5"), "version-unknown"),
    bad("version-missing", spec(cdiVersion=...), "key-missing"),
    bad("version-v", spec(cdiVersion="v0.5.0"), "version-unknown", OLD),
    bad("version-0.6", spec(cdiVersion="0.6.0"), "version-newer", OLD, line=2),
    bad("version-0.7", spec(cdiVersion="0.7.0"), "version-newer", UP_TO_0_6, line=2),
    bad("version-0.8", spec(cdiVersion="0.8.0"), "version-newer", UP_TO_0_7),
    bad("version-1.0", spec(cdiVersion="1.0.0"), "version-newer", UP_TO_0_8),
    bad("version-1.1", spec(cdiVersion="1.1.0"), "version-newer", UP_TO_1_0),
    bad("version-0.1", spec(cdiVersion="0.1.0"), "version-too-low", ALL - {"podman-4.3"}),
    bad("digit-in-0.4", spec(cdiVersion="0.4.0", devices=devices("0")), "version-too-low",
        ALL - {"podman-4.3"}),
    bad("mount-type-in-0.3", edits("0.3.0", mounts=[
        {"hostPath": "/a", "containerPath": "/b", "type": "bind"}]), "version-too-low",
        ALL - {"podman-4.3"}),
    bad("annotations", spec(cdiVersion="0.6.0", annotations={"a.b/c": "d"}),
        "version-newer key-newer", OLD),
    bad("annotations-in-0.5", spec(annotations={"a": "b"}), "version-too-low key-newer", ALL),
    bad("annotation-key", spec(cdiVersion="0.6.0", annotations={"a b": "c"}),
        "annotation version-newer key-newer", OLD | RUST),
    bad("dotted-class", spec(cdiVersion="0.6.0", kind="example.com/gpu.vfio"),
        "version-newer kind", OLD),
    bad("dotted-class-in-0.5", spec(kind="example.com/gpu.vfio"), "version-too-low kind"),
    bad("intel-rdt", edits("0.7.0", env=["A=1"], intelRdt={"closID": "x"}),
        "version-newer key-newer", UP_TO_0_6),
    bad("clos-id", edits("0.7.0", env=["A=1"], intelRdt={"closID": ".."}),
        "version-newer key-newer clos-id"),
    bad("additional-gids-0.6", edits("0.6.0", env=["A=1"], additionalGids=[44]),
        "version-too-low version-newer key-newer"),
    bad("net-devices", edits("1.1.0", netDevices=[{"hostInterfaceName": "a", "name": "b"}]),
        "version-newer key-newer", UP_TO_1_0),
    bad("net-device-twice", edits("1.1.0", netDevices=[
        {"hostInterfaceName": "a", "name": "b"}, {"hostInterfaceName": "a", "name": "c"}]),
        "version-newer key-newer net-device"),
    bad("enable-cmt-in-1.1", edits("1.1.0", intelRdt={"enableCMT": True}),
        "version-newer key-newer key-gone"),
    bad("enable-cmt-in-0.7", edits("0.7.0", intelRdt={"enableCMT": True}),
        "version-newer key-newer key-gone", UP_TO_0_6 | {"containerd-2.3"}),
    bad("no-monitoring-in-1.0", edits("1.0.0", intelRdt={"enableMonitoring": False}),
        "version-newer key-newer version-too-low", ALL - {"containerd-2.3"}),
    bad("no-net-devices-in-0.7", edits("0.7.0", env=["A=1"], netDevices=[]),
        "version-newer key-newer", UP_TO_1_0 - OLD_CRATE),
    bad("monitoring-in-1.0", edits("1.0.0", intelRdt={"enableMonitoring": True}),
        "version-newer key-newer version-too-low"),
    bad("kind-without-vendor", spec(kind="gpu"), "kind", line=3),
    bad("kind-of-three", spec(kind="a.b/gpu/x"), "kind"),
    bad("kind-missing", spec(kind=...), "key-missing"),
    bad("vendor-with-digit", spec(kind="3dfx.com/gpu"), "kind"),
    bad("class-ends-with-dash", spec(kind="example.com/gpu-"), "kind"),
    bad("class-with-space", spec(kind="example.com/my gpu"), "kind"),
    bad("one-letter-class", spec(kind="example.com/g"), "kind-one-letter", GO),
    bad("device-name-slash", spec(devices=devices("a/b")), "device-name"),
    bad("device-name-end", spec(devices=devices("gpu:")), "device-name"),
    bad("device-name-empty", spec(devices=devices("")), "device-name"),
    bad("device-name-missing", spec(devices=[{"containerEdits": _NODE}]), "key-missing"),
    bad("device-twice", spec(devices=devices("a", "b", "a")), "device-twice", line=26),
    bad("device-without-edits", spec(devices=[{"name": "a"}]), "key-missing"),
    bad("device-empty", spec(devices=[{"name": "a", "containerEdits": {}}]), "device-empty",
        STRICT),
    bad("no-devices", spec(devices=[]), "no-devices", FROM_1_0, line=4),
    bad("devices-missing", spec(devices=...), "key-missing", FROM_1_0 | RUST),
    bad("env-without-sign", edits(env=["A"]), "env", line=9),
    bad("env-without-name", spec(containerEdits={"env": ["=1"]}), "env"),
    bad("node-type", node(type="char"), "node-type", STRICT, line=9),
    bad("node-type-given", node(type="c"), "node-type-given", OLD_CRATE, line=9),
    bad("node-permissions", node(permissions="rx"), "node-permissions"),
    bad("node-permissions-none", node(permissions="none"), "node-permissions",
        ALL - {"kata-rs"}),
    bad("node-path-empty", node(path=""), "empty"),
    bad("node-path-missing", edits(deviceNodes=[{"hostPath": "/dev/a"}]), "key-missing"),
    bad("hook-name", edits(hooks=[{"hookName": "start", "path": "/a"}]), "hook"),
    bad("hook-path", edits(hooks=[{"hookName": "prestart", "path": ""}]), "empty"),
    bad("hook-env", edits(hooks=[{"hookName": "prestart", "path": "/a", "env": ["X"]}]), "env"),
    bad("mount-empty", edits(mounts=[{"hostPath": "", "containerPath": "/b"}]), "empty"),
    bad("mount-half", edits(mounts=[{"hostPath": "/a"}]), "key-missing"),
    Case("upper-case-suffix", spec(), file="x.JSON", unread=GO),
    Case("upper-case-suffix-bad", "{", RUST, frozenset({"unreadable"}), file="x.JSON", unread=GO),
    Case("yml", spec(), file="x.yml", unread=ALL),
)  # fmt: skip

_TWO = """\
cdiVersion: 0.5.0
kind: example.com/gpu
devices:
- {name: 010, containerEdits: &edits {env: [A=1]}}
- name: 8
  containerEdits: %s
"""
DIFFERENT = (
    Case("one-name-to-go", _TWO % "{env: [A=1]}", GO, frozenset({"device-twice"}), 5, "x.yaml"),
    Case("octal-mode", _TWO.replace("8", "9") % "{deviceNodes: [{path: /dev/a, fileMode: 0660}]}",
         RUST, frozenset({"type-wrong"}), 6, "x.yaml"),
    Case("merge", _TWO.replace("8", "9") % "{<<: *edits}", RUST, frozenset({"key-merged"}), 6,
         "x.yaml"),
)  # fmt: skip
CASES = (*GOOD, *BAD, *DIFFERENT)

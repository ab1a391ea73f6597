"""The keys of CDI specifications, and the CDI version that introduced each.

From specs-go/config.go of every version. A library knows the keys up to its own version, and
refuses a file with any other (yaml.UnmarshalStrict, serde's deny_unknown_fields).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from vfiomgr.value import Value
from vfiomgr.version import Version

if TYPE_CHECKING:
    from vfiomgr.documents.located import Path

Form = Literal["text", "number", "truth", "texts", "numbers", "strings by key", "part", "parts"]

_FIRST = Version(0, 3)


class Key(Value):
    """The type of a key's value."""

    form: Form = "text"
    of: str = ""
    """The name of the table of its parts."""
    field: str = ""
    """The field of the model; empty if it has the key's name."""
    since: Version = _FIRST
    needed: bool = False
    is_natural: bool = False
    """For numbers: unsigned, with 32 bits."""
    until: Version | None = None
    """The version that removed it."""


_NEW_IN_0_5 = Version(0, 5)
_NEW_IN_0_6 = Version(0, 6)
_NEW_IN_0_7 = Version(0, 7)
_NEW_IN_1_1 = Version(1, 1)

TOP = "specification"
KEYS: dict[str, dict[str, Key]] = {
    TOP: {
        "cdiVersion": Key(field="version", needed=True),
        "kind": Key(needed=True),
        "annotations": Key("strings by key", since=_NEW_IN_0_6),
        "devices": Key("parts", "device", needed=True),
        "containerEdits": Key("part", "edits", field="edits"),
    },
    "device": {
        "name": Key(needed=True),
        "annotations": Key("strings by key", since=_NEW_IN_0_6),
        "containerEdits": Key("part", "edits", field="edits", needed=True),
    },
    "edits": {
        "env": Key("texts"),
        "deviceNodes": Key("parts", "deviceNode", field="device_nodes"),
        "netDevices": Key("parts", "netDevice", field="net_devices", since=_NEW_IN_1_1),
        "hooks": Key("parts", "hook"),
        "mounts": Key("parts", "mount"),
        "intelRdt": Key("part", "intelRdt", field="intel_rdt", since=_NEW_IN_0_7),
        "additionalGids": Key(
            "numbers", field="additional_gids", since=_NEW_IN_0_7, is_natural=True
        ),
    },
    "deviceNode": {
        "path": Key(needed=True),
        "hostPath": Key(field="host_path", since=_NEW_IN_0_5),
        "type": Key(),
        "major": Key("number"),
        "minor": Key("number"),
        "fileMode": Key("number", field="file_mode", is_natural=True),
        "permissions": Key(),
        "uid": Key("number", is_natural=True),
        "gid": Key("number", is_natural=True),
    },
    "mount": {
        "hostPath": Key(field="host_path", needed=True),
        "containerPath": Key(field="container_path", needed=True),
        "options": Key("texts"),
        "type": Key(since=Version(0, 4)),
    },
    "hook": {
        "hookName": Key(field="name", needed=True),
        "path": Key(needed=True),
        "args": Key("texts"),
        "env": Key("texts"),
        "timeout": Key("number"),
    },
    "netDevice": {
        "hostInterfaceName": Key(field="host_interface", needed=True),
        "name": Key(needed=True),
    },
    "intelRdt": {
        "closID": Key(field="clos_id"),
        "l3CacheSchema": Key(field="l3_cache_schema"),
        "memBwSchema": Key(field="mem_bw_schema"),
        "schemata": Key("texts", since=_NEW_IN_1_1),
        "enableMonitoring": Key("truth", field="enable_monitoring", since=_NEW_IN_1_1),
        "enableCMT": Key("truth", field="enable_cmt", until=_NEW_IN_1_1),
        "enableMBM": Key("truth", field="enable_mbm", until=_NEW_IN_1_1),
    },
}


@lru_cache(maxsize=1 << 16)
def key_at(path: Path) -> Key | None:
    """The key at the end of a path; None if no CDI version has it."""
    table, key = TOP, None
    for part in path:
        if isinstance(part, str):
            key = KEYS.get(table, {}).get(part)
            table = key.of if key else ""
    return key

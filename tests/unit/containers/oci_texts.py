"""Configurations of containers as runtimes and people write them."""

from __future__ import annotations

import json
from typing import Any

DENIED = {"allow": False, "access": "rwm"}


def configuration(**linux: object) -> dict[str, Any]:
    """As `runc spec` makes it, and short."""
    return {
        "ociVersion": "1.0.2-dev",
        "process": {"user": {"uid": 0, "gid": 0}, "args": ["sh"], "cwd": "/"},
        "root": {"path": "rootfs", "readonly": True},
        "linux": {
            "resources": {"devices": [DENIED]},
            "namespaces": [{"type": "pid"}, {"type": "mount"}],
            **linux,
        },
    }


def go_compact(value: object) -> str:
    """As containerd and CRI-O write it: json.Marshal of Go, which escapes < and > and &."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


_ARGUMENTS = {"process": {"args": ["sh", "-c", "a <b >c & echo \u00e4 , [x]"]}}
TEXTS = {
    "runc spec": json.dumps(configuration(), indent="\t") + "\n",
    "containerd": go_compact({**configuration(), **_ARGUMENTS}),
    "python": json.dumps(configuration()),
    "jq": json.dumps(configuration(devices=[]), indent=2, ensure_ascii=False) + "\n",
    "windows editor": json.dumps(configuration(), indent=4).replace("\n", "\r\n"),
    "annotations": json.dumps({**configuration(), "annotations": {"a": "b"}}, indent="\t"),
    "nulls": go_compact({**configuration(devices=None), "annotations": None}),
    "without linux": '{"ociVersion":"1.0.2"}',
    "without resources": '{ "ociVersion": "1.1.0", "linux": { } }\n',
    "blank lists": '{\n "ociVersion": "1",\n "linux": {"devices": [ \n ],\n  "resources": {}}\n}',
    "by hand": """{
  "ociVersion": "1.0.2",
    "process": {"args": ["sleep", "1e3"], "oomScoreAdj": 1e2,
       "rlimits": [ ]},
  "linux": {
    "devices": [
      {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229},
      {"path": "/dev/null", "type": "c", "major": 1, "minor": 3}
    ],
    "resources": {"devices": [{"allow": false, "access": "rwm"},
                              {"allow": true, "type": "c", "major": 10, "access": "rw"}]}
  },
  "annotations": {}
}""",
}

"""What is known of releases of libvirt has a use."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import vfiomgr
from vfiomgr.libvirt import releases
from vfiomgr.libvirt.releases import Feature


def test_each_feature_is_asked_for_somewhere() -> None:
    files = Path(vfiomgr.__file__).parent.rglob("*.py")
    uses = Counter(word for file in files for word in re.findall(r"\w+", file.read_text()))
    names = [name for name, value in vars(releases).items() if isinstance(value, Feature)]
    assert len(names) > 10
    assert [name for name in names if uses[name] <= 1] == []

"""What is known of releases of libvirt has a use."""

from __future__ import annotations

from pathlib import Path

import vfiomgr
from vfiomgr.libvirt import model as libvirt_model
from vfiomgr.libvirt.model import Feature


def test_each_feature_is_asked_for_somewhere() -> None:
    own = Path(libvirt_model.__file__)
    files = [file for file in Path(vfiomgr.__file__).parent.rglob("*.py") if file != own]
    text = "".join(file.read_text() for file in files)
    names = [name for name, value in vars(libvirt_model).items() if isinstance(value, Feature)]
    assert len(names) > 10
    assert [name for name in names if name not in text] == []

"""Regular expressions that are compiled when they are first used."""

from __future__ import annotations

import re

import pytest

from vfiomgr.expressions import expression


def test_it_does_what_the_compiled_one_does() -> None:
    text = expression(r"(?P<key>\w+)=(\d+)", re.IGNORECASE)
    compiled = re.compile(r"(?P<key>\w+)=(\d+)", re.IGNORECASE)
    for words in ("a=1", "A=12 b=3", "none"):
        assert text.findall(words) == compiled.findall(words)
        assert bool(text.fullmatch(words)) == bool(compiled.fullmatch(words))
        assert text.sub("x", words) == compiled.sub("x", words)
    assert (text.pattern, text.groups, text.groupindex) == (
        compiled.pattern,
        compiled.groups,
        compiled.groupindex,
    )
    assert expression(rb"\n([0-9a-f]{4})  ").search(b"\n10de  NVIDIA") is not None


def test_it_is_compiled_when_it_is_first_used() -> None:
    broken = expression("(")
    with pytest.raises(re.error):
        broken.match("")

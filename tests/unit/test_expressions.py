"""Regular expressions that are compiled when they are first used."""

from __future__ import annotations

import re
from time import process_time

import pytest

from vfiomgr.check.facts import _DENIAL
from vfiomgr.documents.reader import _KEY_AND_VALUE
from vfiomgr.expressions import expression
from vfiomgr.libvirt.preflight.host_files import _REMOVAL


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


@pytest.mark.parametrize(
    ("pattern", "usual", "long"),
    [
        (_KEY_AND_VALUE, "- - select: all", f"{'-' * 50_000}x"),
        (_REMOVAL, "modprobe -rf i915", f"modprobe -{'r' * 50_000}-"),
        (_REMOVAL, "/sbin/modprobe --remove i915", f"modprobe -{'x' * 50_000}"),
        (
            _DENIAL,
            "type=AVC msg=audit(1.2:3): avc:  denied  { read } for  pid=1 tcontext=a:b",
            f"type=AVC msg=audit(1.2:3): {'avc:  denied  { read } for ' * 2000}",
        ),
    ],
)
def test_a_long_text_takes_time_in_proportion(
    pattern: re.Pattern[str], usual: str, long: str
) -> None:
    assert pattern.search(usual)
    started = process_time()
    assert not pattern.match(long)
    assert process_time() - started < 1

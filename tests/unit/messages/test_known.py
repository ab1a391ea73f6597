"""The tables of known messages: each entry is recognized by what is printed, and alone."""

from __future__ import annotations

import pytest

from vfiomgr.check.plan import RULES
from vfiomgr.messages.known import (
    KERNEL,
    KnownMessage,
    explanations,
    find_messages,
    first_address,
    first_group,
    known_messages,
)
from vfiomgr.rules.runner import all_texts

_EXAMPLES = [(each, text) for each in known_messages() for text in each.examples]


@pytest.mark.parametrize(("known", "text"), _EXAMPLES, ids=lambda one: getattr(one, "name", ""))
def test_each_example_is_recognized_as_its_message_alone(known: KnownMessage, text: str) -> None:
    assert [each.name for each in explanations(text)] == [known.name]
    assert [each.name for each in find_messages(f"noise\n{text}\nnoise\n")] == [known.name]


def test_each_entry_has_examples_and_plain_sentences() -> None:
    names = [each.name for each in known_messages()]
    assert len(names) == len(set(names))
    assert not set(names) & {rule.name for rule in all_texts()}
    for each in known_messages():
        assert each.examples, each.name
        for text in (each.meaning, each.remedy):
            assert text.endswith("."), each.name
            assert not {"|", "\n"} & set(text), each.name


def test_causes_are_rules_of_the_check_of_a_host() -> None:
    rules = {name for rule in RULES.rules for name in rule.names}
    assert {name for each in known_messages() for name in each.see} <= rules


def test_a_message_of_the_kernel_becomes_part_of_a_finding() -> None:
    for each in known_messages():
        if each.program == KERNEL:
            assert each.meaning.count(". ") == 0, f"{each.name}: more than one sentence"


def test_a_log_has_each_message_once_for_a_function_with_its_last_line() -> None:
    log = (
        "[    1.000001] vfio-pci 0000:01:00.0: not ready 1023ms after FLR; waiting\n"
        "[    2.000001] usb 1-1: new device\n"
        "[   70.000001] vfio-pci 0000:01:00.0: not ready 65535ms after FLR; giving up\n"
        "vfio-pci 0000:02:00.0: not ready 65535ms after FLR; giving up"
    )
    first, second = find_messages(log, (KERNEL,))
    assert (first.address, first.count, first.seconds, first.line) == ("0000:01:00.0", 2, 70, 3)
    assert first.text == "vfio-pci 0000:01:00.0: not ready 65535ms after FLR; giving up"
    assert (second.address, second.count, second.seconds) == ("0000:02:00.0", 1, None)
    assert find_messages(log, ("QEMU",)) == ()


def test_a_message_that_was_copied_with_line_breaks_is_recognized() -> None:
    text = "Device is INELIGIBLE for IOMMU\n   domain attach due to platform RMRR requirement."
    assert [each.name for each in explanations(text)] == ["rmrr"]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("device [03:00.0] fault", "0000:03:00.0"),
        ("vfio 0000:0A:00.1: error", "0000:0a:00.1"),
        ("10000:e1:00.0 vanished", "10000:e1:00.0"),
        ("at 12:30:45.1 nothing", ""),
        ("version 1.2.3.4", ""),
    ],
)
def test_the_first_address_of_a_message(text: str, address: str) -> None:
    assert first_address(text) == address


def test_the_group_of_a_message() -> None:
    assert first_group("vfio: error opening /dev/vfio/14: Permission denied") == 14
    assert first_group("group 7 is not viable") == 7
    assert first_group("groups of users") is None

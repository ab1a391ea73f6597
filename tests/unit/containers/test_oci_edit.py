from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.containers.oci_texts import DENIED, TEXTS, configuration
from vfiomgr.containers.oci.edit import CDI_ANNOTATION, RECORD, Edit, eject, inject
from vfiomgr.containers.oci.nodes import ContainerDevice, DeviceNode, Injection
from vfiomgr.documents.json_text import read_object
from vfiomgr.errors import InvalidDocument, Refusal
from vfiomgr.host.owners import NodeAccess

CONTROL = DeviceNode("/dev/vfio/vfio", 10, 196, NodeAccess(0, 0, 0o666))


def device(group: int, address: str, minor: int = 0, cdi: tuple[str, ...] = ()) -> Injection:
    """A GPU with its audio function, by their group."""
    node = DeviceNode(f"/dev/vfio/{group}", 240, minor, NodeAccess(0, 64055, 0o660))
    functions = (f"{address}.0", f"{address}.1")
    paths = (CONTROL.path, node.path)
    return Injection(ContainerDevice(functions[0], functions, paths), (CONTROL, node), cdi)


GPU = device(23, "0000:04:00")
TWIN = device(24, "0000:05:00", 1)


def put(text: str, *injections: Injection) -> Edit:
    return inject(read_object(text, "config.json"), injections)


def out(text: str, *names: str) -> Edit:
    return eject(read_object(text, "config.json"), names or None)


def values(text: str, *path: str) -> Any:
    found = json.loads(text)
    for key in path:
        found = found[key]
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_nodes_and_rules_come_and_what_was_there_comes_back_to_the_byte(name: str) -> None:
    text = TEXTS[name]
    edit = put(text, GPU, TWIN)
    devices = values(edit.after.text, "linux", "devices")
    assert devices[-3:] == [
        {"path": "/dev/vfio/vfio", "type": "c", "major": 10, "minor": 196}
        | {"fileMode": 0o666, "uid": 0, "gid": 0},
        {"path": "/dev/vfio/23", "type": "c", "major": 240, "minor": 0}
        | {"fileMode": 0o660, "uid": 0, "gid": 64055},
        {"path": "/dev/vfio/24", "type": "c", "major": 240, "minor": 1}
        | {"fileMode": 0o660, "uid": 0, "gid": 64055},
    ]
    assert values(edit.after.text, "linux", "resources", "devices")[-3:] == [
        {"allow": True, "type": "c", "major": major, "minor": minor, "access": "rwm"}
        for major, minor in ((10, 196), (240, 0), (240, 1))
    ]
    again = put(edit.after.text, GPU, TWIN)
    assert (again.is_changed, again.added) == (False, ())
    assert again.already == ("0000:04:00.0", "0000:05:00.0")
    assert out(edit.after.text).after.text == text
    for first, second in (("0000:04:00.0", "05:00.1"), ("0000:05:00.1", "0000:04:00.0")):
        once = out(edit.after.text, first)
        assert values(once.after.text, "linux", "devices") != devices
        assert out(once.after.text, second).after.text == text


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_else_changes(name: str) -> None:
    before, after = json.loads(TEXTS[name]), json.loads(put(TEXTS[name], GPU).after.text)
    mine = (RECORD, CDI_ANNOTATION)
    kept = {k: v for k, v in after.pop("annotations").items() if k not in mine}
    assert kept == (before.pop("annotations", None) or {})
    linux, linux_before = after.pop("linux"), before.pop("linux", {})
    assert list(after) == list(before)
    assert after == before
    rules = linux.pop("resources")["devices"]
    devices = linux.pop("devices")
    old = (linux_before.pop("resources", None) or {}).get("devices") or []
    assert (rules[: len(old)], len(rules)) == (old, len(old) + 2)
    old = linux_before.pop("devices", None) or []
    assert (devices[: len(old)], len(devices)) == (old, len(old) + 2)
    assert linux == linux_before


def test_what_comes_is_laid_out_as_its_neighbours() -> None:
    text = put(TEXTS["by hand"], GPU).after.text
    line = (
        '      {"path": "/dev/vfio/vfio", "type": "c", "major": 10, "minor": 196, '
        '"fileMode": 438, "uid": 0, "gid": 0},\n'
    )
    assert line in text
    assert '"args": ["sleep", "1e3"], "oomScoreAdj": 1e2,\n' in text
    assert "\n" not in put(TEXTS["containerd"], GPU).after.text
    tabs = put(TEXTS["runc spec"], GPU).after.text
    assert tabs == json.dumps(json.loads(tabs), indent="\t") + "\n"
    assert "\r\n" in put(TEXTS["windows editor"], GPU).after.text.partition("/dev/vfio/23")[2]
    assert "\n" not in put(TEXTS["windows editor"], GPU).after.text.replace("\r\n", "")


def test_a_list_on_one_line_keeps_its_commas() -> None:
    text = '{"ociVersion": "1.0.2",\n "linux": {"devices": [{"path":"/a"},{"path":"/b"}]}}'
    assert '{"path":"/b"},{"path": "/dev/vfio/vfio",' in put(text, GPU).after.text


def test_what_the_device_shares_stays_until_the_last_one_goes() -> None:
    both = put(TEXTS["runc spec"], GPU, TWIN).after.text
    once = out(both, "0000:04:00.1")
    assert once.removed == ("0000:04:00.0",)
    paths = [entry["path"] for entry in values(once.after.text, "linux", "devices")]
    assert paths == ["/dev/vfio/vfio", "/dev/vfio/24"]
    rules = values(once.after.text, "linux", "resources", "devices")
    assert [(rule.get("major"), rule.get("minor")) for rule in rules[1:]] == [(10, 196), (240, 1)]


def test_a_node_that_somebody_else_put_in_stays_theirs() -> None:
    theirs = {"path": "/dev/vfio/vfio", "type": "c", "major": 10, "minor": 196}
    rule = {"allow": True, "type": "c", "major": 10, "minor": 196, "access": "rwm"}
    text = json.dumps(configuration(devices=[theirs], resources={"devices": [DENIED, rule]}))
    edit = put(text, GPU)
    assert len(values(edit.after.text, "linux", "devices")) == 2
    assert len(values(edit.after.text, "linux", "resources", "devices")) == 3
    assert out(edit.after.text).after.text == text


@pytest.mark.parametrize(
    ("rules", "added"),
    [
        ([{"allow": True, "access": "rwm"}], 0),
        ([DENIED, {"allow": True}], 0),
        ([DENIED, {"allow": True, "type": "c", "major": -1, "access": "rwm"}], 0),
        ([DENIED, {"allow": True, "type": "b", "access": "rwm"}], 2),
        ([DENIED, {"allow": True, "type": "c", "major": 10, "access": "rwm"}], 1),
        ([DENIED, {"allow": True, "type": "c", "access": "rw"}], 2),
        ([{"allow": True, "access": "rwm"}, DENIED], 2),
        ([{"allow": True, "type": "c", "major": 10, "minor": 196, "access": "rwm"}, DENIED], 2),
        ([{"allow": True}, {"allow": False, "type": "c", "major": 240, "access": "m"}], 1),
    ],
)
def test_a_rule_is_added_where_none_allows_it_already(
    rules: list[dict[str, object]], added: int
) -> None:
    text = json.dumps(configuration(resources={"devices": rules}))
    after = put(text, GPU).after.text
    assert len(values(after, "linux", "resources", "devices")) - len(rules) == added
    assert out(after).after.text == text


def test_other_numbers_after_a_reboot_take_the_place_of_the_old_ones() -> None:
    text = TEXTS["runc spec"]
    old = put(text, GPU, TWIN).after.text
    number = replace(GPU.nodes[1], major=238, minor=4)
    edit = put(old, replace(GPU, nodes=(CONTROL, number)))
    assert [one.device.name for one in edit.added] == ["0000:04:00.0"]
    entries = {
        e["path"]: (e["major"], e["minor"]) for e in values(edit.after.text, "linux", "devices")
    }
    assert entries == {
        "/dev/vfio/vfio": (10, 196),
        "/dev/vfio/23": (238, 4),
        "/dev/vfio/24": (240, 1),
    }
    majors = [r.get("major") for r in values(edit.after.text, "linux", "resources", "devices")]
    assert majors == [None, 10, 240, 238]
    assert out(edit.after.text).after.text == text


def test_numbers_of_somebody_else_are_refused() -> None:
    theirs = {"path": "/dev/vfio/23", "type": "c", "major": 7, "minor": 7}
    with pytest.raises(Refusal) as refusal:
        put(json.dumps(configuration(devices=[theirs])), GPU)
    assert "already has /dev/vfio/23 as 7:7" in refusal.value.message
    assert "240:0" in refusal.value.message


def test_names_of_cdi_join_those_that_are_there() -> None:
    text = json.dumps({**configuration(), "annotations": {CDI_ANNOTATION: "a.com/b=c"}})
    edit = put(text, replace(GPU, cdi=("nvidia.com/pgpu=23",)), replace(TWIN, cdi=("x.io/y=z",)))
    names = values(edit.after.text, "annotations", CDI_ANNOTATION)
    assert names == "a.com/b=c,nvidia.com/pgpu=23,x.io/y=z"
    once = out(edit.after.text, "0000:04:00.0").after.text
    assert values(once, "annotations", CDI_ANNOTATION) == "a.com/b=c,x.io/y=z"
    assert out(once).after.text == text
    alone = put(TEXTS["runc spec"], replace(GPU, cdi=("nvidia.com/pgpu=23",)))
    assert out(alone.after.text).after.text == TEXTS["runc spec"]


def test_what_was_changed_since_is_left_and_told() -> None:
    body = json.loads(put(TEXTS["runc spec"], GPU).after.text)
    body["linux"]["devices"][1]["minor"] = 9
    body["linux"]["resources"]["devices"] = body["linux"]["resources"]["devices"][:2]
    edit = out(json.dumps(body))
    assert edit.removed == ("0000:04:00.0",)
    assert [line.split(" was changed")[0] for line in edit.left] == [
        "device /dev/vfio/23",
        "cgroup rule of /dev/vfio/23",
    ]
    assert [e["path"] for e in values(edit.after.text, "linux", "devices")] == ["/dev/vfio/23"]


@pytest.mark.parametrize(
    ("key", "value"), [("fileMode", 0o666), ("gid", 100), ("type", "u"), ("x", 1)]
)
def test_an_entry_that_was_changed_since_is_not_taken_out(key: str, value: object) -> None:
    body = json.loads(put(TEXTS["runc spec"], GPU).after.text)
    changed = body["linux"]["devices"][1]
    changed[key] = value
    text = json.dumps(body)
    edit = out(text)
    assert edit.left == ("device /dev/vfio/23 was changed since it was added, and stays",)
    assert values(edit.after.text, "linux", "devices") == [changed]
    again = put(text, GPU)
    assert (again.left, again.already) == (edit.left, ())
    assert changed in values(again.after.text, "linux", "devices")
    third = put(again.after.text, GPU)
    assert (third.is_changed, third.already) == (False, ("0000:04:00.0",))
    assert changed in values(out(third.after.text).after.text, "linux", "devices")


def test_an_entry_that_two_devices_share_is_not_taken_for_unchanged() -> None:
    body = json.loads(put(TEXTS["runc spec"], GPU, TWIN).after.text)
    body["linux"]["devices"][0]["fileMode"] = 0o600
    edit = put(json.dumps(body), GPU)
    assert edit.left == ("device /dev/vfio/vfio was changed since it was added, and stays",)
    assert put(edit.after.text, GPU).already == ("0000:04:00.0",)
    assert out(edit.after.text).left == ()


def test_a_mode_that_is_another_on_the_host_now_takes_the_place_of_the_old_one() -> None:
    text = TEXTS["runc spec"]
    both = put(text, GPU, TWIN).after.text
    control = replace(CONTROL, access=NodeAccess(0, 64055, 0o660))
    edit = put(both, replace(GPU, nodes=(control, GPU.nodes[1])))
    entries = {e["path"]: e["fileMode"] for e in values(edit.after.text, "linux", "devices")}
    assert entries["/dev/vfio/vfio"] == 0o660
    assert (edit.left, len(entries)) == ((), 3)
    assert out(edit.after.text).after.text == text


@pytest.mark.parametrize("kind", ["b", "p", None])
def test_a_node_of_another_type_is_refused(kind: str | None) -> None:
    theirs = {"path": "/dev/vfio/23", "major": 240, "minor": 0}
    text = json.dumps(configuration(devices=[{**theirs, **({"type": kind} if kind else {})}]))
    with pytest.raises(
        Refusal, match=f"already has .* as {kind or 'no type'} 240:0,.* it is c 240:0"
    ):
        put(text, GPU)


def test_an_unbuffered_node_is_the_same() -> None:
    theirs = {"path": "/dev/vfio/23", "type": "u", "major": 240, "minor": 0}
    text = json.dumps(configuration(devices=[theirs]))
    assert theirs in values(put(text, GPU).after.text, "linux", "devices")


def test_a_path_that_stands_twice_with_different_numbers_is_refused() -> None:
    right = {"path": "/dev/vfio/23", "type": "c", "major": 240, "minor": 0}
    for entries in ([right, {**right, "minor": 7}], [{**right, "minor": 7}, right]):
        with pytest.raises(Refusal, match="already has /dev/vfio/23 as 240:7"):
            put(json.dumps(configuration(devices=entries)), GPU)
    twice = put(json.dumps(configuration(devices=[right, right])), GPU).after.text
    assert put(twice, GPU).already == ("0000:04:00.0",)


def test_a_name_of_cdi_that_stood_there_before_stays() -> None:
    names = "a.com/b=c,nvidia.com/pgpu=23"
    text = json.dumps({**configuration(), "annotations": {CDI_ANNOTATION: names}})
    mine = replace(GPU, cdi=("nvidia.com/pgpu=23", "x.io/y=z"))
    edit = put(text, mine)
    assert put(edit.after.text, mine).is_changed is False
    assert values(edit.after.text, "annotations", CDI_ANNOTATION) == f"{names},x.io/y=z"
    moved = put(edit.after.text, replace(mine, nodes=(CONTROL, replace(GPU.nodes[1], minor=5))))
    assert out(moved.after.text).after.text == text


def test_what_came_since_stays() -> None:
    body = json.loads(put(TEXTS["without linux"], GPU).after.text)
    fuse = {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}
    body["linux"]["devices"].append(fuse)
    body["annotations"]["x"] = "y"
    after = json.loads(out(json.dumps(body)).after.text)
    assert after == {
        "ociVersion": "1.0.2",
        "linux": {"devices": [fuse]},
        "annotations": {"x": "y"},
    }


def test_what_was_never_put_in_is_told() -> None:
    edit = out(TEXTS["by hand"], "0000:09:00.0")
    assert (edit.is_changed, edit.absent) == (False, ("0000:09:00.0",))
    assert out(TEXTS["by hand"]).is_changed is False


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("", "1:1", "not JSON: expecting value"),
        ('{"ociVersion": "1.0.2",\n  "linux": {"devices": [}}', "2:25", "not JSON"),
        ('{"a": NaN, "linux": {}}', "", "NaN is not valid in JSON"),
        ("[]", "1:1", "not an object"),
        ('\n {"x": 1}', "2:2", "not an OCI configuration: it has none of"),
        ('{"linux": []}', "1:11", "linux is not an object"),
        ('{"linux": {"devices": {}}}', "1:23", "linux.devices is not a list"),
        ('{"linux": {"resources": 1}}', "1:25", "linux.resources is not an object"),
        ('{"linux":\n{"devices": [1]}}', "2:14", "linux.devices[0] is not an object"),
        ('{"linux": {"devices": [{"type": "c"}]}}', "1:24", "linux.devices[0] has no path"),
        ('{"linux": {"resources": {"devices": [{"access": 1}]}}}', "1:38", "the access of"),
        (
            '{"linux": {"resources": {"devices": [{"allow": "false"}]}}}',
            "1:38",
            "the allow of linux.resources.devices[0] is neither true nor false",
        ),
        ('{"linux": {"resources": {"devices": [{"type": 1}]}}}', "1:38", "the type of"),
        ('{"linux": {"resources": {"devices": [{"major": "1"}]}}}', "1:38", "the major of"),
        ('{"linux": {"devices": [{"path": "/a", "minor": true}]}}', "1:24", "the minor of"),
        ('{"linux": {}, "annotations": {"a": 1}}', "1:36", "annotation a is not a string"),
        ('{"linux": {},\n "linux": {}}', "2:2", "duplicate key 'linux'"),
        ('{"linux": {}, "annotations": {"io.vfiomgr.injected": "{}"}}', "1:54", "not what vfiomgr"),
        ('{"linux": {}, "annotations": {"io.vfiomgr.injected": "[1"}}', "1:54", "not what vfiomgr"),
        ("[" * 100000, "", "not JSON"),
        ('{"linux":' + '{"a":' * 300 + "1" + "}" * 301, "", "deeper than"),
    ],
)
def test_what_is_no_configuration_is_told_by_line_and_column(
    text: str, place: str, what: str
) -> None:
    with pytest.raises(InvalidDocument) as flaw:
        put(text, GPU)
    assert f"config.json:{place}" in flaw.value.message
    assert what in flaw.value.message
    assert flaw.value.hint


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(
    extra=st.dictionaries(st.text(max_size=4), JSON, max_size=4),
    linux=st.dictionaries(st.text(max_size=6), JSON, max_size=3),
    indent=st.sampled_from([None, 0, 1, 2, "\t", " \t"]),
    spaced=st.booleans(),
)
def test_any_layout_comes_back(
    extra: dict[str, Any], linux: dict[str, Any], indent: int | str | None, *, spaced: bool
) -> None:
    body = {**extra, "ociVersion": "1.0.2", "linux": {**linux}, "hooks": {}}
    separators = (", ", ": ") if spaced and indent is None else (",", ":")
    text = json.dumps(body, indent=indent, separators=separators, ensure_ascii=False)
    edit = put(text, GPU)
    after = json.loads(edit.after.text)
    assert {key: after[key] for key in extra} == extra
    assert {key: after["linux"][key] for key in linux} == linux
    assert out(edit.after.text).after.text == text

"""Entries for containerd: each trap of how its releases merge files, and faults at every step."""

from __future__ import annotations

import contextlib
import errno
import os
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from msgspec.structs import replace

from tests.fakes.containerd import CRI, IMAGES, RUNTIME
from tests.unit.engine.faults import Course, EveryFault
from tests.unit.runtimes import (
    CONFIGURATION,
    DROP_IN,
    MAIN,
    SHIM,
    V2,
    V3,
    configuration,
    data,
    dump,
    host,
    install,
    kata,
    prepare,
    prepare_removal,
    put,
    text,
    uninstall,
)
from vfiomgr.containers.runtimes import apply
from vfiomgr.containers.runtimes.apply import apply_prepared, change
from vfiomgr.containers.runtimes.entries import prepare_entry
from vfiomgr.containers.runtimes.location import locate
from vfiomgr.containers.runtimes.model import RuntimeRequest, Setting
from vfiomgr.containers.runtimes.record import RECORD, Decision
from vfiomgr.containers.runtimes.values import without_zeros
from vfiomgr.engine.locks import hold
from vfiomgr.engine.survey import cut_off_runs
from vfiomgr.engine.transaction import ApplyContext
from vfiomgr.errors import HostError, InvalidDocument, Refusal, RolledBack
from vfiomgr.paths import BOOT_ID, HostPath
from vfiomgr.persistence.steps import ChangeFiles
from vfiomgr.units import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.fakes.programs import Said
    from tests.unit.engine.faults import Courses
    from vfiomgr.containers.runtimes.apply import Prepared
    from vfiomgr.engine.plan import Request

ONE = ["1.6.20", "1.7.28"]
TWO = ["2.0.11", "2.1.9", "2.2.0", "2.3.4"]
COPIED = f"""\
version = 2
[plugins."{CRI}"]
  sandbox_image = "registry.example/pause:3.9"
  [plugins."{CRI}".containerd]
    default_runtime_name = "nvidia"
    [plugins."{CRI}".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
    [plugins."{CRI}".containerd.runtimes.nvidia]
      runtime_type = "io.containerd.runc.v2"
"""


@pytest.fixture(autouse=True)
def _one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies have the same names whenever they are made."""
    monkeypatch.setattr("vfiomgr.containers.runtimes.apply._stamp", lambda: "20261121T120000Z")


def without_entry(dumped: dict[str, object]) -> dict[str, object]:
    """What containerd reads besides the entry, its imports and CDI."""
    plugins = dumped["plugins"]
    assert isinstance(plugins, dict)
    cri = plugins.get(RUNTIME) or plugins[CRI]
    cri["containerd"]["runtimes"].pop("kata-vfio", None)
    cri.pop("enable_cdi", None)
    return {key: value for key, value in dumped.items() if key != "imports"}


# ---- the matrix


@pytest.mark.parametrize(
    ("version", "main"),
    [
        (version, main)
        for main in (V2, V3, None, "# nothing yet\n")
        for version in (TWO if main == V3 else [*ONE, *TWO])
    ],
)
def test_containerd_reads_the_entry_and_all_else_as_before(
    tmp_path: Path, version: str, main: str | None
) -> None:
    kernel, containerd = host(tmp_path, version, main)
    before = configuration(kernel)
    old = dump(kernel, containerd)
    prepared = install(kernel)
    assert prepared.unchecked == ()
    new = dump(kernel, containerd)
    cri = new["plugins"].get(RUNTIME) or new["plugins"][CRI]
    entry = cri["containerd"]["runtimes"]["kata-vfio"]
    assert entry["runtime_path"] == SHIM
    assert entry["options"] == {"ConfigPath": CONFIGURATION}
    assert entry["privileged_without_host_devices"] is True
    assert prepare_entry(kernel, locate(kernel, "containerd"), kata(), "").request.changes == ()
    assert without_zeros(without_entry(new)) == without_zeros(without_entry(old))
    uninstall(kernel)
    assert {p: t for p, t in configuration(kernel).items() if t != "/"} == before


@pytest.mark.parametrize("version", ONE)
def test_before_2_0_a_drop_in_would_hide_all_of_cri_so_the_main_file_is_edited(
    tmp_path: Path, version: str
) -> None:
    kernel, containerd = host(tmp_path, version, V2)
    install(kernel)
    assert text(kernel, DROP_IN) is None
    cri = dump(kernel, containerd)["plugins"][CRI]
    assert cri["sandbox_image"] == "registry.example/pause:3.9"
    assert cri["containerd"]["snapshotter"] == "nydus"
    assert cri["containerd"]["runtimes"]["runc"]["options"]["SystemdCgroup"] is True
    for line in V2.splitlines():
        assert line in (text(kernel, MAIN) or "")


@pytest.mark.parametrize("version", ONE)
def test_before_2_0_runc_would_be_lost_where_the_file_has_no_runtimes(
    tmp_path: Path, version: str
) -> None:
    kernel, containerd = host(tmp_path, version, f'version = 2\n[plugins."{CRI}"]\n')
    install(kernel)
    runtimes = dump(kernel, containerd)["plugins"][CRI]["containerd"]["runtimes"]
    assert runtimes["runc"]["runtime_type"] == "io.containerd.runc.v2"
    assert set(runtimes) == {"runc", "kata-vfio"}


def test_cdi_is_switched_on_in_1_7_and_unknown_to_1_6(tmp_path: Path) -> None:
    kernel, containerd = host(tmp_path / "7", "1.7.28", V2)
    install(kernel)
    assert dump(kernel, containerd)["plugins"][CRI]["enable_cdi"] is True
    kernel, _ = host(tmp_path / "6", "1.6.20", V2)
    install(kernel)
    assert "enable_cdi" not in (text(kernel, MAIN) or "")


def test_since_2_0_cdi_is_on_and_written_only_where_somebody_switched_it_off(
    tmp_path: Path,
) -> None:
    kernel, _ = host(tmp_path / "on", "2.1.9", V3)
    install(kernel)
    assert "enable_cdi" not in (text(kernel, DROP_IN) or "")
    off = f"{V3}[plugins.'{RUNTIME}']\nenable_cdi = false\n"
    kernel, containerd = host(tmp_path / "off", "2.1.9", off)
    install(kernel)
    assert dump(kernel, containerd)["plugins"][RUNTIME]["enable_cdi"] is True


@pytest.mark.parametrize("version", TWO)
@pytest.mark.parametrize(("main", "schema", "plugin"), [(V2, 2, CRI), (V3, 3, RUNTIME)])
def test_the_drop_in_has_the_version_of_the_main_file_or_one_of_them_is_dropped(
    tmp_path: Path, version: str, main: str, schema: int, plugin: str
) -> None:
    kernel, _ = host(tmp_path, version, main)
    install(kernel)
    written = data(kernel, DROP_IN)
    assert written["version"] == schema
    assert list(written["plugins"]) == [plugin]


@pytest.mark.parametrize(("main", "other"), [(V2, 3), (V3, 2)])
def test_a_drop_in_of_another_version_is_refused(tmp_path: Path, main: str, other: int) -> None:
    kernel, _ = host(tmp_path, None, main)
    put(kernel, DROP_IN, f"version = {other}\n")
    with pytest.raises(Refusal, match=f"has version {other}"):
        prepare_entry(kernel, locate(kernel, "containerd", None, Version(2, 1)), kata(), "")


def test_2_3_takes_overlayfs_for_the_snapshotter_of_version_2_which_is_told(
    tmp_path: Path,
) -> None:
    kernel, containerd = host(tmp_path, "2.3.4", V2)
    (note,) = prepare(kernel).request.notes
    assert (
        "of a version 2 configuration by overlayfs, with or without this entry; fix it with: "
        "containerd config migrate"
    ) in note
    assert "containerd config migrate" in note
    assert dump(kernel, containerd)["plugins"][IMAGES]["snapshotter"] == "overlayfs"


def test_2_3_shows_conf_d_in_each_dump_and_reads_it_only_where_it_is_imported(
    tmp_path: Path,
) -> None:
    kernel, containerd = host(tmp_path, "2.3.4", V3)
    assert dump(kernel, containerd)["imports"] == ["/etc/containerd/conf.d/*.toml"]
    install(kernel)
    assert data(kernel, MAIN)["imports"] == ["/etc/containerd/conf.d/*.toml"]


@pytest.mark.parametrize(
    "pattern", ["/etc/containerd/conf.d/*.toml", "/etc/containerd/conf.d/50-*"]
)
def test_an_import_that_finds_the_drop_in_is_not_added_again(tmp_path: Path, pattern: str) -> None:
    main = f'imports = ["{pattern}"]\n{V3}'
    kernel, _ = host(tmp_path, "2.2.0", main)
    install(kernel)
    assert text(kernel, MAIN) == main
    assert text(kernel, DROP_IN)


def test_files_that_nobody_imports_do_not_come_to_count(tmp_path: Path) -> None:
    stale = f"version = 3\n[plugins.'{RUNTIME}'.containerd]\ndefault_runtime_name = 'gone'\n"
    kernel, containerd = host(tmp_path, "2.1.9", V3, stale=stale)
    install(kernel)
    assert data(kernel, MAIN)["imports"] == ["/etc/containerd/conf.d/50-vfiomgr*.toml"]
    read = dump(kernel, containerd)["plugins"][RUNTIME]["containerd"]
    assert read["default_runtime_name"] == "runc"


@pytest.mark.parametrize("version", ONE)
def test_before_2_0_a_drop_in_that_holds_cri_has_the_last_word_and_is_edited(
    tmp_path: Path, version: str
) -> None:
    main = f'imports = ["/etc/containerd/conf.d/*.toml"]\n{V2}'
    kernel, containerd = host(tmp_path, version, main, **{"99-nvidia": COPIED})
    before = configuration(kernel)
    prepared = install(kernel)
    nvidia = "/etc/containerd/conf.d/99-nvidia.toml"
    assert any(
        nvidia in note
        and ", and before containerd 2.0 its CRI table hides that of the main file" in note
        for note in prepared.request.notes
    )
    assert text(kernel, MAIN) == main
    assert "kata-vfio" in (text(kernel, nvidia) or "")
    read = dump(kernel, containerd)["plugins"][CRI]["containerd"]
    assert set(read["runtimes"]) == {"runc", "nvidia", "kata-vfio"}
    assert read["default_runtime_name"] == "nvidia"
    uninstall(kernel)
    assert configuration(kernel) == before


def test_a_key_that_containerd_does_not_know_is_refused(tmp_path: Path) -> None:
    kernel, containerd = host(tmp_path, "2.1.9", V3)
    containerd.unknown = {"pod_annotations"}
    before = configuration(kernel)
    with pytest.raises(Refusal, match=r"unknown keys for containerd 2\.1\.9: .*pod_annotations"):
        install(kernel)
    assert configuration(kernel) == before


def test_keys_that_were_unknown_before_are_not_ours_to_refuse(tmp_path: Path) -> None:
    kernel, _ = host(tmp_path, "2.1.9", f"{V3}[plugins.'{RUNTIME}']\nsandbox_imagee = 'x'\n")
    install(kernel)


def test_what_else_would_be_read_differently_is_named_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    kernel, containerd = host(tmp_path, "2.1.9", V3)
    containerd.forgets = ("plugins", IMAGES, "pinned_images")
    before = configuration(kernel)
    with pytest.raises(Refusal, match=r"also read other settings differently: .*pinned_images"):
        install(kernel)
    assert configuration(kernel) == before


def test_an_entry_that_another_file_undoes_is_refused(tmp_path: Path) -> None:
    later = f"version = 3\n[plugins.'{RUNTIME}']\nenable_cdi = false\n"
    main = f'imports = ["/etc/containerd/conf.d/*.toml"]\n{V3}'
    kernel, _ = host(tmp_path, "2.1.9", main, **{"99-later": later})
    with pytest.raises(Refusal, match=r"would not read .*enable_cdi"):
        install(kernel)


@pytest.mark.parametrize("options", [{}, {"ConfigPath": "/z"}, {"ConfigPath": {"a": "/y"}}, 7])
def test_an_entry_that_is_read_with_another_nested_value_is_refused(options: object) -> None:
    runtimes = ("plugins", RUNTIME, "containerd", "runtimes")
    entry = Setting((*runtimes, "a"), {"runtime_type": "x", "options": {"ConfigPath": "/y"}})
    decision = Decision((), ours=(entry.key,), expected=(entry,))

    def read(**runtimes: object) -> dict[str, object]:
        return {"plugins": {RUNTIME: {"containerd": {"runtimes": {"runc": {"x": 1}, **runtimes}}}}}

    def with_options(options: object) -> dict[str, object]:
        return read(a={"runtime_type": "x", "more": 1, "options": options})

    after = with_options({"ConfigPath": "/y", "more": 1})
    apply.refuse_others(read(), after, decision, "containerd")
    with pytest.raises(Refusal, match=r"containerd would not read plugins\..*\.runtimes\.a"):
        apply.refuse_others(read(), with_options(options), decision, "containerd")


def test_a_configuration_that_containerd_cannot_read_is_told_before_anything_is_done(
    tmp_path: Path,
) -> None:
    kernel, _ = host(tmp_path, "1.7.28", 'imports = ["/etc/gone.toml"]\nversion = 2\n')
    with pytest.raises(
        Refusal, match=r"config\.toml imports /etc/gone\.toml, which does not exist"
    ):
        install(kernel)


def test_what_is_read_after_writing_is_what_was_foreseen_or_all_is_taken_back(
    tmp_path: Path,
) -> None:
    kernel, containerd = host(tmp_path, "2.1.9", V3)
    before = configuration(kernel)
    prepared = prepare(kernel)
    containerd.forgets = ("plugins", IMAGES, "pinned_images")
    with pytest.raises(RolledBack, match="does not read the expected settings"):
        apply_prepared(prepared, ApplyContext(kernel))
    assert configuration(kernel) == before


# ---- what is left, and what is not known any more


def test_after_writing_the_files_themselves_are_read(tmp_path: Path) -> None:
    kernel, containerd = host(tmp_path, "2.1.9", V3)
    asked: list[str] = []
    run = containerd.run

    def noted(arguments: Sequence[str]) -> Said:
        asked.append(arguments[1] if "dump" in arguments else "")
        return run(arguments)

    containerd.run = noted  # type: ignore[method-assign]
    prepared = prepare(kernel)
    own = kernel.locate(MAIN)
    assert own in asked, "what there is comes from the file itself"
    assert asked[-1] != own
    apply_prepared(prepared, ApplyContext(kernel))
    assert asked[-1] == own


@pytest.mark.parametrize(
    ("pattern", "name", "is_read"),
    [
        ("/etc/containerd/*.d/*.toml", "a", True),
        ("/etc/*/conf.d/[^b]*.toml", "a", True),
        ("/etc/*/conf.d/[^a]*.toml", "a", False),
        ("/etc/containerd/./conf.d/*.toml", "a", True),
    ],
)
def test_imports_are_found_as_go_finds_them(
    tmp_path: Path, pattern: str, name: str, *, is_read: bool
) -> None:
    main = V3.replace("version = 3\n", f"version = 3\nimports = [{pattern!r}]\n")
    taken = f"[plugins.'{RUNTIME}'.containerd.runtimes.kata-vfio]\nruntime_type = 'x'\n"
    kernel, _ = host(tmp_path, None, main, **{name: f"version = 3\n{taken}"})
    place = locate(kernel, "containerd", None, Version(2, 1))
    with pytest.raises(Refusal, match="did not write it") if is_read else contextlib.nullcontext():
        prepare_entry(kernel, place, kata(), "")


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_directory_that_was_made_for_the_drop_in_goes_with_the_last_entry(
    tmp_path: Path, *, is_ours: bool
) -> None:
    kernel, _ = host(tmp_path, "2.1.9", V3)
    directory = HostPath(DROP_IN).parent
    if not is_ours:
        kernel.make_directory(directory)
    install(kernel)
    install(kernel, kata(name="other"))
    uninstall(kernel)
    assert kernel.exists(DROP_IN)
    uninstall(kernel, "other")
    assert kernel.exists(directory) != is_ours


def test_a_directory_in_which_somebody_put_a_file_stays(tmp_path: Path) -> None:
    kernel, _ = host(tmp_path, "2.1.9", V3)
    install(kernel)
    put(kernel, f"{DROP_IN.parent}/other.conf", "")
    uninstall(kernel)
    assert kernel.exists(HostPath(f"{DROP_IN.parent}/other.conf"))


def test_a_copy_that_stays_is_named(tmp_path: Path) -> None:
    kernel, _ = host(tmp_path, "1.7.28", V2)
    install(kernel)
    put(kernel, MAIN, f"{text(kernel, MAIN)}# somebody else's line\n")
    prepared = uninstall(kernel)
    copy = f"{MAIN}.vfiomgr-20261121T120000Z"
    assert any(copy in note and "stays" in note for note in prepared.request.notes)
    assert text(kernel, copy) == V2


@pytest.mark.parametrize(("version", "main"), [("1.7.28", V2), ("2.1.9", V3)])
def test_an_entry_whose_record_is_gone_is_told_with_what_to_do(
    tmp_path: Path, version: str, main: str
) -> None:
    kernel, _ = host(tmp_path, version, main)
    install(kernel)
    kernel.remove(RECORD)
    before = configuration(kernel)
    with pytest.raises(Refusal, match=r"entry kata-vfio in .* has no record in") as told:
        uninstall(kernel)
    assert "manually" in told.value.hint
    assert "vfiomgr-20261121T120000Z" in told.value.hint or version == "2.1.9"
    assert configuration(kernel) == before


def test_an_entry_of_somebody_else_is_nothing_to_take_back(tmp_path: Path) -> None:
    kernel, _ = host(tmp_path, "1.7.28", V2.replace("runtimes.runc", "runtimes.kata-vfio"))
    assert "no entry kata-vfio that vfiomgr added" in uninstall(kernel).request.summary


# ---- files of several versions, and releases that nobody tried

_IMPORTING = 'imports = ["/etc/containerd/conf.d/*.toml"]\n'
_NVIDIA_V3 = f"version = 3\n[plugins.'{RUNTIME}'.containerd.runtimes.nvidia]\n"
_NVIDIA_V4 = _NVIDIA_V3.replace("3", "4", 1)
V4 = V3.replace("version = 3", "version = 4")
_NVIDIA_V2 = f"version = 2\n[plugins.'{CRI}'.containerd.runtimes.nvidia]\n"
_NO_VERSION = f"[plugins.'{CRI}'.containerd.runtimes.nvidia]\n"


@pytest.mark.parametrize(
    ("version", "main", "other", "words"),
    [
        ("1.7.28", V2, _NVIDIA_V3, "containerd 1.7.28 does not start with them"),
        (
            "2.0.11",
            V2,
            _NVIDIA_V3,
            "silently drops all previous CRI settings, in the main file and in drop-ins",
        ),
        (
            "2.1.9",
            V2,
            _NVIDIA_V3,
            "silently drops all previous CRI settings, in the main file and in drop-ins",
        ),
        ("2.3.4", V2, _NVIDIA_V3, "containerd 2.3.4 does not start with them"),
        ("2.1.9", V3, _NVIDIA_V2, "containerd 2.1.9 silently ignores it"),
        ("2.3.4", V3, _NVIDIA_V2, None),
        ("2.1.9", V3, _NVIDIA_V3, None),
        ("2.1.9", V3, _NVIDIA_V4, "containerd 2.1.9 does not start with them"),
        ("2.3.4", V3, _NVIDIA_V4, "containerd 2.3.4 does not start with them"),
        ("2.3.4", V4, _NVIDIA_V3, None),
        ("2.3.4", V4, _NVIDIA_V4, None),
        ("1.7.28", V2, _NVIDIA_V2, None),
        ("2.1.9", V2, _NO_VERSION, "Add version = 2 at the start"),
    ],
)
def test_a_file_of_another_version_is_told_with_what_this_release_makes_of_it(
    tmp_path: Path, version: str, main: str, other: str, words: str | None
) -> None:
    kernel, _ = host(tmp_path, None, f"{_IMPORTING}{main}", **{"99-nvidia": other})
    place = locate(kernel, "containerd", None, Version.parse(version))
    notes = prepare_entry(kernel, place, kata(), "").request.notes
    told = [
        note for note in notes if "99-nvidia.toml" in note and "writing the entry to" not in note
    ]
    assert len(told) == (words is not None)
    assert all(words in note for note in told if words)


@pytest.mark.parametrize("version", ["1.4.13", "1.5.18"])
def test_a_containerd_that_takes_no_path_of_a_shim_is_refused(tmp_path: Path, version: str) -> None:
    kernel, _ = host(tmp_path, None, V2)
    place = locate(kernel, "containerd", None, Version.parse(version))
    with pytest.raises(Refusal, match=rf"needs containerd 1\.6 or later; this is {version}"):
        prepare_entry(kernel, place, kata(), "")
    crun = RuntimeRequest("containerd", "crun", "/usr/bin/crun")
    notes = prepare_entry(kernel, place, crun, "").request.notes
    assert any("is untested" in note for note in notes)


@pytest.mark.parametrize(
    ("version", "is_beside"),
    [
        ("1.6.20", False),
        ("1.6.28", False),
        ("1.6.29", True),
        ("1.7.15", False),
        ("1.7.16", True),
        ("1.7.24", True),
    ],
)
@pytest.mark.parametrize("is_asked", [True, False])
def test_a_relative_pattern_is_looked_up_where_this_release_does(
    tmp_path: Path, version: str, *, is_beside: bool, is_asked: bool
) -> None:
    """With `--root` there is nobody to ask; a drop-in that holds CRI hides the main file."""
    main = f'imports = ["conf.d/*.toml"]\n{V2}'
    kernel, containerd = host(tmp_path, version, main, **{"99-nvidia": COPIED})
    place = locate(kernel, "containerd", None, Version.parse(version))
    if not is_asked:
        place = replace(place, other=Version(2, 1))
    apply_prepared(prepare_entry(kernel, place, kata(), ""), ApplyContext(kernel))
    theirs = MAIN.parent / "conf.d/99-nvidia.toml"
    assert ("kata-vfio" in (text(kernel, theirs) or "")) == is_beside
    assert ("kata-vfio" in (text(kernel, MAIN) or "")) != is_beside
    assert "kata-vfio" in dump(kernel, containerd)["plugins"][CRI]["containerd"]["runtimes"]


@pytest.mark.parametrize("told", [None, "1.7", "1.6"])
def test_where_releases_import_different_files_the_release_is_asked_for(
    tmp_path: Path, told: str | None
) -> None:
    main = f'imports = ["conf.d/*.toml"]\n{V2}'
    kernel, _ = host(tmp_path, None, main, **{"99-nvidia": COPIED})
    version = None if told is None else Version.parse(told)
    place = locate(kernel, "containerd", None, version)
    with pytest.raises(Refusal) as refusal:
        prepare_entry(kernel, place, kata(), "")
    assert (
        "is relative to the working directory up to containerd 1.6.28 and 1.7.15, and to that "
        "file in later releases"
    ) in refusal.value.message
    assert "--containerd-version 1.7.24" in refusal.value.hint
    kernel.remove(MAIN.parent / "conf.d/99-nvidia.toml")
    assert prepare_entry(kernel, place, kata(), "").request.changes, "both find nothing"


@pytest.mark.parametrize(("version", "main"), [("1.6.20", V2), ("1.7.28", V2), ("2.1.9", V3)])
@pytest.mark.parametrize("is_asked", [True, False])
def test_an_import_that_does_not_exist_is_named_with_its_importer(
    tmp_path: Path, version: str, main: str, *, is_asked: bool
) -> None:
    schema = main.partition("version = ")[2][0]
    kernel, _ = host(
        tmp_path,
        version if is_asked else None,
        f'imports = ["conf.d/a.toml"]\n{main}',
        a=f'version = {schema}\nimports = ["gone.toml"]\n',
    )
    place = locate(kernel, "containerd", None, Version.parse(version))
    with pytest.raises(Refusal) as refusal:
        prepare_entry(kernel, place, kata(), "")
    importer = "/etc/containerd/conf.d/a.toml"
    gone = "/etc/containerd/conf.d/gone.toml"
    assert f"{importer} imports {gone}, which does not exist" in refusal.value.message
    assert f"remove it from imports in {importer}" in refusal.value.hint


@pytest.mark.parametrize("version", ["2.0.11", "2.1.9", "2.2.0"])
@pytest.mark.parametrize("is_asked", [True, False])
@pytest.mark.parametrize(
    ("line", "is_dormant"),
    [
        ('snapshotter = "native"', True),
        ("discard_unpacked_layers = true", True),
        ('snapshotter = "overlayfs"', False),
        ('default_runtime_name = "runc"', False),
    ],
)
def test_a_setting_that_an_entry_would_wake_up_is_told_with_the_reason(
    tmp_path: Path, version: str, line: str, *, is_asked: bool, is_dormant: bool
) -> None:
    main = f'version = 2\n[plugins."{CRI}".containerd]\n{line}\n'
    kernel, _ = host(tmp_path, version if is_asked else None, main)
    place = locate(kernel, "containerd", None, Version.parse(version))
    if not is_dormant:
        assert prepare_entry(kernel, place, kata(), "").request.changes
        return
    with pytest.raises(Refusal) as refusal:
        prepare_entry(kernel, place, kata(), "")
    assert f"ignores {line} in {MAIN}" in refusal.value.message
    assert "please report" not in refusal.value.hint
    put(kernel, MAIN, f'{main}[plugins."{CRI}".containerd.runtimes.runc]\nruntime_type = "x"\n')
    assert prepare_entry(kernel, place, kata(), "").request.changes, "it counts already"


@pytest.mark.parametrize(("version", "is_told"), [("3.0", 1), ("2.3.9", 0)])
def test_a_release_that_was_not_tried_is_told(tmp_path: Path, version: str, is_told: int) -> None:
    kernel, _ = host(tmp_path, None, V2.replace('"nydus"', '"overlayfs"'))
    place = locate(kernel, "containerd", None, Version.parse(version))
    notes = prepare_entry(kernel, place, kata(), "").request.notes
    assert sum("is untested" in note for note in notes) == is_told


# ---- refusals


@pytest.mark.parametrize(
    ("main", "words", "remedy"),
    [
        ("root = '/x'\n", "version 1", "containerd config migrate"),
        ('disabled_plugins = ["cri"]\n', "version 1", "and remove cri from disabled_plugins"),
        (
            f'disabled_plugins = ["{CRI}"]\n{V2}',
            "disables CRI",
            "remove it from disabled_plugins, and run the command again",
        ),
        (V3, "containerd 1.7.28 cannot read", "--containerd-version"),
        (
            V2.replace("runtimes.runc", "runtimes.kata-vfio"),
            "vfiomgr did not write it",
            "kata-vfio-2",
        ),
    ],
)
def test_what_could_not_work_is_refused_with_what_lifts_it(
    tmp_path: Path, main: str, words: str, remedy: str
) -> None:
    kernel, _ = host(tmp_path, None, main)
    place = locate(kernel, "containerd", None, Version(1, 7, 28))
    with pytest.raises(Refusal) as refusal:
        prepare_entry(kernel, place, kata(), "")
    assert words in refusal.value.message
    assert remedy in refusal.value.hint


@pytest.mark.parametrize(
    ("version", "is_read"),
    [("2.0.11", False), ("2.1.9", False), ("2.2.0", False), ("2.3.0", True), (None, True)],
)
def test_version_4_is_written_only_for_a_containerd_that_reads_it(
    tmp_path: Path, version: str | None, *, is_read: bool
) -> None:
    kernel, _ = host(tmp_path, None, V4)
    place = locate(kernel, "containerd", None, Version.parse(version) if version else None)
    if is_read:
        changes = prepare_entry(kernel, place, kata(), "").request.changes
        assert any("version = 4" in (change.after or "") for change in changes)
        return
    with pytest.raises(Refusal) as refusal:
        prepare_entry(kernel, place, kata(), "")
    assert f"containerd {version} cannot read {MAIN}, a configuration of" in refusal.value.message
    assert "use containerd 2.3.0 or later" in refusal.value.hint


@pytest.mark.parametrize(
    "main", ['disabled_plugins = ["cri"]\n', f'disabled_plugins = ["cri"]\n{V2}']
)
@pytest.mark.parametrize("has_docker", [True, False])
def test_where_containerd_serves_docker_alone_docker_is_named(
    tmp_path: Path, main: str, *, has_docker: bool
) -> None:
    kernel, _ = host(tmp_path, None, main)
    put(kernel, "/etc/docker/daemon.json", "{}\n" if has_docker else None)
    place = locate(kernel, "containerd", None, Version(1, 7, 28))
    with pytest.raises(Refusal) as refusal:
        prepare_entry(kernel, place, kata(), "")
    assert ("--runtime docker" in refusal.value.hint) == has_docker


@pytest.mark.parametrize("version", ["1.7.28", "2.1.9"])
def test_lines_end_as_those_of_the_file_do(tmp_path: Path, version: str) -> None:
    main = V2.replace("\n", "\r\n")
    kernel, _ = host(tmp_path, version, main)
    install(kernel)
    written = (kernel.read_whole(MAIN) or b"").decode()
    assert written != main
    assert written.count("\n") == written.count("\r\n")
    put(kernel, MAIN, f"{written}# another line\r\n")
    uninstall(kernel)
    assert (kernel.read_whole(MAIN) or b"").decode() == f"{main}# another line\r\n"


def test_a_foreign_handler_in_a_drop_in_is_refused(tmp_path: Path) -> None:
    foreign = f"version = 3\n[plugins.'{RUNTIME}'.containerd.runtimes.kata-vfio]\n"
    main = f'imports = ["conf.d/*.toml"]\n{V3}'
    kernel, _ = host(tmp_path, "2.1.9", main, kata=foreign)
    with pytest.raises(Refusal, match=r"conf\.d/kata\.toml: .*did not write it"):
        install(kernel)


@pytest.mark.parametrize("broken", ["version = \n", "\ufeffversion = 2\n", "a = 1\na = 2\n"])
def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, broken: str) -> None:
    kernel, _ = host(tmp_path, "1.7.28", broken)
    with pytest.raises(InvalidDocument, match=r"/etc/containerd/config\.toml"):
        install(kernel)


def test_bytes_that_are_no_text_are_never_rewritten(tmp_path: Path) -> None:
    kernel, _ = host(tmp_path, "1.7.28", V2)
    kernel.sysfs.put_bytes(MAIN, b"# caf\xe9\nversion = 2\n")
    with pytest.raises(InvalidDocument, match="UTF-8"):
        install(kernel)


def test_without_a_version_and_a_file_nobody_knows_what_to_write(tmp_path: Path) -> None:
    kernel, _ = host(tmp_path, None, None)
    with pytest.raises(Refusal) as refusal:
        install(kernel)
    assert "--containerd-version 2.1" in refusal.value.hint


def test_of_an_unknown_containerd_version_2_is_edited_as_all_of_them_read_it(
    tmp_path: Path,
) -> None:
    kernel, _ = host(tmp_path, None, V2)
    prepared = install(kernel)
    assert "the containerd release that reads" in prepared.request.notes[0]
    assert "not installed here" in prepared.unchecked[0]
    assert "kata-vfio" in (text(kernel, MAIN) or "")
    assert text(kernel, DROP_IN) is None


# ---- what is owned


def test_a_copy_lies_beside_and_goes_where_the_file_is_the_same_again(tmp_path: Path) -> None:
    kernel, _ = host(tmp_path, "1.7.28", V2)
    (backup,) = install(kernel).backups
    assert backup.startswith(f"{MAIN}.vfiomgr-2")
    assert text(kernel, backup) == V2
    uninstall(kernel)
    assert text(kernel, backup) is None
    (backup,) = install(kernel).backups
    put(kernel, MAIN, (text(kernel, MAIN) or "") + "# later\n")
    uninstall(kernel)
    assert text(kernel, backup) == V2
    assert text(kernel, MAIN) == V2 + "# later\n"


def test_mode_and_link_of_the_main_file_are_kept(tmp_path: Path) -> None:
    kernel, _ = host(tmp_path, "1.7.28", None)
    kernel.sysfs.put_bytes("/srv/containerd.toml", V2.encode(), 0o640)
    link = kernel.sysfs.real(MAIN)
    os.makedirs(link.rpartition("/")[0], exist_ok=True)
    os.symlink("/srv/containerd.toml", link)
    install(kernel)
    assert kernel.link(MAIN) == "/srv/containerd.toml"
    place = HostPath("/srv/containerd.toml")
    assert "kata-vfio" in (text(kernel, place) or "")
    status = kernel.status(place)
    assert status is not None
    assert status.st_mode & 0o777 == 0o640
    uninstall(kernel)
    assert text(kernel, place) == V2


@pytest.mark.parametrize(("version", "main"), [("1.7.28", V2), ("2.1.9", V3)])
@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_two_entries_come_and_go_in_any_order(
    tmp_path: Path, version: str, main: str, order: tuple[str, str]
) -> None:
    kernel, containerd = host(tmp_path, version, main)
    before = configuration(kernel)
    for name in ("a", "b"):
        install(kernel, kata(name=name))
    first, last = order
    uninstall(kernel, first)
    read = dump(kernel, containerd)["plugins"]
    cri = read.get(RUNTIME) or read[CRI]
    assert set(cri["containerd"]["runtimes"]) == {"runc", last}
    assert cri["enable_cdi"] is True
    uninstall(kernel, last)
    assert configuration(kernel) == before
    assert text(kernel, RECORD) is None


_MAINS = [V2, f'version = 2\n[plugins."{CRI}"]\nsandbox_image = "x"\n[debug]\n']


@pytest.mark.parametrize("version", ["1.7.28", "2.1.9"])
@pytest.mark.parametrize("main", [*_MAINS, None])
@pytest.mark.parametrize("order", list(permutations("abc")))
def test_three_entries_leave_the_first_bytes_and_nobody_else_is_blamed(
    tmp_path: Path, version: str, main: str | None, order: tuple[str, ...]
) -> None:
    kernel, _ = host(tmp_path, version, main)
    before = configuration(kernel)
    install(kernel, kata(name="a", set_default=True))
    install(kernel, RuntimeRequest("containerd", "b", "/usr/bin/crun", set_default=True))
    install(kernel, kata(name="c", set_default=True))
    for name in order:
        assert not uninstall(kernel, name).request.notes
    assert configuration(kernel) == before
    assert text(kernel, RECORD) is None


@pytest.mark.parametrize(("version", "main"), [("1.7.28", V2), ("2.1.9", V3)])
def test_a_default_that_a_later_entry_replaced_is_nobody_elses_doing(
    tmp_path: Path, version: str, main: str
) -> None:
    kernel, containerd = host(tmp_path, version, main)
    for name in ("a", "b"):
        install(kernel, kata(name=name, set_default=True))
    place = MAIN if version == "1.7.28" else DROP_IN
    put(kernel, place, f"{text(kernel, place)}# somebody else's line\n")
    uninstall(kernel, "a")
    read = dump(kernel, containerd)["plugins"]
    inner = (read.get(RUNTIME) or read[CRI])["containerd"]
    assert inner["default_runtime_name"] == "b"
    uninstall(kernel, "b")
    read = dump(kernel, containerd)["plugins"]
    inner = (read.get(RUNTIME) or read[CRI])["containerd"]
    assert inner["default_runtime_name"] == "runc"
    assert set(inner["runtimes"]) == {"runc"}
    assert "somebody else" in (text(kernel, place) or "")


@pytest.mark.parametrize(("version", "main"), [("1.7.28", V2), ("2.1.9", V3)])
def test_another_shim_changes_the_entry_and_nothing_else(
    tmp_path: Path, version: str, main: str
) -> None:
    kernel, _ = host(tmp_path, version, main)
    before = configuration(kernel)
    install(kernel)
    other = RuntimeRequest(
        "containerd", "kata-vfio", "/x", config_path=CONFIGURATION, enable_cdi=True
    )
    assert install(kernel, other).request.changes
    assert not install(kernel, other).request.changes
    written = (text(kernel, MAIN) or "") + (text(kernel, DROP_IN) or "")
    assert '"/x"' in written
    assert SHIM not in written
    uninstall(kernel)
    assert configuration(kernel) == before


@pytest.mark.parametrize(
    ("version", "main", "place"), [("1.7.28", V2, MAIN), ("2.1.9", V3, DROP_IN)]
)
def test_what_was_edited_since_is_refused_with_the_key_and_what_lifts_it(
    tmp_path: Path, version: str, main: str, place: HostPath
) -> None:
    kernel, _ = host(tmp_path, version, main)
    install(kernel)
    put(kernel, place, (text(kernel, place) or "").replace(SHIM, "/usr/bin/other"))
    for attempt in (prepare_removal, prepare):
        with pytest.raises(Refusal) as refusal:
            attempt(kernel)
        assert "runtimes.kata-vfio.runtime_path" in refusal.value.message
        assert '"/usr/bin/other"' in refusal.value.message
        assert f'"{SHIM}"' in refusal.value.message
        assert "or remove plugins" in refusal.value.hint
        assert "the same command" in refusal.value.hint
    put(kernel, place, (text(kernel, place) or "").replace("/usr/bin/other", SHIM))
    uninstall(kernel)
    assert "kata-vfio" not in (text(kernel, MAIN) or "")


def test_an_entry_that_somebody_took_out_is_gone_and_the_rest_goes(tmp_path: Path) -> None:
    kernel, _ = host(tmp_path, "2.1.9", V3)
    install(kernel)
    kernel.remove(DROP_IN)
    prepared = uninstall(kernel)
    assert f"{DROP_IN} is already removed" in prepared.request.notes
    assert text(kernel, MAIN) == V3
    assert text(kernel, RECORD) is None


def test_an_import_that_others_came_to_need_stays(tmp_path: Path) -> None:
    kernel, containerd = host(tmp_path, "2.1.9", V3)
    install(kernel)
    theirs = "/etc/containerd/conf.d/99-nvidia.toml"
    entry = f"[plugins.'{RUNTIME}'.containerd.runtimes.nvidia]\nruntime_type = 'x'\n"
    put(kernel, theirs, f"version = 3\n{entry}")
    prepared = uninstall(kernel)
    assert any(theirs in note for note in prepared.request.notes)
    runtimes = dump(kernel, containerd)["plugins"][RUNTIME]["containerd"]["runtimes"]
    assert set(runtimes) == {"runc", "nvidia"}


def test_runc_as_somebody_changed_it_since_stays(tmp_path: Path) -> None:
    kernel, containerd = host(tmp_path, "1.7.28", "version = 2\n")
    install(kernel)
    changed = (text(kernel, MAIN) or "").replace(
        'runtime_type = "io.containerd.runc.v2"\n',
        'runtime_type = "io.containerd.runc.v2"\noptions = {SystemdCgroup = true}\n',
        1,
    )
    put(kernel, MAIN, changed)
    prepared = uninstall(kernel)
    assert any("runtimes.runc" in note and "stays" in note for note in prepared.request.notes)
    runc = dump(kernel, containerd)["plugins"][CRI]["containerd"]["runtimes"]["runc"]
    assert runc["options"]["SystemdCgroup"] is True


@pytest.mark.parametrize("version", ONE)
def test_runc_stays_where_others_came_to_need_it(tmp_path: Path, version: str) -> None:
    kernel, containerd = host(tmp_path, version, "version = 2\n")
    install(kernel)
    other = f'[plugins."{CRI}".containerd.runtimes.nvidia]\nruntime_type = "x"\n'
    put(kernel, MAIN, f"{text(kernel, MAIN)}\n{other}")
    taken = uninstall(kernel)
    assert any("runc" in note and "nvidia" in note for note in taken.request.notes)
    assert set(dump(kernel, containerd)["plugins"][CRI]["containerd"]["runtimes"]) == {
        "runc",
        "nvidia",
    }


@pytest.mark.parametrize("version", ["1.7.28", "2.1.9"])
def test_an_entry_that_a_default_names_is_not_taken_back(tmp_path: Path, version: str) -> None:
    kernel, _ = host(tmp_path, version, V2)
    install(kernel)
    line = 'snapshotter = "nydus"'
    there = (text(kernel, MAIN) or "").replace(
        line, f'{line}\n      default_runtime_name = "kata-vfio"'
    )
    put(kernel, MAIN, there)
    with pytest.raises(Refusal, match=r"default_runtime_name in .* names kata-vfio"):
        prepare_removal(kernel)


def test_the_record_is_roots_alone_and_one_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    kernel, _ = host(tmp_path, "2.1.9", V3)
    install(kernel)
    status = kernel.status(RECORD)
    assert status is not None
    assert status.st_mode & 0o777 == 0o600
    put(kernel, RECORD, "{}")
    with pytest.raises(InvalidDocument, match=r"runtimes\.json"):
        uninstall(kernel)


def test_two_containerds_have_entries_of_their_own(tmp_path: Path) -> None:
    kernel, _ = host(tmp_path, "2.1.9", V3)
    put(kernel, "/etc/second/config.toml", V3)
    install(kernel)
    second = prepare(kernel, main="/etc/second/config.toml")
    apply_prepared(second, ApplyContext(kernel))
    assert text(kernel, "/etc/second/conf.d/50-vfiomgr.toml")
    uninstall(kernel)
    assert text(kernel, MAIN) == V3
    assert text(kernel, "/etc/second/conf.d/50-vfiomgr.toml")
    (told,) = prepare_removal(kernel).request.already
    assert "--runtime-config /etc/second/config.toml" in told


# ---- plain runtimes


@pytest.mark.parametrize(("version", "main"), [("1.6.20", V2), ("2.1.9", V3)])
def test_a_plain_runtime_has_the_options_of_runc(tmp_path: Path, version: str, main: str) -> None:
    kernel, containerd = host(tmp_path, version, main)
    install(kernel, RuntimeRequest("containerd", "crun", "/usr/bin/crun", set_default=True))
    read = dump(kernel, containerd)["plugins"]
    inner = (read.get(RUNTIME) or read[CRI])["containerd"]
    assert inner["default_runtime_name"] == "crun"
    assert inner["runtimes"]["crun"]["options"] == {
        "BinaryName": "/usr/bin/crun",
        "SystemdCgroup": True,
    }
    uninstall(kernel, "crun")
    assert text(kernel, MAIN) == main


def test_cdi_that_is_asked_for_is_refused_by_1_6(tmp_path: Path) -> None:
    kernel, _ = host(tmp_path, "1.6.20", V2)
    with pytest.raises(Refusal, match="does not support CDI"):
        install(kernel, RuntimeRequest("containerd", "crun", "/usr/bin/crun", enable_cdi=True))


# ---- faults


def _prepared(
    place: Path, version: str, main: str, then: Callable[[FakeKernel], Request]
) -> tuple[FakeKernel, Request]:
    kernel, _ = host(place, version, main)
    return kernel, then(kernel)


def _installing(kernel: FakeKernel) -> Request:
    return prepare(kernel).request


def _uninstalling(kernel: FakeKernel) -> Request:
    install(kernel)
    return prepare_removal(kernel).request


def _changing(kernel: FakeKernel) -> Request:
    install(kernel)
    return prepare(
        kernel, RuntimeRequest("containerd", "kata-vfio", "/x", config_path="/y")
    ).request


def _course(
    tmp_path: Path, version: str, main: str, then: Callable[[FakeKernel], Request]
) -> Course:
    return Course(tmp_path, partial(_prepared, version=version, main=main, then=then))


class TestEveryFault(EveryFault):
    """Of entries in the main file and in a drop-in."""

    courses: ClassVar[Courses] = {
        f"{then.__name__[1:]}-{version}": partial(_course, version=version, main=main, then=then)
        for version, main in (("1.7.28", V2), ("2.1.9", V3))
        for then in (_installing, _uninstalling, _changing)
    }


@pytest.mark.parametrize(("version", "main"), [("1.7.28", V2), ("2.1.9", V3)])
@pytest.mark.parametrize("then", [_installing, _uninstalling, _changing])
def test_a_death_at_any_operation_leaves_files_old_or_new_and_the_command_goes_on(
    tmp_path: Path, version: str, main: str, then: Callable[[FakeKernel], Request]
) -> None:
    course = _course(tmp_path, version, main, then)
    for cut in course.cuts():
        kernel = cut.kernel
        assert isinstance(cut.intent, ChangeFiles)
        for path in (MAIN, DROP_IN):
            now = text(kernel, path)
            texts = {c.before for c in cut.intent.changes if c.path == path}
            texts |= {c.after for c in cut.intent.changes if c.path == path}
            assert not texts or now in texts, (cut.at, path)
        if then is _uninstalling:
            uninstall(kernel)
        elif then is _changing:
            install(kernel, RuntimeRequest("containerd", "kata-vfio", "/x", config_path="/y"))
            uninstall(kernel)
        else:
            install(kernel)
            uninstall(kernel)
        assert text(kernel, MAIN) == main, cut.at
        assert text(kernel, DROP_IN) is None, cut.at
        assert cut_off_runs(kernel, kernel.read(BOOT_ID)) == [], cut.at


def test_a_file_that_others_changed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    kernel, _ = host(tmp_path, "1.7.28", V2)
    prepared = prepare(kernel)
    put(kernel, MAIN, f"{V2}# somebody\n")
    with pytest.raises(Refusal, match="changed by another program"):
        apply_prepared(prepared, ApplyContext(kernel))
    assert text(kernel, MAIN) == f"{V2}# somebody\n"


@pytest.mark.parametrize("version", ["1.7.28", "2.1.9"])
def test_what_was_written_while_containerd_was_asked_is_not_lost(
    tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, _ = host(tmp_path, version, V2)
    dumped = apply.dump

    def meanwhile(*arguments: Any) -> Any:
        told = dumped(*arguments)
        put(kernel, MAIN, f"{V2}# by somebody else\n")
        return told

    monkeypatch.setattr("vfiomgr.containers.runtimes.entries.dump", meanwhile)
    prepared = prepare(kernel)
    with pytest.raises(Refusal, match=r"config\.toml was changed by another program"):
        apply_prepared(prepared, ApplyContext(kernel))
    assert text(kernel, MAIN) == f"{V2}# by somebody else\n"
    assert text(kernel, DROP_IN) is None


def test_while_files_are_looked_at_no_other_run_begins(tmp_path: Path) -> None:
    kernel, _ = host(tmp_path, "2.1.9", V3)

    def make() -> Prepared:
        ready = prepare(kernel)
        with (
            pytest.raises(HostError, match="is being changed"),
            hold(kernel, ("runtimes-read",), lambda _: None, wait=False),
        ):
            pass
        return ready

    _, outcome = change(make, ApplyContext(kernel))
    assert outcome.is_changed


def test_what_is_handed_on_twice_does_not_become_part_of_a_template(tmp_path: Path) -> None:
    kernel, _ = host(tmp_path, "2.1.9", V3)
    names = [f"k{number}" for number in range(4)]
    for name in names:
        install(kernel, kata(name=name))
    for name in names:
        uninstall(kernel, name)
    assert text(kernel, MAIN) == V3
    assert text(kernel, DROP_IN) is None


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EBUSY, "findmnt"),
        (errno.ENOSPC, "free space"),
        (errno.EPERM, "lsattr"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "dmesg"),
    ],
)
def test_a_file_that_cannot_be_replaced_is_told_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    kernel, _ = host(tmp_path, "1.7.28", V2)
    before = configuration(kernel)
    replace = kernel.replace

    def busy(path: HostPath, *arguments: Any, **more: Any) -> None:
        if path == MAIN:
            raise OSError(number, os.strerror(number), path)
        replace(path, *arguments, **more)

    monkeypatch.setattr(kernel, "replace", busy)
    with pytest.raises(RolledBack) as error:
        install(kernel)
    assert f"cannot write {MAIN}: {os.strerror(number)}" in error.value.message
    assert "defect" not in error.value.hint
    assert remedy in error.value.hint
    assert configuration(kernel) == before


@pytest.mark.parametrize("imports", ["[1]", "'no list'", "{a = 1}", "[2026-11-21]"])
@pytest.mark.parametrize("is_inner", [False, True])
def test_imports_that_are_none_are_told(tmp_path: Path, imports: str, *, is_inner: bool) -> None:
    wrong = f"version = 3\nimports = {imports}\n"
    main = 'version = 3\nimports = ["/etc/containerd/conf.d/*.toml"]\n' if is_inner else wrong
    kernel, _ = host(tmp_path, "2.1.9", main, **({"theirs": wrong} if is_inner else {}))
    with pytest.raises(InvalidDocument) as error:
        install(kernel)
    name = "conf.d/theirs.toml" if is_inner else "config.toml"
    assert f"imports in /etc/containerd/{name} is not a list of strings" in error.value.message
    assert error.value.hint


@pytest.mark.parametrize(
    "main", ["plugins = 3\n", "plugins = {cri = 3}\n", "disabled_plugins = 1\n"]
)
def test_values_of_another_kind_are_no_defect(tmp_path: Path, main: str) -> None:
    kernel, _ = host(tmp_path, None, f"version = 2\n{main}")
    place = locate(kernel, "containerd", None, Version(1, 7))
    with contextlib.suppress(Refusal):
        prepare_entry(kernel, place, kata(), "")


def test_a_pipe_is_no_configuration(tmp_path: Path) -> None:
    kernel, _ = host(tmp_path, "2.1.9", V3)
    kernel.remove(MAIN)
    os.mkfifo(kernel.locate(MAIN))
    with pytest.raises(InvalidDocument) as error:
        prepare(kernel)
    assert f"{MAIN} is not a regular file" in error.value.message
    assert error.value.hint


def test_no_room_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    kernel, _ = host(tmp_path, "1.7.28", V2)
    before = configuration(kernel)
    prepared = prepare(kernel)
    kernel.fail(at=6, errno=errno.ENOSPC)
    with pytest.raises(RolledBack):
        apply_prepared(prepared, ApplyContext(kernel))
    assert configuration(kernel) == before

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.persistence.test_plan import BIND, GPU, GRAPHICS, HOOK, RULE, host_with
from vfiomgr.documents.text import TextFile
from vfiomgr.engine.registry import plan
from vfiomgr.passthrough.steps import Unbind
from vfiomgr.persistence.model import (
    COMMANDS,
    HOOKS,
    VERIFIED,
    Initramfs,
)
from vfiomgr.persistence.steps import ForgetPersisted, RebuildInitramfs, ReplaceFile

REBUILD = replace(BIND, update_initramfs=True)
FORGET = ForgetPersisted((GPU.address,))


def test_the_initramfs_gets_the_rules_where_it_brings_the_driver() -> None:
    made = plan(host_with(bound=False, initramfs=GRAPHICS), BIND)
    hook = made.steps[-1]
    assert isinstance(hook, ReplaceFile)
    assert (hook.path, hook.before, hook.mode) == (HOOK, None, 0o755)
    assert "rebuild it with update-initramfs -u -k all" in made.notes[-1]
    rebuilt = plan(host_with(bound=False, initramfs=GRAPHICS), replace(BIND, update_initramfs=True))
    assert rebuilt.steps[-1] == RebuildInitramfs(("update-initramfs", "-u", "-k", "all"))


def test_an_initramfs_that_brings_other_drivers_is_left_alone() -> None:
    image = Initramfs("initramfs-tools", ("ahci",), ("01",))
    made = plan(host_with(bound=False, initramfs=image), replace(BIND, update_initramfs=True))
    assert not [step for step in made.steps if isinstance(step, RebuildInitramfs)]
    assert HOOK not in [getattr(step, "path", None) for step in made.steps]


@pytest.mark.parametrize("module", ["nvidia", "vfio_pci"])
def test_a_module_that_the_initramfs_names_counts(module: str) -> None:
    image = Initramfs("dracut", (module,))
    assert HOOKS["dracut"] in [
        getattr(step, "path", None)
        for step in plan(host_with(bound=False, initramfs=image), BIND).steps
    ]


def test_mkinitcpio_without_fragments_is_advised() -> None:
    image = Initramfs("mkinitcpio", ("nvidia",), reads_fragments=False)
    made = plan(host_with(bound=False, initramfs=image), BIND)
    assert f"FILES+=({RULE.path})" in made.notes[-1]
    assert "to /etc/mkinitcpio.conf, then run mkinitcpio -P" in made.notes[-1]
    own = replace(image, configuration="/etc/mkinitcpio-lts.conf")
    made = plan(host_with(bound=False, initramfs=own), BIND)
    assert "to /etc/mkinitcpio-lts.conf, then run mkinitcpio -P" in made.notes[-1]


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        ("transactional-update", "the new initramfs belongs to a new snapshot: reboot to use it"),
    ],
)
def test_what_deploys_the_initramfs_rebuilds_it(tool: str, told: str) -> None:
    made = plan(host_with(bound=False, initramfs=Initramfs(tool, (), ("03",))), REBUILD)
    assert HOOKS[tool] in [getattr(step, "path", None) for step in made.steps]
    assert made.steps[-1] == RebuildInitramfs(COMMANDS[tool])
    assert told in " ".join(made.notes)
    assert "vfiomgr does not verify that the new initramfs contains the rules" in made.notes[-1]


def test_an_initramfs_that_is_verified_needs_no_note() -> None:
    for tool in VERIFIED:
        made = plan(host_with(bound=False, initramfs=Initramfs(tool, (), ("03",))), REBUILD)
        assert made.steps[-1] == RebuildInitramfs(COMMANDS[tool])
        assert "verify" not in " ".join(made.notes)


OSTREE = Initramfs("rpm-ostree", (), ("03",))


def test_rpm_ostree_tracks_the_rules_and_reads_no_hook() -> None:
    made = plan(host_with(bound=False, initramfs=OSTREE), BIND)
    command = f"rpm-ostree initramfs-etc --force-sync --track={RULE.path}"
    assert made.steps[-1] == ReplaceFile(RULE.path, None, RULE.text)
    assert f"rebuild it with {command}, or pass --update-initramfs" in made.notes[-1]
    rebuilt = plan(host_with(bound=False, initramfs=OSTREE), REBUILD)
    assert rebuilt.steps[-1] == RebuildInitramfs(tuple(command.split()))
    new_root, by_hand = rebuilt.notes[-2:]
    assert "a new deployment: reboot to use it, and upgrade with rpm-ostree" in new_root
    assert by_hand.endswith("run rpm-ostree status, which lists them as InitramfsEtc")


def test_rpm_ostree_no_longer_tracks_a_rule_that_is_removed() -> None:
    host = host_with(RULE, initramfs=OSTREE)
    command = f"rpm-ostree initramfs-etc --force-sync --untrack={RULE.path}"
    forgotten = plan(host, replace(FORGET, update_initramfs=True))
    assert forgotten.steps == (
        ReplaceFile(RULE.path, RULE.text, None),
        RebuildInitramfs(tuple(command.split())),
    )
    unbound = plan(host, Unbind((GPU.address,), forget=True))
    assert f"rebuild it with {command}" in unbound.notes[-1]
    assert "cannot deploy anything while it tracks a file that does not exist" in unbound.notes[-2]


def test_rpm_ostree_is_left_alone_where_no_rule_matters() -> None:
    for image in (Initramfs("rpm-ostree", ("ahci",), ("01",)), OSTREE):
        host = host_with(*([RULE] if image is OSTREE else []), initramfs=image)
        assert not [s for s in plan(host, REBUILD).steps if isinstance(s, RebuildInitramfs)]


@pytest.mark.parametrize("rebuild", [False, True])
def test_the_image_of_bootc_is_built_elsewhere(*, rebuild: bool) -> None:
    image = Initramfs("bootc", (), ("03",))
    made = plan(host_with(bound=False, initramfs=image), replace(BIND, update_initramfs=rebuild))
    assert made.steps[-1] == ReplaceFile(RULE.path, None, RULE.text)
    assert f"copy {RULE.path} into it" in made.notes[-1]
    assert f'install_items+=" {RULE.path} " and add_drivers+=" vfio_pci "' in made.notes[-1]
    assert plan(host_with(RULE, initramfs=image), FORGET).notes[-1].startswith(f"{GPU} stays on")


def test_a_tool_that_is_not_supported_may_include_every_driver() -> None:
    image = Initramfs("booster")
    made = plan(host_with(bound=False, initramfs=image), REBUILD)
    assert made.steps[-1] == ReplaceFile(RULE.path, None, RULE.text)
    assert made.notes[-1] == (
        "cannot tell whether the initramfs includes a host driver: booster is not supported. If "
        f"it does, leave the driver out, or add {RULE.path}; then rebuild it"
    )


def test_a_removed_rule_may_be_in_the_image_of_a_tool_that_is_not_supported() -> None:
    hook = TextFile(HOOKS["mkinitcpio"], "FILES+=()\n")
    made = plan(host_with(RULE, hook, initramfs=Initramfs("booster")), FORGET)
    assert ReplaceFile(hook.path, hook.text, None) in made.steps
    note = "booster is not supported: rebuild the initramfs if it includes removed rules"
    assert note in made.notes

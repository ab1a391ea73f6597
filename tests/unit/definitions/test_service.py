from __future__ import annotations

import re
from configparser import ConfigParser

import pytest

from vfiomgr.definitions.model import INSTANCE, SERVICE
from vfiomgr.definitions.plan import (
    render_instance,
    render_registration_rule,
    render_service,
    render_wanted,
)
from vfiomgr.errors import Refusal


def unit(text: str) -> ConfigParser:
    parser = ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser


def test_the_service_comes_after_drivers_and_before_those_who_hand_vgpus_to_guests() -> None:
    service = unit(render_service("/usr/bin/vfiomgr"))
    assert service["Service"]["Type"] == "oneshot"
    assert service["Service"]["ExecStart"] == "/usr/bin/vfiomgr vgpu restore --boot"
    assert "nvidia-vgpu-mgr.service" in service["Unit"]["After"].split()
    before = {"libvirtd.service", "virtqemud.service", "kubelet.service", "containerd.service"}
    assert before <= set(service["Unit"]["Before"].split())
    assert unit(render_wanted())["Unit"]["Wants"] == SERVICE.name


def test_its_instance_is_for_one_parent_and_started_by_the_rule() -> None:
    instance = unit(render_instance("/usr/bin/vfiomgr"))
    assert instance["Service"]["ExecStart"].endswith("vgpu restore --boot --parent %i")
    rule = re.sub(r"\\\n\s*", "", render_registration_rule()).splitlines()[-2]
    assert rule.split(", ") == [
        'ACTION=="change"',
        'ENV{MDEV_STATE}=="registered"',
        'TEST=="/etc/mdevctl.d/$kernel"',
        f'RUN+="/bin/systemctl --no-block start {INSTANCE.name.replace("@", "@$kernel")}"',
    ]


@pytest.mark.parametrize("render", [render_service, render_instance])
def test_a_program_that_a_unit_cannot_hold_is_refused(render: object) -> None:
    assert callable(render)
    with pytest.raises(Refusal, match="cannot write a systemd unit"):
        render("/opt/my tools/vfiomgr")

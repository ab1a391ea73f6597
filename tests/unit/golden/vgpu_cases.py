"""What is typed for the golden files about vGPUs; tests/golden/commands has the answers."""

from __future__ import annotations

from tests.fakes.vgpu_hosts import t4_host
from tests.unit.golden.hosts import (
    MBOCHS,
    SYSTEMD,
    UUID,
    divided_host,
    small_a40_host,
    two_l40s_host,
)
from tests.unit.golden.transcripts import Scenario

PARAMETER = "nvidia/vgpu_params=a=1"
VGPU_SCENARIOS = (
    Scenario(
        "vgpu create",
        f"""
        vgpu create {MBOCHS} --dry-run
        vgpu create {MBOCHS}
        vgpu create {MBOCHS}
        vgpu create --parent mbochs --type mbochs-huge
        vgpu create --parent mbochs --type mbochs-large --count 9
        """,
        keeps=True,
        journals={"create-vgpu": "create-vgpu"},
        in_json=True,
    ),
    Scenario(
        "vgpu create",
        f"vgpu create --type A100-1-5C --parent 21:00.0 {UUID} --dry-run"
        f"\nvgpu create --type A100-1-5C --parent 21:00.0 {UUID}",
        divided_host,
        case="mig",
        journals={"create-vgpu-mig": "create-vgpu"},
    ),
    Scenario(
        "vgpu create",
        f"vgpu create --framebuffer 8G --parent 21:00.0 {UUID}",
        two_l40s_host,
        case="vendor",
        keeps=True,
        journals={"create-vgpu-vendor": "create-vgpu"},
    ),
    Scenario(
        "vgpu define",
        f"""
        vgpu define {MBOCHS} --autostart --attribute power/control=on --dry-run
        vgpu define {MBOCHS} --autostart
        vgpu define {MBOCHS} --autostart
        vgpu define
        """,
        host_files=SYSTEMD,
        journals={"define-vgpu": "define-vgpu"},
    ),
    Scenario(
        "vgpu define",
        "vgpu define --parent 21:00.4 --type L40S-8Q --autostart --dry-run"
        "\nvgpu define --parent 21:00.4 --type L40S-8Q --autostart",
        two_l40s_host,
        host_files=SYSTEMD,
        case="vendor",
        keeps=True,
        journals={"define-vgpu-vendor": "define-vgpu"},
    ),
    Scenario(
        "vgpu instances",
        """
        .vgpu instances 21:00.0 1g.5gb=2
        vgpu instances 21:00.0 --none --dry-run
        vgpu instances 21:00.0 --none
        vgpu instances 21:00.0 --none
        vgpu instances 41:00.0 --none
        """,
        divided_host,
        case="none",
    ),
    Scenario(
        "vgpu instances",
        "vgpu instances\n.vgpu instances 21:00.0 3g.20gb=1 1g.5gb=1"
        "\nvgpu instances 21:00.0\nvgpu instances 41:00.0",
        divided_host,
    ),
    Scenario(
        "vgpu instances",
        """
        vgpu instances 21:00.0 3g.20gb=1 --dry-run
        vgpu instances 21:00.0 3g.20gb=1
        vgpu instances 21:00.0 3g.20gb=1
        vgpu instances 21:00.0 3g.20gb=3
        vgpu instances 41:00.0 1g.5gb=1
        """,
        divided_host,
        case="set",
        journals={"divide-gpu": "set-mig-instances"},
    ),
    Scenario(
        "vgpu list",
        f"""
        vgpu list
        .vgpu define {MBOCHS} --autostart
        .vgpu start {UUID}
        vgpu list
        vgpu list --defined
        vgpu list --root nowhere
        """,
        in_json=True,
    ),
    Scenario(
        "vgpu mode",
        """
        vgpu mode
        vgpu mode 21:00.0 --heterogeneous --dry-run
        vgpu mode 21:00.0 --heterogeneous
        vgpu mode 21:00.0 --heterogeneous
        vgpu mode 21:00.0 --mig
        """,
        two_l40s_host,
        journals={"set-gpu-mode": "set-gpu-mode"},
    ),
    Scenario(
        "vgpu mode",
        "vgpu mode 41:00.0 --mig",
        divided_host,
        case="mig",
        journals={"set-gpu-mode-mig": "set-gpu-mode"},
    ),
    Scenario(
        "vgpu remove",
        f"""
        .vgpu create {MBOCHS}
        vgpu remove {UUID} --dry-run
        vgpu remove {UUID}
        vgpu remove {UUID}
        vgpu remove --all
        vgpu remove
        """,
        journals={"remove-vgpu": "remove-vgpu"},
    ),
    Scenario(
        "vgpu remove",
        ".vgpu create --framebuffer 8G --parent 21:00.0\nvgpu remove 21:00.4",
        two_l40s_host,
        case="vendor",
        journals={"remove-vgpu-vendor": "remove-vgpu"},
    ),
    Scenario(
        "vgpu restore",
        f"""
        vgpu restore
        .vgpu define {MBOCHS} --autostart
        vgpu restore --dry-run
        vgpu restore
        vgpu restore
        """,
        journals={"restore-vgpus": "restore-vgpus"},
        in_json=True,
    ),
    Scenario(
        "vgpu restore",
        f".vgpu define {MBOCHS} --autostart --attribute power/control=on\nvgpu restore",
        case="failed",
        journals={"restore-vgpus-failed": "restore-vgpus"},
    ),
    Scenario(
        "vgpu start",
        f"""
        .vgpu define --parent 21:00.0 --type nvidia-231 {UUID} --attribute {PARAMETER}
        vgpu start {UUID} --dry-run
        vgpu start {UUID}
        """,
        t4_host,
        case="attribute",
        journals={"start-vgpu-attribute": "start-vgpu"},
    ),
    Scenario(
        "vgpu start",
        f"""
        vgpu start {UUID}
        .vgpu define {MBOCHS}
        vgpu start {UUID} --dry-run
        vgpu start {UUID}
        vgpu start {UUID}
        """,
        journals={"start-vgpu": "start-vgpu"},
    ),
    Scenario(
        "vgpu stop",
        f"""
        .vgpu define {MBOCHS}
        .vgpu start {UUID}
        vgpu stop {UUID} --dry-run
        vgpu stop {UUID}
        vgpu stop {UUID}
        vgpu stop x
        """,
        journals={"stop-vgpu": "stop-vgpu"},
    ),
    Scenario(
        "vgpu mode",
        """
        .vgpu create --type L40S-8Q --parent 21:00.0
        vgpu mode 21:00.0 passthrough --dry-run
        vgpu mode 21:00.0 passthrough
        vgpu mode 21:00.0 passthrough
        vgpu mode 21:00.0 vgpu
        vgpu mode 21:00.0 host
        vgpu mode 21:00.0 vgpu --functions 1
        """,
        two_l40s_host,
        case="switch",
        journals={"switch-gpu": "switch-gpu"},
    ),
    Scenario(
        "vgpu list",
        "vgpu list --types\nvgpu list --types --parent 41:00.0",
        two_l40s_host,
        case="types",
    ),
    Scenario(
        "vgpu list",
        "vgpu list --types\nvgpu list --types --parent 99:00.0",
        small_a40_host,
        case="types-a40",
    ),
    Scenario(
        "vgpu undefine",
        f"""
        .vgpu define {MBOCHS} --autostart
        vgpu undefine {UUID} --dry-run
        vgpu undefine {UUID}
        vgpu undefine {UUID}
        vgpu undefine x
        """,
        host_files=SYSTEMD,
        journals={"undefine-vgpu": "undefine-vgpu"},
    ),
)

"""What `layout export --for nova` prints, read by nova itself, in an environment of its own.

nova and its 139 packages take 400 MB of the cache, so that no other test needs them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from typing import TYPE_CHECKING

from tests.lab.kernel import cache_root
from tests.unit.devices import host_of
from tests.unit.layout.test_export import card
from tests.unit.layout.test_for_managers import HOST, written
from tests.unit.vgpus import a40_type, vgpu_host

if TYPE_CHECKING:
    from pathlib import Path

NOVA = "nova==34.0.0"
_READER = """\
import json, sys
import nova.conf, nova.conf.devices
from nova.pci import request, whitelist
options = nova.conf.CONF
options([], project="nova", default_config_files=[sys.argv[1]])
nova.conf.devices.register_dynamic_opts(options)
specs = whitelist.Whitelist(options.pci.device_spec)
print(json.dumps({
    "assignable": [bool(specs.device_assignable(d)) for d in json.loads(sys.argv[2])],
    "aliases": sorted(request.get_alias_from_config()),
    "types": {t: options[f"mdev_{t}"].device_addresses for t in options.devices.enabled_mdev_types},
}))
"""


def _python() -> Path:
    """Nova's interpreter, whose environment is made once."""
    directory = cache_root() / NOVA.replace("==", "-")
    python = directory / "bin/python"
    if not (directory / "complete").exists():
        venv.create(directory, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-cache-dir", NOVA], check=True)
        (directory / "complete").touch()
    return python


def read(text: str, devices: list[dict[str, str]]) -> dict[str, object]:
    """What nova understands of a configuration, and which devices it would assign."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write(text)
        file.flush()
        command = [str(_python()), "-W", "ignore", "-c", _READER, file.name, json.dumps(devices)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Compare what nova reads with what the host has."""
    hosts = {
        "passed through": HOST,
        "variant driver": host_of(card(1, driver="nvgrace_gpu_vfio_pci")),
        "vGPUs": vgpu_host((a40_type(4),) * 2, functions=4),
    }
    for name, host in hosts.items():
        devices = [d for d in host.devices if d.physical_function is None]
        facts = [
            {
                "vendor_id": d.vendor_id,
                "product_id": d.device_id,
                "address": str(d.address),
                "dev_type": "type-PCI",
            }
            for d in devices
        ]
        found = read(written(host, "nova"), facts)
        sys.stdout.write(f"{name}: {json.dumps(found)}\n")
        if found["assignable"] != [d.is_on_vfio for d in devices]:
            sys.stderr.write("nova assigns other devices\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

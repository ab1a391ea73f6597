"""Containers inside a guest: Debian's containerd, and an image that is made on the spot."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

from tests.lab.errors import LabError
from tests.lab.topology import current

IMAGE = "lab.invalid/busybox:latest"
"""Its registry is nowhere."""
_PLACE = Path("/run/lab/containerd")
_ADDRESS = _PLACE / "socket"
_LOG = _PLACE / "log"
_PROGRAMS = _PLACE / "bin"
_BUSYBOX = Path("/usr/bin/busybox")
_LIMIT = 300.0
"""Seconds that nothing takes, on however busy a machine."""
_SHIM = "containerd-shim-runc-v2"


def start() -> None:
    """Start containerd in the guest's memory, and import the image; nothing where it runs."""
    if current() is None:
        reason = "containerd is started inside a guest only, not on the machine"
        raise LabError(reason)
    if _ADDRESS.exists():
        return
    _PROGRAMS.mkdir(parents=True)
    shim = shutil.which(_SHIM)
    assert shim is not None
    # What Kata's shim is called; behind the name is that of runc, since the laboratory has no KVM.
    (_PROGRAMS / "containerd-shim-kata-v2").symlink_to(shim)
    configuration = _PLACE / "config.toml"
    configuration.write_text('version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n')
    places = [f"--root={_PLACE}/root", f"--state={_PLACE}/state", f"--address={_ADDRESS}"]
    environment = {**os.environ, "PATH": f"{_PROGRAMS}:{os.environ['PATH']}"}
    with _LOG.open("wb") as log:
        command = ["setsid", "--fork", "containerd", "--config", str(configuration), *places]
        subprocess.run(command, stdout=log, stderr=log, env=environment, check=True)
    _wait()
    archive = _PLACE / "image.tar"
    archive.write_bytes(image())
    assert ctr("image", "import", "--snapshotter", "native", str(archive)).returncode == 0


def ctr(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ctr, and give back what it and its container said."""
    command = ["ctr", "--address", str(_ADDRESS), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT)


def make_root(directory: Path) -> None:
    """A root file system with busybox alone."""
    (directory / "bin").mkdir(parents=True)
    shutil.copy(_BUSYBOX, directory / "bin/busybox")


def image() -> bytes:
    """An image with busybox alone, as `docker save` writes it (image-spec of Docker, v1.2)."""
    layer = _tar({"bin/busybox": _BUSYBOX.read_bytes()}, mode=0o755)
    configuration = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": ["/bin/busybox", "true"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    return _tar(
        {
            "layer.tar": layer,
            "config.json": json.dumps(configuration).encode(),
            "manifest.json": json.dumps(manifest).encode(),
        },
        mode=0o644,
    )


def _tar(files: dict[str, bytes], *, mode: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _wait() -> None:
    """Return when containerd answers."""
    deadline = time.monotonic() + _LIMIT
    while ctr("version").returncode:
        if time.monotonic() > deadline:
            reason = f"containerd did not answer within {_LIMIT:.0f} s:\n{_LOG.read_text()}"
            raise LabError(reason)
        time.sleep(0.2)

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
from dataclasses import dataclass
from pathlib import Path

from tests import debian
from tests.lab.errors import LabError
from tests.lab.topology import current

IMAGE, PAUSE = "lab.invalid/busybox:latest", "lab.invalid/pause:latest"
"""Their registry is nowhere; the second one is for sandboxes of pods, and does not end."""
_BUSYBOX = Path("/usr/bin/busybox")
_LIMIT = 300.0
"""Seconds that nothing takes, on however busy a machine."""
_SHIM = "containerd-shim-runc-v2"
_WITHOUT_CRI = """\
version = 2
disabled_plugins = ["io.containerd.grpc.v1.cri"]
# Since version 2, `ctr image import` has containerd itself unpack, which knows overlayfs only.
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
  platform = "linux/amd64"
  snapshotter = "native"
"""
_WITH_CDI = f"""\
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
"""


@dataclass(frozen=True)
class Containerd:
    """A containerd in the guest's memory."""

    place: Path
    configuration: str
    namespace: str
    directories: tuple[str, ...] = ()
    """Where its programs are, before those of PATH."""

    @property
    def address(self) -> Path:
        """Its socket."""
        return self.place / "socket"

    def start(self) -> None:
        """Start it, and import the images; nothing if it runs."""
        if current() is None:
            reason = "containerd is started inside a guest only, not on the machine"
            raise LabError(reason)
        if self.address.exists():
            return
        programs = self.place / "bin"
        programs.mkdir(parents=True)
        shim = shutil.which(_SHIM, path=self._path)
        assert shim is not None
        # What Kata's shim is called; behind the name is that of runc: the laboratory has no KVM.
        (programs / "containerd-shim-kata-v2").symlink_to(shim)
        runc = shutil.which("runc")
        assert runc is not None
        (programs / "runc").symlink_to(runc)  # another release's may need other libraries
        file = self.place / "config.toml"
        file.write_text(self.configuration)
        state = [f"--root={self.place}/root", f"--state={self.place}/state"]
        environment = {**os.environ, "PATH": f"{programs}:{self._path}"}
        with (self.place / "log").open("wb") as log:
            command = ["setsid", "--fork", self._program("containerd"), "--config", str(file)]
            command += [*state, f"--address={self.address}"]
            subprocess.run(command, stdout=log, stderr=log, env=environment, check=True)
        self._wait()
        for name, command in ((IMAGE, ["true"]), (PAUSE, ["sleep", "1000000"])):
            archive = self.place / "image.tar"
            archive.write_bytes(image(name, command))
            answer = self.ctr("image", "import", "--snapshotter", "native", str(archive))
            assert answer.returncode == 0, answer.stderr

    def ctr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ctr, and give back what it and its container said."""
        command = [self._program("ctr"), "--address", str(self.address)]
        command += ["--namespace", self.namespace, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT)

    @property
    def _path(self) -> str:
        return os.pathsep.join((*self.directories, os.environ["PATH"]))

    def _program(self, name: str) -> str:
        found = shutil.which(name, path=self._path)
        assert found is not None
        return found

    def _wait(self) -> None:
        """Return when it answers."""
        deadline = time.monotonic() + _LIMIT
        while self.ctr("version").returncode:
            if time.monotonic() > deadline:
                log = (self.place / "log").read_text()
                reason = f"containerd did not answer within {_LIMIT:.0f} s:\n{log}"
                raise LabError(reason)
            time.sleep(0.2)


_INSTALLED = Containerd(Path("/run/lab/containerd"), _WITHOUT_CRI, "default")
start, ctr = _INSTALLED.start, _INSTALLED.ctr


def for_pods() -> Containerd:
    """Debian trixie's, which has CDI, with pods; on the machine, it is fetched."""
    program = debian.program("trixie", "containerd", "usr/bin/containerd", within="docker.io")
    return Containerd(Path("/run/lab/pods"), _WITH_CDI, "k8s.io", program.directories)


def make_root(directory: Path) -> None:
    """A root file system with busybox alone."""
    (directory / "bin").mkdir(parents=True)
    shutil.copy(_BUSYBOX, directory / "bin/busybox")


def image(name: str, command: list[str]) -> bytes:
    """An image with busybox alone, as `docker save` writes it (image-spec of Docker, v1.2)."""
    layer = _tar({"bin/busybox": _BUSYBOX.read_bytes()}, mode=0o755)
    configuration = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": ["/bin/busybox", *command]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
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

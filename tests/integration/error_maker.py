"""Errors of this machine's libvirt, made by mistakes: a line of JSON for each.

It has name, code, text, domain and errno. This program imports nothing of vfiomgr. Its arguments
are an empty directory, which a user without rights may write to, and the names of the errors.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import libvirt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
OTHER = "0d0c8a05-3c8b-4f0a-9c58-5d2cf0a9b0ff"
LIVE, CONFIG = libvirt.VIR_DOMAIN_AFFECT_LIVE, libvirt.VIR_DOMAIN_AFFECT_CONFIG
MAKERS: dict[str, Callable[[Libvirt], object]] = {}
_BARE = "<controller type='usb' model='none'/><memballoon model='none'/>"
_PORT = "<controller type='pci' index='1' model='pcie-root-port'/>"
_FIXED_PORT = _PORT.replace("/>", "><target hotplug='off'/></controller>")
_DEADLINE = 60.0


def maker(function: Callable[[Libvirt], object]) -> Callable[[Libvirt], object]:
    """Call the error by the name of its function."""
    MAKERS[function.__name__] = function
    return function


def domain(devices: str = "", *, uuid: str = "", **parts: str) -> str:
    """A guest of 64 MiB: name, kind, what is before and in its <os>, and after its devices."""
    identity = f"<name>{parts.get('name', 'win')}</name>" + (uuid and f"<uuid>{uuid}</uuid>")
    return (
        f"<domain type='{parts.get('kind', 'qemu')}' "
        f"xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>{identity}"
        f"<memory unit='MiB'>64</memory>"
        f"<os><type arch='x86_64' machine='q35'>hvm</type>{parts.get('os', '')}</os>"
        f"<devices>{devices}</devices>{parts.get('rest', '')}</domain>"
    )


def pci(rest: str = "") -> str:
    """A function that this machine may not have."""
    place = "<address domain='0' bus='1' slot='0' function='0'/>"
    start = "<hostdev mode='subsystem' type='pci' managed='no'>"
    return f"{start}<source>{place}</source>{rest}</hostdev>"


def mdev(attributes: str = "") -> str:
    """A vGPU that this machine does not have."""
    start = f"<hostdev mode='subsystem' type='mdev' model='vfio-pci'{attributes}>"
    return f"{start}<source><address uuid='{OTHER}'/></source></hostdev>"


def rng(function: int = 0, rest: str = "") -> str:
    """A device that needs nothing of the host, behind the root port of bus 1."""
    place = f"<address type='pci' bus='1' slot='0' function='{function}'{rest}/>"
    return "<rng model='virtio'><backend model='random'>/dev/urandom</backend>" + place + "</rng>"


class Libvirt:
    """QEMU's driver in this process, the test driver, and daemons in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.embed = libvirt.open(f"qemu:///embed?root={directory}")
        self.test = libvirt.open("test:///default")

    @contextmanager
    def running(self, devices: str = "", **parts: str) -> Iterator[libvirt.virDomain]:
        """A guest that has no definition, and is paused."""
        text = domain(_BARE + devices, **parts)
        started = self.embed.createXML(text, libvirt.VIR_DOMAIN_START_PAUSED)
        try:
            yield started
        finally:
            started.destroy()

    @contextmanager
    def daemon(self) -> Iterator[Path]:
        """The socket of a libvirtd of this user."""
        home = self.directory / "daemon"
        home.mkdir()
        (home / "conf").write_text(f'log_outputs = "3:file:{home}/log"\n')
        environment = {**os.environ, "HOME": str(home), "XDG_RUNTIME_DIR": str(home)}
        command = ["libvirtd", "-f", str(home / "conf"), "-p", str(home / "pid")]
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
            path = home / "libvirt/libvirt-sock"
            while process.poll() is None and not path.exists():
                time.sleep(0.05)
            try:
                yield path
            finally:
                process.kill()
                process.wait()
                shutil.rmtree(home)

    def open_with_ssh(self, text: str) -> None:
        """Open a connection through a program that ends as ssh does."""
        program = self.directory / "ssh"
        program.write_text(f"#!/bin/sh\nhead -c 1 >/dev/null\necho '{text}' >&2\nexit 255\n")
        program.chmod(0o755)
        libvirt.open(f"qemu+ssh://nohost.invalid/system?command={program}")

    def clear(self) -> None:
        """Leave no domain to the next mistake."""
        for left in self.embed.listAllDomains():
            with suppress(libvirt.libvirtError):
                left.destroy()
            with suppress(libvirt.libvirtError):
                left.undefine()


@maker
def no_modular_daemon(made: Libvirt) -> None:
    libvirt.open(f"qemu+unix:///system?socket={made.directory}/virtqemud-sock")


@maker
def no_daemon(made: Libvirt) -> None:
    libvirt.open(f"qemu+unix:///system?socket={made.directory}/none")


@maker
def no_permission(made: Libvirt) -> None:
    closed = made.directory / "closed"
    closed.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(closed / "sock"))
        listening.listen()
        closed.chmod(0)
        try:
            libvirt.open(f"qemu+unix:///system?socket={closed}/sock")
        finally:
            closed.chmod(0o700)


@maker
def no_server(_: Libvirt) -> None:
    libvirt.open("qemu+tcp://127.0.0.1:1/system")


@maker
def no_such_host(_: Libvirt) -> None:
    libvirt.open("qemu+tcp://nohost.invalid/system")


@maker
def no_such_host_for_ssh(made: Libvirt) -> None:
    made.open_with_ssh("ssh: Could not resolve hostname nohost.invalid: Name or service not known")


@maker
def no_key_for_ssh(made: Libvirt) -> None:
    made.open_with_ssh("root@node7: Permission denied (publickey).")


@maker
def connection_closed(made: Libvirt) -> None:
    def hang_up() -> None:
        taken, _ = listening.accept()
        taken.recv(1)
        taken.close()

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(made.directory / "closes"))
        listening.listen()
        threading.Thread(target=hang_up, daemon=True).start()
        libvirt.open(f"qemu+unix:///system?socket={made.directory}/closes")


@maker
def ssh_without_a_word(_: Libvirt) -> None:
    """It ends before libvirt writes to it."""
    libvirt.open("qemu+ssh://nohost.invalid/system?command=/bin/false")


@maker
def no_driver(made: Libvirt) -> None:
    with made.daemon() as path:
        libvirt.open(f"qemux+unix:///session?socket={path}")


@maker
def no_transport(_: Libvirt) -> None:
    libvirt.open("qemu+pigeon://node7/system")


@maker
def secrets_read_only(_: Libvirt) -> None:
    started = libvirt.openReadOnly("test:///default").lookupByName("test")
    started.XMLDesc(libvirt.VIR_DOMAIN_XML_SECURE)


@maker
def read_only(_: Libvirt) -> None:
    libvirt.openReadOnly("test:///default").defineXML(domain(kind="test"))


@maker
def no_domain(made: Libvirt) -> None:
    made.test.lookupByName("nobody")


@maker
def no_node_device(made: Libvirt) -> None:
    made.test.nodeDeviceLookupByName("pci_0000_65_00_0")


@maker
def name_taken(made: Libvirt) -> None:
    made.embed.defineXML(domain(uuid=UUID))
    made.embed.defineXML(domain(uuid=OTHER))


@maker
def uuid_taken(made: Libvirt) -> None:
    made.embed.defineXML(domain(uuid=UUID))
    made.embed.defineXML(domain(uuid=UUID, name="other"))


@maker
def against_the_schema(made: Libvirt) -> None:
    made.embed.defineXMLFlags(domain("<nothing/>"), libvirt.VIR_DOMAIN_DEFINE_VALIDATE)


@maker
def device_twice(made: Libvirt) -> None:
    made.test.defineXML(domain(pci() * 2, kind="test"))


@maker
def slot_of_a_root_port(made: Libvirt) -> None:
    made.embed.defineXML(domain(_PORT + pci("<address type='pci' bus='1' slot='2'/>")))


@maker
def not_xml(made: Libvirt) -> None:
    made.embed.defineXML("<domain")


@maker
def no_name(made: Libvirt) -> None:
    made.embed.defineXML("<domain type='qemu'><memory>1</memory></domain>")


@maker
def alias_twice(made: Libvirt) -> None:
    alias = "<alias name='ua-vfio'/>"
    made.embed.defineXML(domain(pci(alias) + mdev().replace("</hostdev", f"{alias}</hostdev")))


@maker
def not_running(made: Libvirt) -> None:
    made.embed.defineXML(domain()).attachDeviceFlags(pci(), LIVE)


@maker
def already_there(made: Libvirt) -> None:
    made.embed.defineXML(domain(pci())).attachDeviceFlags(pci(), CONFIG)


@maker
def not_there(made: Libvirt) -> None:
    made.embed.defineXML(domain()).detachDeviceFlags(pci(), CONFIG)


@maker
def display_without_graphics(made: Libvirt) -> None:
    made.embed.defineXML(domain(mdev(" display='on'")))


@maker
def two_boot_orders(made: Libvirt) -> None:
    made.embed.defineXML(domain(pci("<boot order='1'/>"), os="<boot dev='hd'/>"))


@maker
def rom_off_and_on(made: Libvirt) -> None:
    made.embed.defineXML(domain(pci("<rom enabled='no' bar='on'/>")))


@maker
def not_supported(made: Libvirt) -> None:
    made.test.nodeDeviceDefineXML("<device/>", 0)


@maker
def no_vfio(made: Libvirt) -> None:
    made.embed.defineXML(domain(pci())).create()


@maker
def no_vfio_for_a_vgpu(made: Libvirt) -> None:
    made.embed.defineXML(domain(mdev())).create()


@maker
def no_argument_of_qemu(made: Libvirt) -> None:
    bad = "<qemu:commandline><qemu:arg value='-nonsense'/></qemu:commandline>"
    with made.running(rest=bad):
        pass


@maker
def transient(made: Libvirt) -> None:
    with made.running() as started:
        started.detachDeviceFlags(pci(), CONFIG)


@maker
def other_function_live(made: Libvirt) -> None:
    with made.running(_PORT) as started:
        started.attachDeviceFlags(rng(1), LIVE)


@maker
def port_without_hot_plug(made: Libvirt) -> None:
    with made.running(_FIXED_PORT) as started:
        started.attachDeviceFlags(rng(), LIVE)


@maker
def no_port_left(made: Libvirt) -> None:
    anywhere = "<rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>"
    with made.running() as started:
        for _ in range(3):
            started.attachDeviceFlags(anywhere, LIVE)


@maker
def unplugged_twice(made: Libvirt) -> None:
    with made.running(_PORT + rng()) as started:
        for _ in range(2):
            started.detachDeviceFlags(rng(), LIVE)


@maker
def part_of_a_device(made: Libvirt) -> None:
    with made.running(_PORT + rng(rest=" multifunction='on'") + rng(1)) as started:
        started.detachDeviceFlags(rng(1), LIVE)


@maker
def another_job(made: Libvirt) -> None:
    """Libvirt waits for half a minute."""

    def resume() -> None:
        with suppress(libvirt.libvirtError):
            started.resume()

    with made.running(_PORT) as started:
        (file,) = made.directory.rglob("win.pid")
        process = int(file.read_text())
        os.kill(process, signal.SIGSTOP)
        busy = threading.Thread(target=resume)
        busy.start()
        time.sleep(1)
        try:
            started.attachDeviceFlags(rng(), LIVE)
        finally:
            os.kill(process, signal.SIGCONT)
            busy.join(_DEADLINE)


# Where there is VFIO


@maker
def memory_not_locked(made: Libvirt) -> None:
    made.embed.defineXML(domain(pci())).create()


@maker
def no_iommufd(made: Libvirt) -> None:
    made.embed.defineXML(domain(pci("<driver name='vfio' iommufd='yes'/>"))).create()


@maker
def no_vgpu(made: Libvirt) -> None:
    made.embed.defineXML(domain(mdev())).create()


@maker
def no_kvm(made: Libvirt) -> None:
    with made.running(kind="kvm"):
        pass


@maker
def hook_script(made: Libvirt) -> None:
    with made.daemon() as path:
        connection = libvirt.open(f"qemu+unix:///session?socket={path}")
        connection.createXML(domain(_BARE), libvirt.VIR_DOMAIN_START_PAUSED)


def main(directory: Path, names: list[str]) -> None:
    """Make the errors, and say what each is."""
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    libvirt.virEventRegisterDefaultImpl()
    libvirt.virEventAddTimeout(100, lambda *_: None, None)
    threading.Thread(target=_run_events, daemon=True).start()
    made = Libvirt(directory)
    for name in names:
        try:
            MAKERS[name](made)
        except libvirt.libvirtError as error:
            code, text = error.get_error_code(), error.get_error_message()
            _say(name, code, text, error.get_error_domain(), error.get_int1())
        else:
            _say(name, 0, "", 0, -1)
        made.clear()


def _run_events() -> None:
    while True:
        libvirt.virEventRunDefaultImpl()


def _say(*answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    os._exit(0)  # threads of libvirt may still wait

"""Domains of libvirt's test driver, which keeps them in a file: its own parser, no daemon."""

from __future__ import annotations

from uuid import UUID

COUNT = 100
_DOMAIN = """\
  <domain type='test' xmlns:test='http://libvirt.org/schemas/domain/test/1.0'>
    <name>guest{number}</name>
    <uuid>{uuid}</uuid>
    <memory unit='GiB'>16</memory>
    <vcpu>8</vcpu>
    <os><type arch='x86_64' machine='q35'>hvm</type></os>
    <devices>
      <controller type='pci' index='0' model='pcie-root'/>
      <controller type='pci' index='1' model='pcie-root-port'/>
      <controller type='pci' index='2' model='pcie-root-port'/>
      <disk type='file' device='disk'>
        <source file='/guest{number}.img'/>
        <target dev='vda' bus='virtio'/>
      </disk>
{devices}    </devices>
    <test:runstate>5</test:runstate>
  </domain>
"""
_FUNCTION = """\
      <hostdev mode='subsystem' type='pci' managed='yes'>
        <source>
          <address domain='{domain:#06x}' bus='0x01' slot='0x00' function='{function:#x}'/>
        </source>
        <address type='pci' bus='0x01' slot='0x00' function='{function:#x}'{more}/>
      </hostdev>
"""


def make_node(path: str, gpus: int) -> str:
    """Write a node with the domains, which share the GPUs of a made tree; its URI."""
    domains = "".join(
        _DOMAIN.format(number=number, uuid=UUID(int=number + 1), devices=_gpu(domain=number % gpus))
        for number in range(COUNT)
    )
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"<node>\n{domains}</node>\n")
    return f"test://{path}"


def _gpu(domain: int) -> str:
    """Both functions of the GPU that each PCI domain of benchmarks.trees has."""
    more = (" multifunction='on'", "")
    return "".join(
        _FUNCTION.format(domain=domain, function=function, more=more[function])
        for function in (0, 1)
    )

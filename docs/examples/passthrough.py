"""Take a GPU to a guest and back, and make a vGPU: passthrough.py 04:00.0 A40-4Q (as root)."""

import subprocess
import sys

import vfiomgr

gpu, vgpu_type = sys.argv[1:]
host = vfiomgr.Host(on_note=print)
print(host.plan(vfiomgr.Bind(gpu)))
host.bind(gpu)
try:
    xml = vfiomgr.libvirt.domain_xml(
        host, "example", memory="512M", vcpus=1, virt_type="qemu", firmware="bios", devices=[gpu]
    )
    print(*(one.summary for one in vfiomgr.libvirt.check_domain(host, xml).findings), sep="\n")
    subprocess.run(["virsh", "create", "/dev/stdin"], input=xml, text=True, check=True)
    try:
        created = host.create_vgpu(type=vgpu_type)
        print("vGPU:", *created.names)
        host.remove_vgpu(*created.names)
    finally:
        subprocess.run(["virsh", "destroy", "example"], check=True)
finally:
    host.unbind(gpu)

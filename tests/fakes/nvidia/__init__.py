"""NVIDIA's vGPU host driver, its GPUs and its programs, as parts of the fake kernel.

    kernel = l40s_host(tmp_path, total_vfs=4)
    kernel.write(PCI_DEVICES / "0000:21:00.4/nvidia/current_vgpu_type", "1148")
    kernel.call("/usr/lib/nvidia/sriov-manage", "-d", "ALL")

Sources: the open kernel modules (kernel_vgpu_mgr.c), public copies of nvidia-vgpu-vfio, NVIDIA's
guides, and what users measured on hardware. Where none says, the choice is written at its place.
"""

// SPDX-License-Identifier: GPL-2.0-only
/*
 * What a guest sees of a mediated device: a PCI function with a configuration space and nothing
 * else, neither memory nor interrupts. Its class is "3D controller" (0302) and not "VGA": QEMU
 * gives NVIDIA's VGA functions quirks that need a BAR 0.
 */
#include <linux/fs.h>
#include <linux/kernel.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/uaccess.h>
#include <linux/version.h>
#include <linux/vfio.h>

#include "gpusim.h"

#define VENDOR_NVIDIA	0x10de
#define DEVICE_A40	0x2235

struct gpusim_vgpu {
	struct vfio_device vdev;	/* first: vfio_alloc_device insists */
	struct gpusim_vf *vf;
	u8 config[PCI_CFG_SPACE_SIZE];
};

static struct gpusim_vgpu *vgpu_of(struct vfio_device *vdev)
{
	return container_of(vdev, struct gpusim_vgpu, vdev);
}

static void put16(struct gpusim_vgpu *vgpu, int offset, u16 value)
{
	*(__le16 *)(vgpu->config + offset) = cpu_to_le16(value);
}

static int vgpu_init(struct vfio_device *vdev)
{
	struct gpusim_vgpu *vgpu = vgpu_of(vdev);

	put16(vgpu, PCI_VENDOR_ID, VENDOR_NVIDIA);
	put16(vgpu, PCI_DEVICE_ID, DEVICE_A40);
	put16(vgpu, PCI_CLASS_DEVICE, PCI_CLASS_DISPLAY_3D);
	put16(vgpu, PCI_SUBSYSTEM_VENDOR_ID, VENDOR_NVIDIA);
	return 0;
}

static void vgpu_release(struct vfio_device *vdev)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
	vfio_free_device(vdev);
#endif
}

static void set_open(struct gpusim_vf *vf, bool open)
{
	mutex_lock(&vf->gpu->lock);
	vf->open = open;
	mutex_unlock(&vf->gpu->lock);
}

static int vgpu_open(struct vfio_device *vdev)
{
	set_open(vgpu_of(vdev)->vf, true);
	return 0;
}

static void vgpu_close(struct vfio_device *vdev)
{
	set_open(vgpu_of(vdev)->vf, false);
}

static ssize_t vgpu_read(struct vfio_device *vdev, char __user *buf, size_t count, loff_t *ppos)
{
	struct gpusim_vgpu *vgpu = vgpu_of(vdev);

	return simple_read_from_buffer(buf, count, ppos, vgpu->config, sizeof(vgpu->config));
}

/* Of all registers, only the command and the interrupt line take what is written. */
static ssize_t vgpu_write(struct vfio_device *vdev, const char __user *buf, size_t count,
			  loff_t *ppos)
{
	struct gpusim_vgpu *vgpu = vgpu_of(vdev);
	u8 written[PCI_CFG_SPACE_SIZE];
	ssize_t done;

	memcpy(written, vgpu->config, sizeof(written));
	done = simple_write_to_buffer(written, sizeof(written), ppos, buf, count);
	if (done > 0) {
		memcpy(vgpu->config + PCI_COMMAND, written + PCI_COMMAND, sizeof(u16));
		vgpu->config[PCI_INTERRUPT_LINE] = written[PCI_INTERRUPT_LINE];
	}
	return done;
}

static long get_info(void __user *arg)
{
	const unsigned long size = offsetofend(struct vfio_device_info, num_irqs);
	struct vfio_device_info info;

	if (copy_from_user(&info, arg, size))
		return -EFAULT;
	if (info.argsz < size)
		return -EINVAL;
	info.flags = VFIO_DEVICE_FLAGS_PCI | VFIO_DEVICE_FLAGS_RESET;
	info.num_regions = VFIO_PCI_NUM_REGIONS;
	info.num_irqs = VFIO_PCI_NUM_IRQS;
	return copy_to_user(arg, &info, size) ? -EFAULT : 0;
}

static int describe_region(struct vfio_region_info *info)
{
	bool is_config = info->index == VFIO_PCI_CONFIG_REGION_INDEX;

	if (info->index >= VFIO_PCI_NUM_REGIONS)
		return -EINVAL;
	info->offset = 0;
	info->size = is_config ? PCI_CFG_SPACE_SIZE : 0;
	info->flags = is_config ? VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE : 0;
	return 0;
}

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 19, 0)
static int get_region_info_caps(struct vfio_device *vdev, struct vfio_region_info *info,
				struct vfio_info_cap *caps)
{
	return describe_region(info);
}
#else
static long get_region_info(void __user *arg)
{
	const unsigned long size = offsetofend(struct vfio_region_info, offset);
	struct vfio_region_info info;

	if (copy_from_user(&info, arg, size))
		return -EFAULT;
	if (info.argsz < size || describe_region(&info))
		return -EINVAL;
	return copy_to_user(arg, &info, size) ? -EFAULT : 0;
}
#endif

static long get_irq_info(void __user *arg)
{
	const unsigned long size = offsetofend(struct vfio_irq_info, count);
	struct vfio_irq_info info;

	if (copy_from_user(&info, arg, size))
		return -EFAULT;
	if (info.argsz < size || info.index >= VFIO_PCI_NUM_IRQS)
		return -EINVAL;
	info.flags = 0;
	info.count = 0;
	return copy_to_user(arg, &info, size) ? -EFAULT : 0;
}

static long vgpu_ioctl(struct vfio_device *vdev, unsigned int command, unsigned long arg)
{
	switch (command) {
	case VFIO_DEVICE_GET_INFO:
		return get_info((void __user *)arg);
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 19, 0)
	case VFIO_DEVICE_GET_REGION_INFO:
		return get_region_info((void __user *)arg);
#endif
	case VFIO_DEVICE_GET_IRQ_INFO:
		return get_irq_info((void __user *)arg);
	case VFIO_DEVICE_SET_IRQS:
		return -EINVAL;
	case VFIO_DEVICE_RESET:
		put16(vgpu_of(vdev), PCI_COMMAND, 0);
		return 0;
	default:
		return -ENOTTY;
	}
}

static const struct vfio_device_ops vgpu_ops = {
	.name = "gpusim-vgpu",
	.init = vgpu_init,
	.release = vgpu_release,
	.open_device = vgpu_open,
	.close_device = vgpu_close,
	.read = vgpu_read,
	.write = vgpu_write,
	.ioctl = vgpu_ioctl,
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0)
	.bind_iommufd = vfio_iommufd_emulated_bind,
	.unbind_iommufd = vfio_iommufd_emulated_unbind,
	.attach_ioas = vfio_iommufd_emulated_attach_ioas,
#endif
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 6, 0)
	.detach_ioas = vfio_iommufd_emulated_detach_ioas,
#endif
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 19, 0)
	.get_region_info_caps = get_region_info_caps,
#endif
};

/* Gives a mediated device to VFIO; its driver data is then the vGPU. */
struct gpusim_vgpu *gpusim_vgpu_create(struct device *dev, struct gpusim_vf *vf)
{
	struct gpusim_vgpu *vgpu = vfio_alloc_device(gpusim_vgpu, vdev, dev, &vgpu_ops);
	int ret;

	if (IS_ERR(vgpu))
		return vgpu;
	vgpu->vf = vf;
	put16(vgpu, PCI_SUBSYSTEM_ID, vf->type->id);
	dev_set_drvdata(dev, vgpu);
	ret = vfio_register_emulated_iommu_dev(&vgpu->vdev);
	if (!ret)
		return vgpu;
	vfio_put_device(&vgpu->vdev);
	return ERR_PTR(ret);
}

void gpusim_vgpu_destroy(struct gpusim_vgpu *vgpu)
{
	vfio_unregister_group_dev(&vgpu->vdev);
	vfio_put_device(&vgpu->vdev);
}

struct gpusim_vf *gpusim_vgpu_vf(struct device *dev)
{
	struct gpusim_vgpu *vgpu = dev_get_drvdata(dev);

	return vgpu->vf;
}

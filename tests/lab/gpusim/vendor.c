// SPDX-License-Identifier: GPL-2.0-only
/*
 * Family "vendor": each virtual function is a VFIO device of this driver, which has its own way to
 * make a vGPU of it: the directory nvidia/ of the function.
 *
 * creatable_vgpu_types   a heading, then "ID : name" of what fits now; the heading alone where the
 *                        function has a vGPU or nothing fits
 * current_vgpu_type      the id, 0 for none. Writes fail with
 *                          EINVAL   not a number
 *                          EPERM    an id where the function has a vGPU, even the same one; 0
 *                                   where it has none
 *                          EBUSY    0 while a guest has the function
 *                          EIO      whatever else the GPU refuses: another framebuffer size, no
 *                                   room, an unknown id, no GPU instance
 * gpu_instance_id        ENXIO without a GPU instance
 * placement_id, vgpu_params   see attributes.c
 *
 * A function without a vGPU cannot be opened: ENODEV. The device that a guest gets is the
 * emulated function itself.
 *
 * vfio_pci_core gives the driver its power management, which takes every device for one of its
 * own. The physical function is none; it is safe because no driver that does not ask for it is
 * suspended at runtime (local_pci_probe, drivers/pci/pci-driver.c).
 */
#include <linux/kernel.h>
#include <linux/kstrtox.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/sysfs.h>
#include <linux/version.h>
#include <linux/vfio_pci_core.h>

#include "gpusim.h"

struct gpusim_function {
	struct vfio_pci_core_device core;	/* first: vfio_alloc_device insists */
	struct gpusim_vf vf;
};

struct gpusim_vf *gpusim_vendor_vf(struct device *dev)
{
	struct vfio_pci_core_device *core = dev_get_drvdata(dev);

	return &container_of(core, struct gpusim_function, core)->vf;
}

static struct gpusim_function *function_of(struct vfio_device *device)
{
	return container_of(device, struct gpusim_function, core.vdev);
}

/* Marks a vGPU as open or closed; fails where there is none. */
static int set_open(struct gpusim_vf *vf, bool open)
{
	int ret = 0;

	mutex_lock(&vf->gpu->lock);
	if (open && !vf->type)
		ret = -ENODEV;
	else
		vf->open = open;
	mutex_unlock(&vf->gpu->lock);
	return ret;
}

static int function_open(struct vfio_device *device)
{
	struct gpusim_function *function = function_of(device);
	int ret = set_open(&function->vf, true);

	if (ret)
		return ret;
	ret = vfio_pci_core_enable(&function->core);
	if (ret)
		set_open(&function->vf, false);
	else
		vfio_pci_core_finish_enable(&function->core);
	return ret;
}

static void function_close(struct vfio_device *device)
{
	vfio_pci_core_close_device(device);
	set_open(&function_of(device)->vf, false);
}

static const struct vfio_device_ops function_ops = {
	.name = "gpusim-vf",
	.init = vfio_pci_core_init_dev,
	.release = vfio_pci_core_release_dev,
	.open_device = function_open,
	.close_device = function_close,
	.ioctl = vfio_pci_core_ioctl,
	.device_feature = vfio_pci_core_ioctl_feature,
	.read = vfio_pci_core_read,
	.write = vfio_pci_core_write,
	.mmap = vfio_pci_core_mmap,
	.request = vfio_pci_core_request,
	.match = vfio_pci_core_match,
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0)
	.bind_iommufd = vfio_iommufd_physical_bind,
	.unbind_iommufd = vfio_iommufd_physical_unbind,
	.attach_ioas = vfio_iommufd_physical_attach_ioas,
#endif
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 6, 0)
	.detach_ioas = vfio_iommufd_physical_detach_ioas,
#endif
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 17, 0)
	.match_token_uuid = vfio_pci_core_match_token_uuid,
#endif
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 19, 0)
	.get_region_info_caps = vfio_pci_ioctl_get_region_info,
#endif
};

static ssize_t creatable_vgpu_types_show(struct device *dev, struct device_attribute *attr,
					 char *buf)
{
	struct gpusim_vf *vf = gpusim_vendor_vf(dev);
	const struct gpusim_type *type = vf->gpu->model->types;
	const struct gpusim_type *end = type + vf->gpu->model->type_count;
	int length = sysfs_emit(buf, "ID    : vGPU Name\n");

	mutex_lock(&vf->gpu->lock);
	for (; type < end; type++)
		if (gpusim_vf_fit(vf, type) == GPUSIM_FITS)
			length += sysfs_emit_at(buf, length, "%-5d : %s\n", type->id, type->name);
	mutex_unlock(&vf->gpu->lock);
	return length;
}
static DEVICE_ATTR_RO(creatable_vgpu_types);

static ssize_t current_vgpu_type_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct gpusim_vf *vf = gpusim_vendor_vf(dev);
	ssize_t length;

	mutex_lock(&vf->gpu->lock);
	length = sysfs_emit(buf, "%d\n", vf->type ? vf->type->id : 0);
	mutex_unlock(&vf->gpu->lock);
	return length;
}

static int clear_type(struct gpusim_vf *vf)
{
	if (!vf->type)
		return -EPERM;
	if (vf->open)
		return -EBUSY;
	gpusim_release(vf);
	return 0;
}

static int set_type(struct gpusim_vf *vf, unsigned int id)
{
	const struct gpusim_type *type = gpusim_find_type(vf->gpu->model, id);

	if (vf->type)
		return -EPERM;
	if (!type || gpusim_claim(vf, type) != GPUSIM_FITS)
		return -EIO;
	return 0;
}

static ssize_t current_vgpu_type_store(struct device *dev, struct device_attribute *attr,
				       const char *buf, size_t count)
{
	struct gpusim_vf *vf = gpusim_vendor_vf(dev);
	unsigned int id;
	int ret;

	if (kstrtouint(buf, 10, &id))
		return -EINVAL;
	mutex_lock(&vf->gpu->lock);
	ret = id ? set_type(vf, id) : clear_type(vf);
	mutex_unlock(&vf->gpu->lock);
	return ret ?: count;
}
static DEVICE_ATTR_RW(current_vgpu_type);

static ssize_t gpu_instance_id_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct gpusim_vf *vf = gpusim_vendor_vf(dev);
	int instance;

	mutex_lock(&vf->gpu->lock);
	instance = vf->instance;
	mutex_unlock(&vf->gpu->lock);
	return instance < 0 ? -ENXIO : sysfs_emit(buf, "%d\n", instance);
}
static DEVICE_ATTR_RO(gpu_instance_id);

static struct attribute *function_attributes[] = {
	&dev_attr_creatable_vgpu_types.attr,
	&dev_attr_current_vgpu_type.attr,
	&dev_attr_gpu_instance_id.attr,
	&dev_attr_placement_id.attr,
	&dev_attr_vgpu_params.attr,
	NULL,
};

static const struct attribute_group function_group = {
	.name = "nvidia",
	.attrs = function_attributes,
};

int gpusim_vendor_probe(struct pci_dev *pdev, struct gpusim_gpu *gpu)
{
	struct gpusim_function *function;
	int ret;

	function = vfio_alloc_device(gpusim_function, core.vdev, &pdev->dev, &function_ops);
	if (IS_ERR(function))
		return PTR_ERR(function);
	dev_set_drvdata(&pdev->dev, &function->core);
	gpusim_add(&function->vf, gpu);
	ret = vfio_pci_core_register_device(&function->core);
	if (ret)
		goto drop;
	ret = sysfs_create_group(&pdev->dev.kobj, &function_group);
	if (!ret)
		return 0;

	vfio_pci_core_unregister_device(&function->core);
drop:
	gpusim_drop(&function->vf);
	vfio_put_device(&function->core.vdev);
	return ret;
}

void gpusim_vendor_remove(struct pci_dev *pdev)
{
	struct vfio_pci_core_device *core = dev_get_drvdata(&pdev->dev);
	struct gpusim_function *function = container_of(core, struct gpusim_function, core);

	vfio_pci_core_unregister_device(core);	/* waits for the guest that has it */
	sysfs_remove_group(&pdev->dev.kobj, &function_group);
	gpusim_drop(&function->vf);
	vfio_put_device(&core->vdev);
}

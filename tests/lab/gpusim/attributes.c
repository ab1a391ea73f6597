// SPDX-License-Identifier: GPL-2.0-only
/*
 * The attributes that vGPUs of both families have in their directory nvidia/.
 *
 * vgpu_params    "key=value,key2=value2"; each write replaces them all, blanks alone clear them.
 * placement_id   where a vGPU lies on a heterogeneous GPU, chosen by the driver; may be written
 *                until a guest has the vGPU. "Not Applicable" on a homogeneous GPU.
 *
 * A virtual function without a vGPU has neither value: ENXIO for a placement, EPERM for parameters
 * (the errno of the other writes that a function without a vGPU refuses; not seen on hardware).
 */
#include <linux/kernel.h>
#include <linux/kstrtox.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/sysfs.h>

#include "gpusim.h"

/* The virtual function of a mediated device, or of a PCI function. */
struct gpusim_vf *gpusim_vf_of(struct device *dev)
{
	return dev_is_pci(dev) ? gpusim_vendor_vf(dev) : gpusim_vgpu_vf(dev);
}

static bool are_params(const char *text)
{
	char *copy = kstrdup(text, GFP_KERNEL), *rest = copy, *pair, *value;
	bool valid = copy;

	while (valid && (pair = strsep(&rest, ","))) {
		pair = strim(pair);
		value = strchr(pair, '=');
		valid = value && value != pair && value[1];
	}
	kfree(copy);
	return valid;
}

static ssize_t vgpu_params_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct gpusim_vf *vf = gpusim_vf_of(dev);
	ssize_t length;

	mutex_lock(&vf->gpu->lock);
	length = sysfs_emit(buf, "%s\n", vf->params);
	mutex_unlock(&vf->gpu->lock);
	return length;
}

static ssize_t vgpu_params_store(struct device *dev, struct device_attribute *attr,
				 const char *buf, size_t count)
{
	struct gpusim_vf *vf = gpusim_vf_of(dev);
	char text[GPUSIM_MAX_PARAMS], *params;
	ssize_t result = count;

	if (strscpy(text, buf, sizeof(text)) < 0)
		return -EINVAL;
	params = strim(text);
	if (*params && !are_params(params))
		return -EINVAL;
	mutex_lock(&vf->gpu->lock);
	if (vf->type)
		strscpy(vf->params, params, sizeof(vf->params));
	else
		result = -EPERM;
	mutex_unlock(&vf->gpu->lock);
	return result;
}
DEVICE_ATTR_RW(vgpu_params);

static ssize_t placement_id_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct gpusim_vf *vf = gpusim_vf_of(dev);
	ssize_t length;

	mutex_lock(&vf->gpu->lock);
	if (!vf->type)
		length = -ENXIO;
	else if (vf->placement < 0)
		length = sysfs_emit(buf, "Not Applicable\n");
	else
		length = sysfs_emit(buf, "%d\n", vf->placement);
	mutex_unlock(&vf->gpu->lock);
	return length;
}

static ssize_t placement_id_store(struct device *dev, struct device_attribute *attr,
				  const char *buf, size_t count)
{
	struct gpusim_vf *vf = gpusim_vf_of(dev);
	ssize_t result = count;
	unsigned int placement;

	if (kstrtouint(buf, 10, &placement))
		return -EINVAL;
	mutex_lock(&vf->gpu->lock);
	if (!vf->type)
		result = -ENXIO;
	else if (vf->open)
		result = -EBUSY;
	else if (!gpusim_move(vf, placement))
		result = -EINVAL;
	mutex_unlock(&vf->gpu->lock);
	return result;
}
DEVICE_ATTR_RW(placement_id);

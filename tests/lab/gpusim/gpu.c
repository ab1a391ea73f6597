// SPDX-License-Identifier: GPL-2.0-only
/*
 * The directory gpusim/ of a physical function. No real driver has it: it stands for what
 * nvidia-smi and sriov-manage ask of NVIDIA's driver by ways of their own.
 *
 * unlock          a write lets the next write to sriov_numvfs through
 * heterogeneous   0 or 1; only while there is no vGPU, and never together with MIG
 * mig             0 or 1; only while there is no vGPU
 * instances       slices of the GPU instance that begins at each of the places 0 to 6, as
 *                 "3 0 0 0 2 0 1"; those that have a vGPU stay
 * vgpus, held     how many vGPUs there are, and how many of them guests have
 * model, features, framebuffer, types, creatable   what nvidia-smi prints
 */
#include <linux/kernel.h>
#include <linux/kstrtox.h>
#include <linux/string.h>
#include <linux/sysfs.h>

#include "gpusim.h"

#define TOTAL_SLICES 7

static struct gpusim_gpu *gpu_of(struct device *dev)
{
	return pci_get_drvdata(to_pci_dev(dev));
}

static ssize_t unlock_store(struct device *dev, struct device_attribute *attr, const char *buf,
			    size_t count)
{
	struct gpusim_gpu *gpu = gpu_of(dev);

	mutex_lock(&gpu->lock);
	gpu->unlocked = true;
	mutex_unlock(&gpu->lock);
	return count;
}
static DEVICE_ATTR_WO(unlock);

/* Sets one of the GPU's modes, where the model has it and no vGPU is in its way. */
static ssize_t set_mode(struct gpusim_gpu *gpu, bool *mode, bool possible, const char *buf,
			size_t count)
{
	ssize_t result = count;
	bool wanted;

	if (kstrtobool(buf, &wanted))
		return -EINVAL;
	mutex_lock(&gpu->lock);
	if (!possible || (mode == &gpu->heterogeneous && gpu->mig)) {
		result = -EOPNOTSUPP;
	} else if (gpusim_is_used(gpu)) {
		result = -EBUSY;
	} else {
		*mode = wanted;
		memset(gpu->instances, 0, sizeof(gpu->instances));
		if (mode == &gpu->mig)
			gpu->heterogeneous = false;
	}
	mutex_unlock(&gpu->lock);
	return result;
}

static ssize_t heterogeneous_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%d\n", gpu_of(dev)->heterogeneous);
}

static ssize_t heterogeneous_store(struct device *dev, struct device_attribute *attr,
				   const char *buf, size_t count)
{
	struct gpusim_gpu *gpu = gpu_of(dev);

	return set_mode(gpu, &gpu->heterogeneous, gpu->model->has_mixed_sizes, buf, count);
}
static DEVICE_ATTR_RW(heterogeneous);

static ssize_t mig_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%d\n", gpu_of(dev)->mig);
}

static ssize_t mig_store(struct device *dev, struct device_attribute *attr, const char *buf,
			 size_t count)
{
	struct gpusim_gpu *gpu = gpu_of(dev);

	return set_mode(gpu, &gpu->mig, gpu->model->has_mig, buf, count);
}
static DEVICE_ATTR_RW(mig);

static ssize_t instances_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct gpusim_gpu *gpu = gpu_of(dev);
	int i, length = 0;

	mutex_lock(&gpu->lock);
	for (i = 0; i < GPUSIM_MAX_INSTANCES; i++)
		length += sysfs_emit_at(buf, length, "%s%u", i ? " " : "", gpu->instances[i]);
	mutex_unlock(&gpu->lock);
	return length + sysfs_emit_at(buf, length, "\n");
}

/* Reads "3 0 0 0 2 0 1"; false where there are more slices than a GPU has. */
static bool read_instances(const char *buf, unsigned int *instances)
{
	unsigned int total = 0, slices;
	char text[32], *rest = text, *word;
	int count = 0;

	if (strscpy(text, buf, sizeof(text)) < 0)
		return false;
	while ((word = strsep(&rest, " \n"))) {
		if (!*word)
			continue;
		if (count == GPUSIM_MAX_INSTANCES || kstrtouint(word, 10, &slices) ||
		    slices > TOTAL_SLICES)
			return false;
		total += slices;
		instances[count++] = slices;
	}
	return total <= TOTAL_SLICES;
}

/* Whether every vGPU still has its GPU instance among others. */
static bool keeps_used(struct gpusim_gpu *gpu, const unsigned int *instances)
{
	struct gpusim_vf *vf;

	list_for_each_entry(vf, &gpu->functions, link)
		if (vf->type && vf->instance >= 0 &&
		    instances[vf->instance] != gpu->instances[vf->instance])
			return false;
	return true;
}

static ssize_t instances_store(struct device *dev, struct device_attribute *attr, const char *buf,
			       size_t count)
{
	unsigned int instances[GPUSIM_MAX_INSTANCES] = {};
	struct gpusim_gpu *gpu = gpu_of(dev);
	ssize_t result = count;

	if (!read_instances(buf, instances))
		return -EINVAL;
	mutex_lock(&gpu->lock);
	if (!gpu->mig)
		result = -EOPNOTSUPP;
	else if (!keeps_used(gpu, instances))
		result = -EBUSY;
	else
		memcpy(gpu->instances, instances, sizeof(instances));
	mutex_unlock(&gpu->lock);
	return result;
}
static DEVICE_ATTR_RW(instances);

static ssize_t model_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%s\n", gpu_of(dev)->model->name);
}
static DEVICE_ATTR_RO(model);

static ssize_t features_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	const struct gpusim_model *model = gpu_of(dev)->model;

	return sysfs_emit(buf, "%s%s\n", model->has_mixed_sizes ? "mixed-sizes " : "",
			  model->has_mig ? "mig" : "");
}
static DEVICE_ATTR_RO(features);

static ssize_t framebuffer_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%u\n", gpu_of(dev)->framebuffer);
}
static DEVICE_ATTR_RO(framebuffer);

static ssize_t emit_count(struct gpusim_gpu *gpu, char *buf, bool held)
{
	struct gpusim_vf *vf;
	int count = 0;

	mutex_lock(&gpu->lock);
	list_for_each_entry(vf, &gpu->functions, link)
		count += held ? vf->open : !!vf->type;
	mutex_unlock(&gpu->lock);
	return sysfs_emit(buf, "%d\n", count);
}

static ssize_t vgpus_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return emit_count(gpu_of(dev), buf, false);
}
static DEVICE_ATTR_RO(vgpus);

static ssize_t held_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return emit_count(gpu_of(dev), buf, true);
}
static DEVICE_ATTR_RO(held);

/* A line for each type: id, framebuffer, heads, rate, resolution, most, slices, name. */
static ssize_t emit_types(struct gpusim_gpu *gpu, char *buf, bool creatable)
{
	const struct gpusim_type *type = gpu->model->types;
	const struct gpusim_type *end = type + gpu->model->type_count;
	int length = 0;

	mutex_lock(&gpu->lock);
	for (; type < end; type++)
		if (!creatable || gpusim_fit(gpu, type) == GPUSIM_FITS)
			length += sysfs_emit_at(buf, length, "%u %u %u %u %s %u %u %s\n", type->id,
						type->framebuffer, type->heads, type->frame_rate,
						type->resolution, type->max_instances,
						type->slices, type->name);
	mutex_unlock(&gpu->lock);
	return length;
}

static ssize_t types_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return emit_types(gpu_of(dev), buf, false);
}
static DEVICE_ATTR_RO(types);

static ssize_t creatable_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return emit_types(gpu_of(dev), buf, true);
}
static DEVICE_ATTR_RO(creatable);

static struct attribute *gpu_attributes[] = {
	&dev_attr_unlock.attr,
	&dev_attr_heterogeneous.attr,
	&dev_attr_mig.attr,
	&dev_attr_instances.attr,
	&dev_attr_model.attr,
	&dev_attr_features.attr,
	&dev_attr_framebuffer.attr,
	&dev_attr_vgpus.attr,
	&dev_attr_held.attr,
	&dev_attr_types.attr,
	&dev_attr_creatable.attr,
	NULL,
};

const struct attribute_group gpusim_gpu_group = {
	.name = "gpusim",
	.attrs = gpu_attributes,
};

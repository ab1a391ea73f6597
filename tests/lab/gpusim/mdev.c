// SPDX-License-Identifier: GPL-2.0-only
/*
 * Family "mdev": each virtual function is a parent of one mediated device.
 *
 * What a creation that does not fit fails with:
 *   EINVAL   the GPU carries another framebuffer size; NVIDIA's driver says no more than this
 *            (mdevctl issue 115)
 *   EIO      the GPU is in MIG mode and no instance of it is free, or not in MIG mode and the type
 *            needs one
 *   EUSERS   the virtual function has its vGPU; what the kernel's mdev_core says of a parent that
 *            may have no more
 *   ENOSPC   the GPU is full, as the kernel's sample mbochs says it
 * Everything else (bad or known UUIDs, removal, waiting for who has the device open) is the
 * kernel's own, drivers/vfio/mdev.
 */
#include <linux/kernel.h>
#include <linux/mdev.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/sysfs.h>
#include <linux/vfio.h>

#include "gpusim.h"

struct parent_type {
	struct mdev_type mdev;
	const struct gpusim_type *type;
};

struct gpusim_parent {
	struct gpusim_vf vf;
	struct mdev_parent mdev;
	struct parent_type types[GPUSIM_MAX_TYPES];
	struct mdev_type *pointers[GPUSIM_MAX_TYPES];
};

static struct gpusim_parent *parent_of(struct mdev_type *mdev)
{
	return container_of(mdev->parent, struct gpusim_parent, mdev);
}

static const struct gpusim_type *type_of(struct mdev_type *mdev)
{
	return container_of(mdev, struct parent_type, mdev)->type;
}

static int mdev_probe(struct mdev_device *mdev)
{
	static const int errors[] = {
		[GPUSIM_OCCUPIED] = -EUSERS,
		[GPUSIM_NO_INSTANCE] = -EIO,
		[GPUSIM_OTHER_SIZE] = -EINVAL,
		[GPUSIM_FULL] = -ENOSPC,
	};
	struct gpusim_vf *vf = &parent_of(mdev->type)->vf;
	struct gpusim_vgpu *vgpu;
	enum gpusim_fit fit;

	mutex_lock(&vf->gpu->lock);
	fit = gpusim_claim(vf, type_of(mdev->type));
	mutex_unlock(&vf->gpu->lock);
	if (fit != GPUSIM_FITS)
		return errors[fit];
	vgpu = gpusim_vgpu_create(&mdev->dev, vf);
	if (!IS_ERR(vgpu))
		return 0;
	mutex_lock(&vf->gpu->lock);
	gpusim_release(vf);
	mutex_unlock(&vf->gpu->lock);
	return PTR_ERR(vgpu);
}

static void mdev_remove(struct mdev_device *mdev)
{
	struct gpusim_vf *vf = &parent_of(mdev->type)->vf;

	gpusim_vgpu_destroy(dev_get_drvdata(&mdev->dev));	/* waits for who has it open */
	mutex_lock(&vf->gpu->lock);
	gpusim_release(vf);
	mutex_unlock(&vf->gpu->lock);
}

static unsigned int mdev_get_available(struct mdev_type *mdev)
{
	struct gpusim_vf *vf = &parent_of(mdev)->vf;
	enum gpusim_fit fit;

	mutex_lock(&vf->gpu->lock);
	fit = gpusim_vf_fit(vf, type_of(mdev));
	mutex_unlock(&vf->gpu->lock);
	return fit == GPUSIM_FITS;
}

static ssize_t mdev_show_description(struct mdev_type *mdev, char *buf)
{
	const struct gpusim_type *type = type_of(mdev);

	return sysfs_emit(buf, "num_heads=%u, frl_config=%u, framebuffer=%uM, max_resolution=%s, "
			  "max_instance=%u\n", type->heads, type->frame_rate, type->framebuffer,
			  type->resolution, type->max_instances);
}

static struct attribute *vgpu_attributes[] = {
	&dev_attr_placement_id.attr,
	&dev_attr_vgpu_params.attr,
	NULL,
};

static const struct attribute_group vgpu_group = {
	.name = "nvidia",
	.attrs = vgpu_attributes,
};

static const struct attribute_group *vgpu_groups[] = { &vgpu_group, NULL };

static struct mdev_driver gpusim_mdev_driver = {
	.device_api = VFIO_DEVICE_API_PCI_STRING,
	.probe = mdev_probe,
	.remove = mdev_remove,
	.get_available = mdev_get_available,
	.show_description = mdev_show_description,
	.driver = {
		.name = "nvidia-vgpu-vfio",
		.owner = THIS_MODULE,
		.mod_name = KBUILD_MODNAME,
		.dev_groups = vgpu_groups,
	},
};

int gpusim_mdev_probe(struct pci_dev *pdev, struct gpusim_gpu *gpu)
{
	const struct gpusim_model *model = gpu->model;
	struct gpusim_parent *parent;
	unsigned int i;
	int ret;

	parent = kzalloc(sizeof(*parent), GFP_KERNEL);
	if (!parent)
		return -ENOMEM;
	for (i = 0; i < model->type_count; i++) {
		parent->types[i].type = &model->types[i];
		parent->types[i].mdev.sysfs_name = model->types[i].digits;
		parent->types[i].mdev.pretty_name = model->types[i].name;
		parent->pointers[i] = &parent->types[i].mdev;
	}
	gpusim_add(&parent->vf, gpu);
	pci_set_drvdata(pdev, parent);
	ret = mdev_register_parent(&parent->mdev, &pdev->dev, &gpusim_mdev_driver,
				   parent->pointers, model->type_count);
	if (ret) {
		gpusim_drop(&parent->vf);
		kfree(parent);
	}
	return ret;
}

void gpusim_mdev_remove(struct pci_dev *pdev)
{
	struct gpusim_parent *parent = pci_get_drvdata(pdev);

	mdev_unregister_parent(&parent->mdev);
	gpusim_drop(&parent->vf);
	kfree(parent);
}

int gpusim_mdev_init(void)
{
	return mdev_register_driver(&gpusim_mdev_driver);
}

void gpusim_mdev_exit(void)
{
	mdev_unregister_driver(&gpusim_mdev_driver);
}

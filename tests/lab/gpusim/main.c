// SPDX-License-Identifier: GPL-2.0-only
/*
 * The PCI driver: one for the physical function and for its virtual ones, named "nvidia".
 *
 * It has the id of QEMU's NVMe controller in its table. That takes no device from nvme, since a
 * bound one is never matched: whoever wants this driver unloads nvme first and keeps it out (see
 * __init__.py). The alternatives, driver_override or a bus notifier that writes it, would leave
 * "nvidia" in the driver_override of every function, which a real host does not have, and which
 * changes what unbinding and probing do.
 */
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "gpusim.h"

#define QEMU_VENDOR	0x1b36
#define QEMU_NVME	0x0010

static char *family = "mdev";
module_param(family, charp, 0444);
MODULE_PARM_DESC(family, "how vGPUs are made: mdev (default) or vendor");

static char *model = "";
module_param(model, charp, 0444);
MODULE_PARM_DESC(model, "A40 (default of mdev), L40S (default of vendor) or A100");

static unsigned int framebuffer;
module_param(framebuffer, uint, 0444);
MODULE_PARM_DESC(framebuffer, "MiB of a GPU (default: the model's)");

static unsigned int totalvfs;
module_param(totalvfs, uint, 0444);
MODULE_PARM_DESC(totalvfs, "most virtual functions of a GPU (default: the model's)");

static bool reject_raw = true;
module_param(reject_raw, bool, 0644);
MODULE_PARM_DESC(reject_raw, "only sriov-manage may change the number of virtual functions");

static bool wedge = true;
module_param(wedge, bool, 0644);
MODULE_PARM_DESC(wedge, "a virtual function that was unbound works again when made anew only");

static const struct gpusim_model *gpu_model;
static struct pci_driver gpusim_driver;

static bool is_vendor_family(void)
{
	return !strcmp(family, "vendor");
}

static int gpu_probe(struct pci_dev *pdev)
{
	int possible = pci_sriov_get_totalvfs(pdev);
	struct gpusim_gpu *gpu;
	int ret;

	gpu = kzalloc(sizeof(*gpu), GFP_KERNEL);
	if (!gpu)
		return -ENOMEM;
	gpu->pdev = pdev;
	gpu->model = gpu_model;
	gpu->framebuffer = framebuffer ?: gpu_model->framebuffer;
	mutex_init(&gpu->lock);
	INIT_LIST_HEAD(&gpu->functions);
	pci_set_drvdata(pdev, gpu);
	ret = pci_enable_device(pdev);
	if (ret)
		goto free;
	if (possible)
		pci_sriov_set_totalvfs(pdev, min_t(int, possible, totalvfs ?: gpu_model->functions));
	ret = sysfs_create_group(&pdev->dev.kobj, &gpusim_gpu_group);
	if (ret)
		goto disable;
	return 0;

disable:
	pci_disable_device(pdev);
free:
	kfree(gpu);
	return ret;
}

/* Forgets what lasts only as long as the virtual functions do. */
static void forget_modes(struct gpusim_gpu *gpu)
{
	gpu->heterogeneous = false;
	memset(gpu->instances, 0, sizeof(gpu->instances));
	bitmap_zero(gpu->wedged, GPUSIM_MAX_FUNCTIONS);
}

static void gpu_remove(struct pci_dev *pdev)
{
	struct gpusim_gpu *gpu = pci_get_drvdata(pdev);

	mutex_lock(&gpu->lock);
	gpu->remaking = true;
	mutex_unlock(&gpu->lock);
	pci_disable_sriov(pdev);
	sysfs_remove_group(&pdev->dev.kobj, &gpusim_gpu_group);
	pci_disable_device(pdev);
	mutex_destroy(&gpu->lock);
	kfree(gpu);
}

static int gpu_sriov_configure(struct pci_dev *pdev, int count)
{
	struct gpusim_gpu *gpu = pci_get_drvdata(pdev);
	bool allowed;
	int ret = 0;

	mutex_lock(&gpu->lock);
	allowed = gpu->unlocked || !reject_raw;
	gpu->unlocked = false;
	gpu->remaking = allowed;
	mutex_unlock(&gpu->lock);
	if (!allowed)
		return -EPERM;
	if (!count)
		pci_disable_sriov(pdev);	/* waits for those that guests have */
	mutex_lock(&gpu->lock);
	forget_modes(gpu);
	gpu->remaking = false;
	mutex_unlock(&gpu->lock);
	if (count)
		ret = pci_enable_sriov(pdev, count);
	return ret ?: count;
}

static int vf_probe(struct pci_dev *pdev)
{
	struct gpusim_gpu *gpu = pci_iov_get_pf_drvdata(pdev, &gpusim_driver);
	bool wedged;

	if (IS_ERR(gpu))
		return -ENODEV;
	mutex_lock(&gpu->lock);
	wedged = wedge && test_bit(pci_iov_vf_id(pdev), gpu->wedged);
	mutex_unlock(&gpu->lock);
	if (wedged) {
		pci_info(pdev, "does not answer since it was unbound\n");
		return -ENODEV;
	}
	return is_vendor_family() ? gpusim_vendor_probe(pdev, gpu) : gpusim_mdev_probe(pdev, gpu);
}

static void vf_remove(struct pci_dev *pdev)
{
	struct gpusim_gpu *gpu = pci_iov_get_pf_drvdata(pdev, &gpusim_driver);

	if (is_vendor_family())
		gpusim_vendor_remove(pdev);
	else
		gpusim_mdev_remove(pdev);
	if (WARN_ON(IS_ERR(gpu)))
		return;
	mutex_lock(&gpu->lock);
	if (!gpu->remaking)
		set_bit(pci_iov_vf_id(pdev), gpu->wedged);
	mutex_unlock(&gpu->lock);
}

static int gpusim_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	return pdev->is_virtfn ? vf_probe(pdev) : gpu_probe(pdev);
}

static void gpusim_remove(struct pci_dev *pdev)
{
	if (pdev->is_virtfn)
		vf_remove(pdev);
	else
		gpu_remove(pdev);
}

static const struct pci_device_id gpusim_ids[] = {
	{ PCI_DEVICE(QEMU_VENDOR, QEMU_NVME) },
	{ }
};

static struct pci_driver gpusim_driver = {
	.name = "nvidia",
	.id_table = gpusim_ids,
	.probe = gpusim_probe,
	.remove = gpusim_remove,
	.sriov_configure = gpu_sriov_configure,
	.driver_managed_dma = true,	/* guests have the group of a virtual function */
};

static int __init gpusim_init(void)
{
	int ret;

	if (!is_vendor_family() && strcmp(family, "mdev"))
		return -EINVAL;
	gpu_model = gpusim_find_model(model, family);
	if (!gpu_model)
		return -EINVAL;
	ret = gpusim_mdev_init();
	if (ret)
		return ret;
	ret = pci_register_driver(&gpusim_driver);
	if (ret)
		goto no_driver;
	ret = gpusim_link_init();
	if (ret)
		goto no_link;
	return 0;

no_link:
	pci_unregister_driver(&gpusim_driver);
no_driver:
	gpusim_mdev_exit();
	return ret;
}

static void __exit gpusim_exit(void)
{
	gpusim_link_exit();
	pci_unregister_driver(&gpusim_driver);
	gpusim_mdev_exit();
}

module_init(gpusim_init);
module_exit(gpusim_exit);

MODULE_DESCRIPTION("Emulated functions with the manners of a vGPU host driver, for tests");
MODULE_LICENSE("GPL");

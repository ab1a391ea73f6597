/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * gpusim: functions of an emulated PCI device with the manners of a vGPU host driver.
 *
 * main.c        the PCI driver, and how virtual functions come and go
 * gpu.c         the private directory of a physical function
 * models.c      the GPUs that it can be, and their vGPU types
 * capacity.c    what fits on a GPU, and what is placed where
 * attributes.c  the attributes that vGPUs of both families have
 * mdev.c        family "mdev": each virtual function is a parent of mediated devices
 * vgpu.c        the device that a guest sees of a mediated device
 * vendor.c      family "vendor": each virtual function is itself a VFIO device
 */
#ifndef GPUSIM_H
#define GPUSIM_H

#include <linux/bitmap.h>
#include <linux/device.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/pci.h>

#define GPUSIM_MAX_FUNCTIONS	256
#define GPUSIM_MAX_INSTANCES	7
#define GPUSIM_MAX_TYPES	32
#define GPUSIM_MAX_PARAMS	256

struct gpusim_type {
	unsigned int id;
	const char *digits;		/* the id as text */
	const char *name;
	unsigned int framebuffer;	/* MiB */
	unsigned int heads;
	unsigned int frame_rate;	/* limit, per second */
	const char *resolution;
	unsigned int max_instances;
	unsigned int slices;		/* of a GPU instance (MIG); 0: time-sliced */
};

struct gpusim_model {
	const char *key;		/* as the parameter "model" names it */
	const char *name;
	const char *family;		/* whose default it is; NULL: of none */
	unsigned int framebuffer;	/* MiB */
	unsigned int functions;		/* virtual ones */
	bool has_mig;
	bool has_mixed_sizes;
	unsigned int type_count;
	const struct gpusim_type *types;
};

/* One physical function. */
struct gpusim_gpu {
	struct pci_dev *pdev;
	const struct gpusim_model *model;
	unsigned int framebuffer;	/* MiB */

	struct mutex lock;		/* of all below, and of what its gpusim_vf hold */
	struct list_head functions;	/* virtual ones that this driver has */
	bool heterogeneous;
	bool mig;
	bool unlocked;			/* the next write to sriov_numvfs is sriov-manage's */
	bool remaking;			/* functions go because their number changes */
	DECLARE_BITMAP(wedged, GPUSIM_MAX_FUNCTIONS);
	unsigned int instances[GPUSIM_MAX_INSTANCES];	/* slices of what begins there, or 0 */
};

/* One virtual function, which holds a vGPU or none. */
struct gpusim_vf {
	struct gpusim_gpu *gpu;
	struct list_head link;
	const struct gpusim_type *type;	/* NULL: no vGPU */
	int placement;			/* GiB from the start; -1: the GPU is homogeneous */
	int instance;			/* where its GPU instance begins; -1: none */
	bool open;
	char params[GPUSIM_MAX_PARAMS];
};

enum gpusim_fit {
	GPUSIM_FITS,
	GPUSIM_OCCUPIED,
	GPUSIM_NO_INSTANCE,
	GPUSIM_OTHER_SIZE,
	GPUSIM_FULL,
};

/* models.c */
const struct gpusim_model *gpusim_find_model(const char *key, const char *family);
const struct gpusim_type *gpusim_find_type(const struct gpusim_model *model, unsigned int id);

/* capacity.c */
enum gpusim_fit gpusim_fit(struct gpusim_gpu *gpu, const struct gpusim_type *type);
enum gpusim_fit gpusim_vf_fit(struct gpusim_vf *vf, const struct gpusim_type *type);
enum gpusim_fit gpusim_claim(struct gpusim_vf *vf, const struct gpusim_type *type);
void gpusim_release(struct gpusim_vf *vf);
bool gpusim_move(struct gpusim_vf *vf, unsigned int placement);
bool gpusim_is_used(struct gpusim_gpu *gpu);
void gpusim_add(struct gpusim_vf *vf, struct gpusim_gpu *gpu);
void gpusim_drop(struct gpusim_vf *vf);

/* gpu.c */
extern const struct attribute_group gpusim_gpu_group;

/* attributes.c */
extern struct device_attribute dev_attr_placement_id;
extern struct device_attribute dev_attr_vgpu_params;
struct gpusim_vf *gpusim_vf_of(struct device *dev);

/* mdev.c */
int gpusim_mdev_probe(struct pci_dev *pdev, struct gpusim_gpu *gpu);
void gpusim_mdev_remove(struct pci_dev *pdev);
int gpusim_mdev_init(void);
void gpusim_mdev_exit(void);

/* vgpu.c */
struct gpusim_vgpu *gpusim_vgpu_create(struct device *dev, struct gpusim_vf *vf);
void gpusim_vgpu_destroy(struct gpusim_vgpu *vgpu);
struct gpusim_vf *gpusim_vgpu_vf(struct device *dev);

/* link.c */
int gpusim_link_init(void);
void gpusim_link_exit(void);

/* vendor.c */
int gpusim_vendor_probe(struct pci_dev *pdev, struct gpusim_gpu *gpu);
void gpusim_vendor_remove(struct pci_dev *pdev);
struct gpusim_vf *gpusim_vendor_vf(struct device *dev);

#endif

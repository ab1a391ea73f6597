// SPDX-License-Identifier: GPL-2.0-only
/*
 * What fits on a GPU, and what is placed where. Callers hold the GPU's lock.
 *
 * A homogeneous GPU carries vGPUs of one framebuffer size: the first one decides. A heterogeneous
 * one carries all sizes, each at a multiple of its own size, so that holes can be too small for
 * what would fit by the sum. With MIG, a vGPU fills a GPU instance of its number of slices.
 */
#include <linux/kernel.h>
#include <linux/string.h>

#include "gpusim.h"

#define MIB_PER_UNIT 1024

static unsigned int units(const struct gpusim_type *type)
{
	return DIV_ROUND_UP(type->framebuffer, MIB_PER_UNIT);
}

static int free_instance(struct gpusim_gpu *gpu, const struct gpusim_type *type)
{
	struct gpusim_vf *other;
	bool taken;
	int i;

	for (i = 0; i < GPUSIM_MAX_INSTANCES; i++) {
		taken = gpu->instances[i] != type->slices;
		list_for_each_entry(other, &gpu->functions, link)
			taken |= other->type && other->instance == i;
		if (!taken)
			return i;
	}
	return -1;
}

static bool is_free(struct gpusim_gpu *gpu, const struct gpusim_vf *mover, unsigned int start,
		    unsigned int length)
{
	unsigned int total = gpu->framebuffer / MIB_PER_UNIT;
	struct gpusim_vf *other;

	if (start % length || start > total || length > total - start)
		return false;
	list_for_each_entry(other, &gpu->functions, link)
		if (other->type && other != mover &&
		    (int)start < other->placement + (int)units(other->type) &&
		    other->placement < (int)(start + length))
			return false;
	return true;
}

static int free_placement(struct gpusim_gpu *gpu, const struct gpusim_type *type)
{
	unsigned int start;

	for (start = 0; start < gpu->framebuffer / MIB_PER_UNIT; start += units(type))
		if (is_free(gpu, NULL, start, units(type)))
			return start;
	return -1;
}

/* Whether one more vGPU of a type fits on a GPU, wherever. */
enum gpusim_fit gpusim_fit(struct gpusim_gpu *gpu, const struct gpusim_type *type)
{
	unsigned int used = 0, count = 0;
	struct gpusim_vf *other;

	if (gpu->mig != !!type->slices)
		return GPUSIM_NO_INSTANCE;
	if (gpu->mig)
		return free_instance(gpu, type) < 0 ? GPUSIM_NO_INSTANCE : GPUSIM_FITS;
	list_for_each_entry(other, &gpu->functions, link) {
		if (!other->type)
			continue;
		if (!gpu->heterogeneous && other->type->framebuffer != type->framebuffer)
			return GPUSIM_OTHER_SIZE;
		used += other->type->framebuffer;
		count += other->type->framebuffer == type->framebuffer;
	}
	if (count >= type->max_instances || used + type->framebuffer > gpu->framebuffer)
		return GPUSIM_FULL;
	if (gpu->heterogeneous && free_placement(gpu, type) < 0)
		return GPUSIM_FULL;
	return GPUSIM_FITS;
}

/* Whether a vGPU of a type fits on a virtual function. */
enum gpusim_fit gpusim_vf_fit(struct gpusim_vf *vf, const struct gpusim_type *type)
{
	return vf->type ? GPUSIM_OCCUPIED : gpusim_fit(vf->gpu, type);
}

/* Places a vGPU on a virtual function, where it fits; says in the kernel's log why it does not. */
enum gpusim_fit gpusim_claim(struct gpusim_vf *vf, const struct gpusim_type *type)
{
	static const char * const reasons[] = {
		[GPUSIM_OCCUPIED] = "the function has a vGPU",
		[GPUSIM_NO_INSTANCE] = "no GPU instance for it",
		[GPUSIM_OTHER_SIZE] = "the GPU carries another framebuffer size",
		[GPUSIM_FULL] = "the GPU is full",
	};
	enum gpusim_fit fit = gpusim_vf_fit(vf, type);

	if (fit != GPUSIM_FITS) {
		pci_info(vf->gpu->pdev, "vGPU type %u: %s\n", type->id, reasons[fit]);
		return fit;
	}
	vf->instance = vf->gpu->mig ? free_instance(vf->gpu, type) : -1;
	vf->placement = vf->gpu->heterogeneous ? free_placement(vf->gpu, type) : -1;
	vf->type = type;
	return GPUSIM_FITS;
}

void gpusim_release(struct gpusim_vf *vf)
{
	vf->type = NULL;
	vf->instance = -1;
	vf->placement = -1;
	vf->params[0] = '\0';
}

/* Gives a vGPU another place; false where it cannot be there. */
bool gpusim_move(struct gpusim_vf *vf, unsigned int placement)
{
	if (!vf->gpu->heterogeneous || !is_free(vf->gpu, vf, placement, units(vf->type)))
		return false;
	vf->placement = placement;
	return true;
}

bool gpusim_is_used(struct gpusim_gpu *gpu)
{
	struct gpusim_vf *vf;

	list_for_each_entry(vf, &gpu->functions, link)
		if (vf->type)
			return true;
	return false;
}

/* Takes and returns the GPU's lock itself, as gpusim_drop does. */
void gpusim_add(struct gpusim_vf *vf, struct gpusim_gpu *gpu)
{
	vf->gpu = gpu;
	mutex_lock(&gpu->lock);
	gpusim_release(vf);
	list_add_tail(&vf->link, &gpu->functions);
	mutex_unlock(&gpu->lock);
}

void gpusim_drop(struct gpusim_vf *vf)
{
	mutex_lock(&vf->gpu->lock);
	gpusim_release(vf);
	list_del(&vf->link);
	mutex_unlock(&vf->gpu->lock);
}

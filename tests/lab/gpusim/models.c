// SPDX-License-Identifier: GPL-2.0-only
/*
 * The GPUs, with the ids, names and limits that NVIDIA's drivers give their vGPU types.
 *
 * Ids of one model count up by series (B, Q, A), and by framebuffer within each; the C series
 * came later. Those of the L40S's C series are not known here, so it has none.
 */
#include <linux/kernel.h>
#include <linux/string.h>

#include "gpusim.h"

#define TYPE(number, label, mib, head_count, rate, size, max, slice_count) { \
	.id = number, \
	.digits = #number, \
	.name = PREFIX label, \
	.framebuffer = mib, \
	.heads = head_count, \
	.frame_rate = rate, \
	.resolution = size, \
	.max_instances = max, \
	.slices = slice_count, \
}
#define B(id, gib, max)	TYPE(id, #gib "B", (gib) * 1024, 4, 45, "5120x2880", max, 0)
#define Q1(id, max)	TYPE(id, "1Q", 1024, 4, 60, "5120x2880", max, 0)
#define Q(id, gib, max)	TYPE(id, #gib "Q", (gib) * 1024, 4, 60, "7680x4320", max, 0)
#define A(id, gib, max)	TYPE(id, #gib "A", (gib) * 1024, 1, 60, "1280x1024", max, 0)
#define C(id, gib, max)	TYPE(id, #gib "C", (gib) * 1024, 1, 60, "4096x2400", max, 0)
#define MIG(id, slice_count, gib, max) \
	TYPE(id, #slice_count "-" #gib "C", (gib) * 1024, 1, 60, "4096x2400", max, slice_count)

#define PREFIX "NVIDIA A40-"
static const struct gpusim_type a40_types[] = {
	B(555, 1, 32), B(556, 2, 24),
	Q1(557, 32), Q(558, 2, 24), Q(559, 3, 16), Q(560, 4, 12), Q(561, 6, 8),
	Q(562, 8, 6), Q(563, 12, 4), Q(564, 16, 3), Q(565, 24, 2), Q(566, 48, 1),
	A(567, 1, 32), A(568, 2, 24), A(569, 3, 16), A(570, 4, 12), A(571, 6, 8),
	A(572, 8, 6), A(573, 12, 4), A(574, 16, 3), A(575, 24, 2), A(576, 48, 1),
	C(581, 4, 12), C(582, 6, 8), C(583, 8, 6), C(584, 12, 4), C(585, 16, 3),
	C(586, 24, 2), C(587, 48, 1),
};
#undef PREFIX

#define PREFIX "NVIDIA L40S-"
static const struct gpusim_type l40s_types[] = {
	B(1145, 1, 32), B(1146, 2, 24),
	Q1(1147, 32), Q(1148, 2, 24), Q(1149, 3, 16), Q(1150, 4, 12), Q(1151, 6, 8),
	Q(1152, 8, 6), Q(1153, 12, 4), Q(1154, 16, 3), Q(1155, 24, 2), Q(1156, 48, 1),
	A(1157, 1, 32), A(1158, 2, 24), A(1159, 3, 16), A(1160, 4, 12), A(1161, 6, 8),
	A(1162, 8, 6), A(1163, 12, 4), A(1164, 16, 3), A(1165, 24, 2), A(1166, 48, 1),
	B(2164, 3, 16),
};
#undef PREFIX

#define PREFIX "GRID A100-"
static const struct gpusim_type a100_types[] = {
	C(468, 4, 10), C(469, 5, 8), C(470, 8, 5), C(471, 10, 4), C(472, 20, 2), C(473, 40, 1),
	MIG(474, 1, 5, 7), MIG(475, 2, 10, 3), MIG(476, 3, 20, 2), MIG(477, 4, 20, 1),
	MIG(478, 7, 40, 1),
};
#undef PREFIX

static_assert(ARRAY_SIZE(a40_types) <= GPUSIM_MAX_TYPES);

static const struct gpusim_model models[] = {
	{
		.key = "A40", .name = "NVIDIA A40", .family = "mdev",
		.framebuffer = 49152, .functions = 32, .has_mixed_sizes = true,
		.types = a40_types, .type_count = ARRAY_SIZE(a40_types),
	}, {
		.key = "L40S", .name = "NVIDIA L40S", .family = "vendor",
		.framebuffer = 49152, .functions = 32, .has_mixed_sizes = true,
		.types = l40s_types, .type_count = ARRAY_SIZE(l40s_types),
	}, {
		.key = "A100", .name = "NVIDIA A100-PCIE-40GB",
		.framebuffer = 40960, .functions = 16, .has_mig = true,
		.types = a100_types, .type_count = ARRAY_SIZE(a100_types),
	},
};

/* The model of a key or, where the key is empty, the default of a family. */
const struct gpusim_model *gpusim_find_model(const char *key, const char *family)
{
	size_t i;

	for (i = 0; i < ARRAY_SIZE(models); i++) {
		const char *name = *key ? models[i].key : models[i].family;

		if (name && !strcmp(name, *key ? key : family))
			return &models[i];
	}
	return NULL;
}

const struct gpusim_type *gpusim_find_type(const struct gpusim_model *model, unsigned int id)
{
	unsigned int i;

	for (i = 0; i < model->type_count; i++)
		if (model->types[i].id == id)
			return &model->types[i];
	return NULL;
}

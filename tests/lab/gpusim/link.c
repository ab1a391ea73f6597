// SPDX-License-Identifier: GPL-2.0-only
/*
 * A better end of a link: the kernel reads other Link Capabilities of function 0 of a bus.
 *
 * QEMU's ports show the link of the function below them, and its functions have one lane of
 * 2.5 GT/s, so that no link is ever worse than both ends support. aer_inject replaces the
 * operations of a bus in the same way.
 */
#include <linux/module.h>
#include <linux/pci.h>

#include "gpusim.h"

static int link_bus = -1;
module_param(link_bus, int, 0444);
MODULE_PARM_DESC(link_bus, "the bus whose function 0 has other Link Capabilities (default: none)");

static unsigned int link_cap;
module_param(link_cap, uint, 0444);
MODULE_PARM_DESC(link_cap, "these Link Capabilities");

static struct pci_bus *bus;
static struct pci_ops *original;
static struct pci_ops changed;
static int place;

static int read(struct pci_bus *from, unsigned int devfn, int where, int size, u32 *value)
{
	int ret = original->read(from, devfn, where, size, value);

	if (!ret && !devfn && where == place && size == 4 && *value != ~0U)
		*value = link_cap;
	return ret;
}

int gpusim_link_init(void)
{
	struct pci_dev *pdev;

	if (link_bus < 0)
		return 0;
	pdev = pci_get_domain_bus_and_slot(0, link_bus, 0);
	if (!pdev)
		return -ENODEV;
	bus = pdev->bus;
	place = pci_pcie_cap(pdev) + PCI_EXP_LNKCAP;
	changed = *bus->ops;
	changed.read = read;
	original = bus->ops;
	pci_bus_set_ops(bus, &changed);
	pci_dev_put(pdev);
	return 0;
}

void gpusim_link_exit(void)
{
	if (original)
		pci_bus_set_ops(bus, original);
}

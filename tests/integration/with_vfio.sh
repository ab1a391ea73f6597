# Runs a command as a user of a user namespace, on a machine that seems to have VFIO, but not KVM;
# with SEEMS_TO_HAVE_KVM, also /dev/kvm, which libvirt finds usable, and nothing can open as KVM;
# with QEMU_MODULES, with the modules of another QEMU, which ends if it finds those of this machine:
#   unshare --user --map-root-user --mount sh with_vfio.sh COMMAND…
# libvirt looks for an IOMMU group and /dev/vfio/vfio, and opens neither before a guest starts. A
# libvirtd asks a hook script, which refuses every guest.
set -eu
new=$(mktemp -d)
mount -t tmpfs none "$new"
mkdir -p "$new/dev/vfio" "$new/groups/0"
for place in /dev/*; do
    name=$new/dev/${place##*/}
    if [ "$place" = /dev/kvm ] || [ "$place" = /dev/vfio ]; then
        continue
    elif [ -L "$place" ]; then
        cp -P "$place" "$name"
    elif [ -d "$place" ]; then
        mkdir "$name"
        mount --rbind "$place" "$name"
    else
        : > "$name"
        mount --bind "$place" "$name"
    fi
done
[ -z "${SEEMS_TO_HAVE_KVM-}" ] || : > "$new/dev/kvm"
: > "$new/dev/vfio/vfio"
mount --bind "$new/groups" /sys/kernel/iommu_groups
[ -z "${QEMU_MODULES-}" ] || mount --bind "$QEMU_MODULES" /usr/lib/x86_64-linux-gnu/qemu
mkdir -p "$new/libvirt/hooks"
printf '#!/bin/sh\necho "not this guest" >&2\nexit 4\n' > "$new/libvirt/hooks/qemu"
chmod +x "$new/libvirt/hooks/qemu"
mount --bind "$new/libvirt" /etc/libvirt
mount --rbind "$new/dev" /dev
exec unshare --user --map-user=1000 --map-group=1000 "$@"

#!/usr/bin/env bash
# Makes the guest that the tests of virtual machines boot: Debian's cloud kernel, and an initramfs of busybox and e2e/guest.
#
#   scripts/guest.sh [DIR]   leaves DIR/vmlinuz and DIR/initramfs.gz [default: guest in cargo's target directory], and
#                            DIR/boot.img, a disk from which a PC boots them and shows a shell on its serial line
#
# The kernel's package is downloaded once and not installed. Says what is missing when it cannot.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dir=${1:-${CARGO_TARGET_DIR:-$root/target}/guest}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)

for tool in apt-get apt-cache dpkg cc busybox gzip flock syslinux mcopy; do
  command -v "$tool" >/dev/null || { echo "guest.sh: $tool is missing" >&2; exit 1; }
done
exec 9>"$dir/lock"
flock 9

# In the order in which they are loaded.
modules=(virtio/virtio_ring virtio/virtio virtio/virtio_pci_legacy_dev virtio/virtio_pci_modern_dev virtio/virtio_pci block/virtio_blk)

if [ ! -f "$dir/vmlinuz" ]; then
  work=$(mktemp -d "$dir/kernel.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  package=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image/ { print $2; exit }')
  if [ -z "$package" ]; then
    apt-get update >/dev/null
    package=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image/ { print $2; exit }')
  fi
  # Root's apt would rather download as another user, who cannot write here, and says so at length.
  (cd "$work" && apt-get -o APT::Sandbox::User=root download "$package" >/dev/null)
  dpkg -x "$work"/linux-image-*.deb "$work/x"
  rm -rf "$dir/modules" && mkdir "$dir/modules"
  for module in "${modules[@]}"; do
    cp "$work"/x/lib/modules/*/kernel/drivers/"$module".ko "$dir/modules/"
  done
  cp "$work"/x/boot/vmlinuz-* "$dir/vmlinuz.new"
  mv "$dir/vmlinuz.new" "$dir/vmlinuz"
fi

stamp=$(cat "$root"/e2e/guest/* "$root/scripts/guest.sh" | sha256sum)
if [ ! -f "$dir/initramfs.gz" ] || [ "$stamp" != "$(cat "$dir/stamp" 2>/dev/null)" ]; then
  tree=$dir/tree
  rm -rf "$tree" && mkdir -p "$tree/bin"
  cp "$(command -v busybox)" "$tree/bin/busybox"
  ln -s busybox "$tree/bin/sh"
  cp -r "$dir/modules" "$tree/modules"
  printf '%s.ko\n' "${modules[@]##*/}" >"$tree/modules/order"
  install -m 755 "$root/e2e/guest/init" "$tree/init"
  cc -O2 -Wall -Wextra -static -pthread -o "$tree/bin/verify" "$root/e2e/guest/verify.c"
  # busybox's cpio knows the one format that kernels take.
  (cd "$tree" && find . | busybox cpio -o -H newc 2>/dev/null) | gzip -1 >"$dir/initramfs.new"
  mv "$dir/initramfs.new" "$dir/initramfs.gz"

  # One FAT file system without partitions, of which the first block boots. mtools would ask about doubts.
  boot=$dir/boot.new
  export MTOOLS_SKIP_CHECK=1
  rm -f "$boot" && truncate -s 64M "$boot"
  mformat -i "$boot" -h 255 -s 63 -t 9 ::
  syslinux --install "$boot"
  mcopy -i "$boot" "$dir/vmlinuz" ::vmlinuz
  mcopy -i "$boot" "$dir/initramfs.gz" ::initrd.gz
  append="console=ttyS0 quiet panic=1 no_timer_check mode=shell"
  printf 'SERIAL 0\nDEFAULT linux\nLABEL linux\n  KERNEL vmlinuz\n  INITRD initrd.gz\n  APPEND %s\n' "$append" |
    mcopy -i "$boot" - ::syslinux.cfg
  mv "$boot" "$dir/boot.img"
  echo "$stamp" >"$dir/stamp"
fi

#!/bin/busybox sh
# The guest's first process, in the initramfs: modules, the images of /usr and the like as disks, then `guest.sh`.
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r _ module; do insmod "/modules/$module"; done < modules.txt
mount -t tmpfs -o mode=755 root /new
while read -r name target; do ln -s "$target" "/new/$name"; done < links.txt
set -- b c d e f g h
while read -r place; do
    mkdir -p "/new$place"
    mount -t erofs -o ro "/dev/vd$1" "/new$place" || echo "cannot mount $place"
    shift
done < mounts.txt
for name in proc sys dev tmp run root home var/tmp; do mkdir -p "/new/$name"; done
chmod 1777 /new/tmp
mount -t ext4 /dev/vda /new/var/tmp
chmod 1777 /new/var/tmp
cp guest command /new/
mount -o move /dev /new/dev
umount /proc /sys
exec switch_root /new /guest

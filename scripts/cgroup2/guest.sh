#!/bin/sh
# The guest's PID 1: what systemd would have mounted and made, then the command in a group that was delegated to it.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t cgroup2 -o nsdelegate,memory_recursiveprot cgroup2 /sys/fs/cgroup
mkdir -p /dev/shm /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t devpts -o ptmxmode=0666,mode=620 pts /dev/pts
ip link set lo up
hostname guest
# As systemd does for a service with Delegate=yes.
controllers="+cpu +memory +pids"
echo "$controllers" > /sys/fs/cgroup/cgroup.subtree_control
mkdir -p /sys/fs/cgroup/system.slice
echo "$controllers" > /sys/fs/cgroup/system.slice/cgroup.subtree_control
service=/sys/fs/cgroup/system.slice/tests.service
mkdir $service
setfattr -n trusted.delegate -v 1 $service 2>/dev/null ||
    python3 -c "import os; os.setxattr('$service', 'trusted.delegate', b'1')"
stty -F /dev/ttyS1 raw -echo
sh -c "echo \$\$ > $service/cgroup.procs; . /command"
poweroff -f 2>/dev/null || echo o > /proc/sysrq-trigger
sleep 60

#!/usr/bin/env bash
# One guest: what a guest must have, and railfs on its old kernel.
# shellcheck shell=bash disable=SC2317
. "$LAB_DIR/cases/lib.sh"
work=/dev/shm/work
mkdir -p $work/m

the_guest_has_what_tests_need() {
  uname -r | grep -q '^6\.1\.'
  [[ -c /dev/fuse && -d /sys/fs/fuse/connections ]] || mount -t fusectl fusectl /sys/fs/fuse/connections
  findmnt -no FSTYPE /mnt/disk | grep -qx ext4
  dd if=/dev/zero of=/mnt/disk/probe bs=4k count=1 oflag=direct,dsync status=none
  dmsetup version >/dev/null
  for device in rxe0s rxe0c rxe1s rxe1c; do
    ibv_devinfo -d $device | grep -q PORT_ACTIVE
  done
}

# Not by way of loopback: the packets must be seen on the wire between the two ends.
verbs_take_the_wire() {
  local before after
  before=$(cat /sys/class/net/rail1s/statistics/rx_bytes)
  ib_write_bw -d rxe1s -x 1 -s 65536 -n 50 --report_gbits >/dev/null &
  within 20 eval 'ss -ltn | grep -q :18515'
  ib_write_bw -d rxe1c -x 1 -s 65536 -n 50 --report_gbits 10.9.1.1
  wait $!
  after=$(cat /sys/class/net/rail1s/statistics/rx_bytes)
  say "rail 1 carried $((after - before)) bytes"
  ((after - before > 50 * 65536))
}

i1_an_old_kernel_reads_what_was_put() {
  store /mnt/disk/store 10.9.0.1 10.9.1.1
  railfsd serve --config /mnt/disk/store/railfsd.toml >$work/ready 2>$work/server.log &
  echo $! >$work/server
  within 30 grep -q ready $work/ready
  head -c 6000003 /dev/urandom >$work/file
  railfs put $work/file railfs://10.9.0.1/lab/file
  railfs mount railfs://10.9.0.1/lab/ $work/m -o arena=16MiB
  cmp $work/file $work/m/file
  cmp $work/file $work/m/file
  dd if=$work/m/file iflag=direct bs=1M status=none | cmp - $work/file
  python3 - $work/m/file $work/file <<'PY'
import mmap, os, sys
def mapped(name, flags):
    fd = os.open(name, os.O_RDONLY)
    with mmap.mmap(fd, 0, flags, mmap.PROT_READ) as m:
        return bytes(m)
assert mapped(sys.argv[1], mmap.MAP_PRIVATE) == open(sys.argv[2], "rb").read()
PY
  railfs status $work/m
  railfs umount $work/m
  kill "$(cat $work/server)"
  within 15 not kill -0 "$(cat $work/server)"
}

try the_guest_has_what_tests_need the_guest_has_what_tests_need
try verbs_take_the_wire verbs_take_the_wire
try i1_an_old_kernel_reads_what_was_put i1_an_old_kernel_reads_what_was_put
status_of_cases

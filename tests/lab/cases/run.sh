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

# What a form of mount promises here: bytes, mappings, programs, and what a descriptor of a replaced file gives.
form_on_this_kernel() { # OPTIONS SHARED(works|ENODEV) REPLACED(ESTALE|old)
  local options=$1 shared=$2 replaced=$3
  railfs put $work/one railfs://10.9.0.1/lab/f
  railfs mount railfs://10.9.0.1/lab/ $work/m -o "arena=16MiB,$options"
  cmp $work/one $work/m/f
  python3 - $work "$shared" "$replaced" <<'PY'
import errno, mmap, os, subprocess, sys
work, shared, replaced = sys.argv[1:]
one, two = (open(f"{work}/{name}", "rb").read() for name in ("one", "two"))
def mapped(fd, flags):
    with mmap.mmap(fd, 0, flags, mmap.PROT_READ) as m:
        return bytes(m)
fd = os.open(f"{work}/m/f", os.O_RDONLY)
assert mapped(fd, mmap.MAP_PRIVATE) == one
if shared == "works":
    assert mapped(fd, mmap.MAP_SHARED) == one
else:
    try:
        mapped(fd, mmap.MAP_SHARED)
        raise SystemExit("MAP_SHARED was expected to be refused here")
    except OSError as error:
        assert error.errno == errno.ENODEV, error
    os.close(fd)
    fd = os.open(f"{work}/m/f", os.O_RDONLY)
assert os.pread(fd, 1000, 5000) == one[5000:6000]
subprocess.run(["railfs", "put", f"{work}/two", "railfs://10.9.0.1/lab/f"], check=True, stdout=subprocess.DEVNULL)
try:
    got = os.pread(fd, 1000, 5000)
    assert replaced == "old" and got == one[5000:6000], "the replaced version was not expected to be read"
except OSError as error:
    assert replaced == "ESTALE" and error.errno == errno.ESTALE, error
with open(f"{work}/m/f", "rb") as new:
    assert new.read() == two
PY
  railfs put -a /bin/true railfs://10.9.0.1/lab/true
  within 10 $work/m/true
  railfs umount $work/m
}

i3_every_form_keeps_its_promise_on_an_old_kernel() {
  store /mnt/disk/forms 10.9.0.1
  railfsd serve --config /mnt/disk/forms/railfsd.toml >$work/ready 2>$work/server.log &
  echo $! >$work/server
  within 30 grep -q ready $work/ready
  head -c 1500003 /dev/urandom >$work/one
  head -c 1600007 /dev/urandom >$work/two
  # Before 6.6 a file read directly cannot be mapped shared: `auto` takes the other form there.
  form_on_this_kernel io=auto works ESTALE
  form_on_this_kernel io=direct ENODEV ESTALE
  form_on_this_kernel io=cached works ESTALE
  form_on_this_kernel mode=snapshot works old
  kill "$(cat $work/server)"
  within 15 not kill -0 "$(cat $work/server)"
}

try the_guest_has_what_tests_need the_guest_has_what_tests_need
try verbs_take_the_wire verbs_take_the_wire
try i1_an_old_kernel_reads_what_was_put i1_an_old_kernel_reads_what_was_put
try i3_every_form_keeps_its_promise_on_an_old_kernel i3_every_form_keeps_its_promise_on_an_old_kernel
. "$LAB_DIR/cases/faults_cases.sh"
. "$LAB_DIR/cases/writes_cases.sh"
status_of_cases

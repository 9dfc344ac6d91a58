#!/usr/bin/env bash
# Disks that lose power and disks that fail, by dm_flakey over the guest's own disk. Sourced, after lib.sh.
# shellcheck shell=bash disable=SC2317,SC2154
flaky=/mnt/flaky
# Read over and over: not from where each reading is slow.
mkdir -p /dev/shm/bin
cp "$RAILFS_BIN_DIR/railfs" "$RAILFS_BIN_DIR/railfsd" /dev/shm/bin/
PATH=/dev/shm/bin:$PATH
power=$work/power

# A piece of the guest's disk, through a table that can be changed under the file system. The disk's own file system is gone then.
flaky_disk() { # NAME FROM-MIB MIB
  disk=$(cat $work/disk)
  from=$(($2 * 2048))
  sectors=$(($3 * 2048))
  dmsetup create --noudevsync "$1" --table "0 $sectors linear $disk $from"
  # There is no udev here.
  dmsetup mknodes
  mkfs.ext4 -q -F "/dev/mapper/$1"
}

if findmnt -no SOURCE /mnt/disk >$work/disk; then umount /mnt/disk; fi

table() { # NAME TABLE...: from one moment to the next, without anything being written first.
  local name=$1
  shift
  dmsetup suspend --noflush --nolockfs "$name"
  dmsetup load "$name" --table "0 $sectors $*"
  dmsetup resume --noudevsync "$name"
}

begin_server() { # CONFIG
  : >$work/ready
  railfsd serve --config "$1" >$work/ready 2>>$work/server.log &
  server=$!
  within 60 grep -q ready $work/ready
}

# The putter says what it begins and what was acknowledged; the checker reads that.
cat >$work/putter.py <<'PY'
import random, subprocess, sys
url, log, first = sys.argv[1], open(sys.argv[2], "a", buffering=1), int(sys.argv[3])
for n in range(first, first + 1000):
    key = n % 3
    data = random.Random(n).randbytes(40_000 + n * 7919 % 300_000)
    with open(sys.argv[2] + ".data", "wb") as file:
        file.write(data)
    log.write(f"begin {key} {n}\n")
    for _ in range(5):
        done = subprocess.run(["railfs", "put", "--quiet", sys.argv[2] + ".data", f"{url}k{key}"], stderr=subprocess.DEVNULL)
        if done.returncode != 5:
            break
    if done.returncode:
        break
    log.write(f"done {key} {n}\n")
PY
cat >$work/checker.py <<'PY'
import random, subprocess, sys
url, words = sys.argv[1], [line.split() for line in open(sys.argv[2])]
for key in range(3):
    begun = [int(n) for word, k, n in words if word == "begin" and int(k) == key]
    done = [int(n) for word, k, n in words if word == "done" and int(k) == key]
    floor = max(done, default=None)
    for _ in range(10):
        got = subprocess.run(["railfs", "get", "--quiet", f"{url}k{key}", "-"], capture_output=True)
        # 5: a machine so slow that no rail came up in time.
        if got.returncode != 5:
            break
    if got.returncode == 3 and floor is None:
        continue
    assert got.returncode == 0, f"k{key}: {got.stderr.decode()}"
    may = [n for n in begun if floor is None or n >= floor]
    fits = [n for n in may if random.Random(n).randbytes(40_000 + n * 7919 % 300_000) == got.stdout]
    assert fits, f"k{key}: {len(got.stdout)} bytes are of none of {may}; acknowledged: {floor}"
    # What was read is what is there from now on, whatever the log of the putter says.
    open(sys.argv[2], "a").write(f"done {key} {fits[0]}\n")
PY

i8_power_cuts_at_any_moment_leave_old_or_new() {
  local rounds=$((${RAILFS_FULL:-0} == 1 ? 60 : 4)) round putter
  flaky_disk power 0 160
  mkdir -p $flaky
  mount /dev/mapper/power $flaky
  store $flaky/store 127.0.0.1
  sync
  : >"$power"
  for ((round = 0; round < rounds; round++)); do
    begin_server $flaky/store/railfsd.toml
    python3 $work/checker.py railfs://127.0.0.1/lab/ "$power"
    python3 $work/putter.py railfs://127.0.0.1/lab/ "$power" $((1 + round * 1000)) &
    putter=$!
    # The moment differs from round to round.
    sleep "$((RANDOM % 3)).$((RANDOM % 10))"
    # Power goes: from now on nothing that is written arrives.
    table power flakey "$disk" "$from" 0 3600 1 drop_writes
    kill -9 $server
    wait $server 2>/dev/null || true
    kill -9 $putter 2>/dev/null || true
    wait $putter 2>/dev/null || true
    umount $flaky
    echo 3 >/proc/sys/vm/drop_caches
    table power linear "$disk" "$from"
    mount /dev/mapper/power $flaky
  done
  begin_server $flaky/store/railfsd.toml
  python3 $work/checker.py railfs://127.0.0.1/lab/ "$power"
  kill $server
  wait $server
  railfsd fsck --config $flaky/store/railfsd.toml
  say "$rounds cuts, $(grep -c done "$power") puts acknowledged, $(grep -c begin "$power") begun"
  echo "i8 power-cuts $rounds i8_power_cuts_at_any_moment_leave_old_or_new" >>$LAB_OUT/tally
  umount $flaky
  dmsetup remove power
}

# One of three directories gives EIO for all that is asked: its objects suffer, the others are served, the server lives.
i11_a_disk_that_gives_only_errors_costs_its_objects_alone() {
  local bad=0 good=0 n code
  flaky_disk plain 160 128
  mount /dev/mapper/plain /mnt/disk
  flaky_disk eio 300 96
  mkdir -p $flaky
  mount /dev/mapper/eio $flaky
  store /mnt/disk/eio 127.0.0.1
  head -c 300000 /dev/urandom >$work/file
  # Six objects before there is a third directory, six when it is the one with most room.
  begin_server /mnt/disk/eio/railfsd.toml
  for n in $(seq 6); do within 30 railfs put --quiet --width 1 $work/file railfs://127.0.0.1/lab/o"$n"; done
  kill $server
  wait $server
  mkdir $flaky/d2
  railfsd init /mnt/disk/eio/d0 /mnt/disk/eio/d1 $flaky/d2
  sed -i "s|^stripe_dirs = .*|stripe_dirs = [\"/mnt/disk/eio/d0\", \"/mnt/disk/eio/d1\", \"$flaky/d2\"]|" /mnt/disk/eio/railfsd.toml
  begin_server /mnt/disk/eio/railfsd.toml
  for n in $(seq 7 12); do within 30 railfs put --quiet --width 1 $work/file railfs://127.0.0.1/lab/o"$n"; done
  ls $flaky/d2/components | grep -q .
  sync
  echo 3 >/proc/sys/vm/drop_caches
  table eio error
  for n in $(seq 12); do
    # 5: a machine so slow that no rail came up in time.
    while true; do
      code=0
      railfs get --quiet railfs://127.0.0.1/lab/o"$n" - >$work/got 2>$work/why || code=$?
      ((code == 5)) || break
    done
    if ((code == 0)); then
      cmp $work/got $work/file
      good=$((good + 1))
    else
      cat $work/why
      grep -q "o$n" $work/why
      bad=$((bad + 1))
    fi
  done
  say "$good read, $bad not"
  ((good >= 6 && bad >= 1 && good + bad == 12))
  within 20 eval 'railfs status railfs://127.0.0.1/lab/ | grep -q "d2.*\(suspect\|read-only\|missing\|failing\)"'
  within 30 railfs put --quiet $work/file railfs://127.0.0.1/lab/after
  kill -0 $server
  table eio linear "$disk" "$from"
  kill $server
  wait $server || true
  umount $flaky
  umount /mnt/disk
  dmsetup remove eio plain
}

try i8_power_cuts_at_any_moment_leave_old_or_new i8_power_cuts_at_any_moment_leave_old_or_new
try i11_a_disk_that_gives_only_errors_costs_its_objects_alone i11_a_disk_that_gives_only_errors_costs_its_objects_alone

#!/usr/bin/env bash
# Power cuts after any write: dm_log_writes records what reached the disk and in which order it was flushed, and what a cut at any
# place would have left is made anew and started from. Sourced, after faults_cases.sh.
# shellcheck shell=bash disable=SC2317,SC2154

# What a put or delete begins and was acknowledged stands in the log of writes itself, between them.
cat >$work/marker.py <<'PY'
import random, subprocess, sys
url, device, count, path = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
def mark(text):
    subprocess.run(["dmsetup", "message", device, "0", "mark", text], check=True)
def call(*words):
    while True:
        code = subprocess.run(["railfs", *words], stderr=subprocess.DEVNULL).returncode
        # 5: a machine so slow that no rail came up in time.
        if code != 5:
            return code
for n in range(count):
    key = n % 3
    mark(f"begin-{key}-{n}")
    if n % 7 == 6:
        code = call("rm", f"{url}k{key}")
    else:
        with open(path, "wb") as file:
            file.write(random.Random(n).randbytes(40_000 + n * 7919 % 300_000))
        code = call("put", "--quiet", path, f"{url}k{key}")
    assert code == 0, f"{n}: status {code}"
    mark(f"done-{key}-{n}")
PY

# The log: a superblock, then entries of a sector each, what was written behind each (Documentation/admin-guide/device-mapper).
cat >$work/cutter.py <<'PY'
import random, struct, subprocess, sys
log_path, base_path, target, wanted, seed = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
FLUSH, FUA, DISCARD, MARK = 1, 2, 4, 8
image = bytearray(open(base_path, "rb").read())
log = open(log_path, "rb")
magic, version, number, size = struct.unpack("<QQQI", log.read(28))
assert magic == 0x6A736677736872 and version == 1, (hex(magic), version)
place, entries = size, []
for _ in range(number):
    log.seek(place)
    sector, sectors, flags, length = struct.unpack("<QQQQ", log.read(32))
    text = log.read(length).decode() if flags & MARK else ""
    place += size
    entries.append((sector * size, sectors * size, flags, text, place))
    if not flags & (DISCARD | MARK):
        place += sectors * size
first = next(index for index, entry in enumerate(entries) if entry[3].startswith("begin"))
# Each flush and each acknowledgement is a place where something could be missing; any other write may be the last one, too.
telling = [index for index, entry in enumerate(entries) if index >= first and (entry[2] & (FLUSH | FUA) or entry[3].startswith("done"))]
chooser = random.Random(seed)
points = set(chooser.sample(telling, min(len(telling), wanted * 3 // 4)))
others = [index for index in range(first, number) if index not in points]
points |= set(chooser.sample(others, min(len(others), wanted - len(points)))) | {number - 1}
begun, done = {}, {}
def bytes_of(n):
    return None if n % 7 == 6 else random.Random(n).randbytes(40_000 + n * 7919 % 300_000)
cuts = 0
for index, (at, length, flags, text, data) in enumerate(entries):
    if flags & MARK:
        word, *numbers = text.split("-")
        # The target says by one of its own that it ends.
        if word in ("begin", "done"):
            key, n = map(int, numbers)
            (begun.setdefault(key, []).append(n) if word == "begin" else done.__setitem__(key, n))
    elif flags & DISCARD:
        image[at:at + length] = bytes(length)
    else:
        log.seek(data)
        image[at:at + length] = log.read(length)
    if index not in points:
        continue
    with open(target, "r+b") as disk:
        disk.write(image)
        disk.flush()
    cuts += 1
    what = f"cut {cuts}, after entry {index} of {number} ({text or hex(flags)})"
    state = subprocess.run(["bash", "-c", '. "$0" && cut_is_served', sys.argv[6]], stdin=subprocess.DEVNULL)
    assert state.returncode == 0, f"{what}: it does not start"
    for key in range(3):
        while True:
            got = subprocess.run(["railfs", "get", "--quiet", f"railfs://127.0.0.1/lab/k{key}", "-"], capture_output=True)
            if got.returncode != 5:
                break
        floor = done.get(key)
        may = [n for n in begun.get(key, []) if floor is None or n >= floor]
        held = None if got.returncode == 3 else got.stdout
        assert got.returncode in (0, 3), f"{what}: k{key}: {got.stderr.decode()}"
        fits = (floor is None and held is None) or any(bytes_of(n) == held for n in may)
        assert fits, f"{what}: k{key} is {'absent' if held is None else len(held)}, of none of {may}; acknowledged: {floor}"
    state = subprocess.run(["bash", "-c", '. "$0" && cut_is_over', sys.argv[6]], stdin=subprocess.DEVNULL)
    assert state.returncode == 0, f"{what}: fsck finds damage"
print(f"{cuts} cuts in {number} entries of the log, {len(telling)} of them flushes and acknowledgements; {sum(map(len, begun.values()))} puts and deletes")
PY

# What the cutter asks for in shells of its own.
cat >$work/cut.sh <<'SH'
work=@WORK@
flaky=/mnt/flaky
cut_is_served() {
  set -e
  mount /dev/mapper/cut $flaky
  : >$work/ready
  railfsd serve --config $flaky/store/railfsd.toml >$work/ready 2>>$work/cut.log &
  echo $! >$work/cut.server
  for _ in $(seq 600); do
    if grep -q ready $work/ready; then return 0; fi
    sleep 0.1
  done
  tail -n 5 $work/cut.log
  return 1
}
cut_is_over() {
  set -e
  kill -TERM "$(cat $work/cut.server)"
  while kill -0 "$(cat $work/cut.server)" 2>/dev/null; do sleep 0.05; done
  railfsd fsck --config $flaky/store/railfsd.toml >$work/fsck.out 2>&1 || { cat $work/fsck.out; return 1; }
  umount $flaky
  echo 3 >/proc/sys/vm/drop_caches
}
SH
sed -i "s|@WORK@|$work|" $work/cut.sh

i8_a_power_cut_after_any_write_leaves_old_or_new() {
  local cuts=$((${RAILFS_FULL:-0} == 1 ? 80 : 8)) puts=$((${RAILFS_FULL:-0} == 1 ? 40 : 14)) seed=$RANDOM
  say "seed $seed"
  flaky_disk data 0 64
  mkdir -p $flaky
  mount /dev/mapper/data $flaky
  store $flaky/store 127.0.0.1
  umount $flaky
  dd if=/dev/mapper/data of=/dev/shm/base bs=1M status=none
  dmsetup create --noudevsync wlog --table "0 $((300 * 2048)) linear $disk $((64 * 2048))"
  dmsetup create --noudevsync cut --table "0 $((64 * 2048)) linear $disk $((370 * 2048))"
  dmsetup mknodes
  dd if=/dev/zero of=/dev/mapper/wlog bs=1M count=1 status=none
  dmsetup create --noudevsync logged --table "0 $((64 * 2048)) log-writes /dev/mapper/data /dev/mapper/wlog"
  dmsetup mknodes
  mount /dev/mapper/logged $flaky
  begin_server $flaky/store/railfsd.toml
  python3 $work/marker.py railfs://127.0.0.1/lab/ logged $puts $work/marked
  kill -9 $server
  wait $server 2>/dev/null || true
  umount $flaky
  dmsetup remove logged
  python3 $work/cutter.py /dev/mapper/wlog /dev/shm/base /dev/mapper/cut $cuts $seed $work/cut.sh
  echo "i8 power-cuts $cuts i8_a_power_cut_after_any_write_leaves_old_or_new" >>$LAB_OUT/tally
  dmsetup remove cut wlog data
  rm /dev/shm/base
}

try i8_a_power_cut_after_any_write_leaves_old_or_new i8_a_power_cut_after_any_write_leaves_old_or_new

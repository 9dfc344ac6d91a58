#!/usr/bin/env bash
# `make bench`: builds railfs and its benchmark, optimised, and runs it (tests/bench). Prints a table; all samples go to
# target/bench/bench.json. Exit status 1 only if something broke: bars that are not reached are printed, not enforced.
#
# With the argument "forms" (`make bench-forms`): the two forms of reads, io=direct and io=cached, side by side instead.
#
# With "rdma" (`make bench-rdma`): RDMA rails over Soft-RoCE devices, in a guest of the lab, beside ib_write_bw.
#
#   RAILFS_BENCH_ROUNDS  rounds; default 3, of rdma 5
set -euo pipefail
cd "$(dirname "$0")/../.."

fail() {
  echo "bench: $*" >&2
  exit 1
}

tests/bin/setup.sh
if [[ ${1:-} == rdma ]]; then
  lacking=$(tests/lab/lab missing) || fail "this machine lacks ${lacking//$'\n'/; }"
  cargo build --release --quiet -p railfs -p railfs-server -p railfs-bench --bins
  target=$(cargo metadata --format-version 1 --no-deps | jq -r .target_directory)
  rm -rf "$target/bench/rdma"
  mkdir -p "$target/bench/rdma/bin"
  for program in railfs railfsd railfs-bench; do strip -o "$target/bench/rdma/bin/$program" "$target/release/$program"; done
  export RAILFS_BIN_DIR=$target/bench/rdma/bin RAILFS_LAB_LIMIT=${RAILFS_LAB_LIMIT:-7200}
  exec tests/lab/lab run --mem 3072 --disk 2048 --out "$target/bench/rdma" tests/lab/cases/rdma-bench.sh
fi
[[ -c /dev/fuse ]] || fail "/dev/fuse is not there: load the module (modprobe fuse), or give the container the device"
rounds=${RAILFS_BENCH_ROUNDS:-3}
cargo build --release --quiet -p railfs -p railfs-server -p railfs-bench --bins
target=$(cargo metadata --format-version 1 --no-deps | jq -r .target_directory)
mkdir -p "$target/bench"

free=$(df --output=avail -B1 "${TMPDIR:-/tmp}" | tail -n 1)
((free > 6 << 30)) || fail "${TMPDIR:-/tmp} has less than 6 GiB free: set TMPDIR to another directory"
read -r load _ </proc/loadavg
if awk -v load="$load" 'BEGIN { exit load < 0.5 }'; then
  echo "bench: the load is $load: something else runs, and the numbers will be lower than they could be" >&2
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/railfs-bench.XXXXXX")
clean() {
  local status=$?
  trap '' INT TERM HUP
  # The benchmark stops what it started; after a kill its mounts may still be there.
  for point in "$work/mnt" "$work/null"; do
    if grep -qF " $point " /proc/self/mountinfo; then
      RAILFS_RUNTIME_DIR=$work/run "$target/release/railfs" umount --lazy "$point" || true
    fi
  done
  rm -rf --one-file-system "$work"
  exit "$status"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

if [[ ${1:-} == forms ]]; then
  "$target/release/railfs-bench" forms "$target/release" "$work" "$rounds"
else
  "$target/release/railfs-bench" run "$target/release" "$work" "$target/bench/bench.json" "$rounds"
fi

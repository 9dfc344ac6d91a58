#!/usr/bin/env bash
# One guest: rails of queue pairs over Soft-RoCE devices, by themselves and under a mount.
# shellcheck shell=bash disable=SC2317
. "$LAB_DIR/cases/lib.sh"
work=/dev/shm/work
mkdir -p $work/m
# What is registered is charged to this; the guest's own limit is 8 MiB. root lifts it by CAP_IPC_LOCK.
ulimit -l unlimited

# What every rail promises, over two devices with the wire between.
verbs_conformance() {
  export RAILFS_VERBS_DEVICES=rxe0c,10.9.0.2,rxe0s,10.9.0.1
  "$RAILFS_BIN_DIR/rail_conformance" verbs_on_real_devices --exact --nocapture
}

# A WRITE that comes late: damage without a fence, none with each of them.
i4_fences() {
  export RAILFS_VERBS_DEVICES=rxe0c,10.9.0.2,rxe0s,10.9.0.1
  "$RAILFS_BIN_DIR/railfs_engine" fence_tests --nocapture
}

# rdma_store DIRECTORY RAIL...: a store whose rails are the devices rxeNs, and a control plane on the first.
rdma_store() {
  local directory=$1 rail
  shift
  rm -rf "$directory"
  mkdir -p "$directory/d0" "$directory/d1"
  railfsd init "$directory/d0" "$directory/d1"
  {
    printf 'node = "lab"\nstate_dir = "%s/state"\nstripe_dirs = ["%s/d0", "%s/d1"]\nrequire_rdma = true\n' "$directory" "$directory" "$directory"
    printf '[control]\nlisten = "10.9.0.1"\n[security]\ninsecure = true\n[memory]\nmax_registered = "64 MiB"\n'
    for rail in "$@"; do
      printf '[[rail]]\nfabric = "f%s"\ntransport = "rdma"\nlisten = "10.9.%s.1"\ndevice = "rxe%ss"\n' "$rail" "$rail" "$rail"
    done
  } >"$directory/railfsd.toml"
}

serve() { # DIRECTORY
  # What a case that failed left behind.
  railfs umount $work/m 2>/dev/null || true
  if [[ -e $work/server ]] && kill -9 "$(cat $work/server)" 2>/dev/null; then within 20 not kill -0 "$(cat $work/server)"; fi
  : >$work/ready
  : >$work/server.log
  railfsd serve --config "$1/railfsd.toml" >$work/ready 2>>$work/server.log &
  echo $! >$work/server
  within 60 grep -q ready $work/ready || { cat $work/server.log; return 1; }
}

stop_serving() {
  kill "$(cat $work/server)"
  within 20 not kill -0 "$(cat $work/server)"
}

# Object bytes that each rail of the mount has received.
received() { railfs status $work/m --json | python3 -c 'import json,sys; print(*[r["bytes_received"] for r in json.load(sys.stdin)["rails"]])'; }
states() { railfs status $work/m --json | python3 -c 'import json,sys; print(*[r["state"] for r in json.load(sys.stdin)["rails"]])'; }
a_rail_is_down() { states | grep -q -e down -e connecting; }
transports() { railfs status $work/m --json | python3 -c 'import json,sys; print(*[r["transport"] for r in json.load(sys.stdin)["rails"]])'; }

read_over() { # RAIL...
  rdma_store /mnt/disk/store "$@"
  serve /mnt/disk/store
  # Its limit of connecting may be too short for a busy, emulated machine.
  within 120 railfs put $work/file railfs://10.9.0.1/lab/file
  railfs mount railfs://10.9.0.1/lab/ $work/m -o arena=32MiB,require_rdma,connect_timeout=30s,read_timeout=60s
  cmp $work/file $work/m/file
  dd if=$work/m/file iflag=direct bs=1M status=none | cmp - $work/file
  [[ $(transports) == "$(printf 'rdma %.0s' "$@" | sed 's/ $//')" ]]
  say "received by each rail: $(received)"
  railfs status $work/m
}

i1_one_verbs_rail_reads_what_was_put() {
  read_over 0
  railfs umount $work/m
  stop_serving
}

i1_two_verbs_rails_share_a_read() {
  read_over 0 1
  local one two
  read -r one two <<<"$(received)"
  ((one + two >= 64 << 20 && one > (one + two) / 4 && two > (one + two) / 4))
  for device in rxe0c rxe1c; do
    grep -H . /sys/class/infiniband/$device/ports/1/hw_counters/rcvd_pkts
  done
  railfs umount $work/m
  stop_serving
}

# Link down in the middle of a read: the other rail serves it. Up again: new queue pairs, and bytes.
i10_a_rail_that_goes_down_costs_no_read_and_comes_back() {
  read_over 0 1
  (for _ in 1 2 3; do dd if=$work/m/file iflag=direct bs=1M status=none | cmp - $work/file || exit 1; done) &
  local reader=$! before
  ip link set rail1s down
  wait $reader
  within 30 a_rail_is_down
  ip link set rail1s up
  within 60 not a_rail_is_down
  before=$(received | cut -d" " -f2)
  dd if=$work/m/file iflag=direct bs=1M status=none | cmp - $work/file
  within 10 eval '(($(received | cut -d" " -f2) > before))'
  railfs umount $work/m
  stop_serving
}

# Figures of one run side by side; nothing is demanded of them, an emulated machine says little.
throughput_beside_ib_write_bw() {
  ib_write_bw -d rxe0s -x 1 -s 1048576 -n 100 >/dev/null &
  within 20 eval 'ss -ltn | grep -q :18515'
  ib_write_bw -d rxe0c -x 1 -s 1048576 -n 100 10.9.0.1 | grep 1048576
  wait $!
  for rails in "0" "0 1"; do
    # shellcheck disable=SC2086
    rdma_store /mnt/disk/store $rails
    serve /mnt/disk/store
    # Its limit of connecting may be too short for a busy, emulated machine.
  within 120 railfs put $work/file railfs://10.9.0.1/lab/file
    railfs mount railfs://10.9.0.1/lab/ $work/m -o arena=32MiB,require_rdma,connect_timeout=30s,read_timeout=60s
    for round in 1 2 3; do
      say "rails $rails, round $round: $(dd if=$work/m/file of=/dev/null iflag=direct bs=1M 2>&1 | tail -n 1)"
    done
    railfs umount $work/m
    stop_serving
  done
}

i11_rdma_that_is_required_and_not_there_is_refused() {
  store /mnt/disk/tcp 10.9.0.1
  serve /mnt/disk/tcp
  not railfs mount railfs://10.9.0.1/lab/ $work/m -o require_rdma 2>$work/refused
  grep "RDMA is required" $work/refused
  stop_serving
  sed -i '1i require_rdma = true' /mnt/disk/tcp/railfsd.toml
  printf '[[rail]]\ntransport = "rdma"\nlisten = "10.9.0.77"\n' >>/mnt/disk/tcp/railfsd.toml
  not railfsd serve --config /mnt/disk/tcp/railfsd.toml 2>$work/refused
  grep "10.9.0.77" $work/refused
}

head -c $((64 << 20)) /dev/urandom >$work/file
try verbs_conformance verbs_conformance
try i4_fences i4_fences
try i1_one_verbs_rail_reads_what_was_put i1_one_verbs_rail_reads_what_was_put
try i1_two_verbs_rails_share_a_read i1_two_verbs_rails_share_a_read
try i10_a_rail_that_goes_down_costs_no_read_and_comes_back i10_a_rail_that_goes_down_costs_no_read_and_comes_back
try i11_rdma_that_is_required_and_not_there_is_refused i11_rdma_that_is_required_and_not_there_is_refused
try throughput_beside_ib_write_bw throughput_beside_ib_write_bw
cat "$LAB_OUT/throughput_beside_ib_write_bw.log"
status_of_cases

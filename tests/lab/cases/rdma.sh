#!/usr/bin/env bash
# One guest: rails of queue pairs over Soft-RoCE devices, by themselves and under a mount. RAILFS_LAB_ALL=1: all cases;
# RAILFS_FULL=1: 50,000 checks and an object of 256 MiB, too.
# shellcheck shell=bash disable=SC2317,SC2034,SC2154,SC2086,SC2016
. "$LAB_DIR/cases/lib.sh"
. "$LAB_DIR/cases/rdma_lib.sh"
server_address=10.9.0.1
control='"10.9.0.1"'
url=railfs://10.9.0.1/lab
device_end=s
store=/mnt/disk/store
export RAILFS_VERBS_DEVICES=rxe0c,10.9.0.2,rxe0s,10.9.0.1

# What every rail promises, over two devices with the wire between.
verbs_conformance() {
  local failed=0
  "$RAILFS_BIN_DIR/rail_conformance" verbs_on_real_devices --exact --nocapture || failed=1
  # The second number of each processor: packets that found no room.
  ((failed == 0)) || cat /proc/net/softnet_stat
  ((failed == 0))
}

# A WRITE that comes late: damage without a fence, none with each of them. On a slow wire, too.
i4_fences() {
  local failed=0
  # Twenty rounds of each, also where sizes are to be the full ones.
  unset RAILFS_FULL
  "$RAILFS_BIN_DIR/railfs_engine" i4_a_late_write_does --nocapture
  tc qdisc add dev rail0s root netem delay 120ms
  RAILFS_VERBS_SLOW=1 "$RAILFS_BIN_DIR/railfs_engine" i4_a_write_that_is_long --nocapture || failed=1
  tc qdisc del dev rail0s root
  ((failed == 0))
}

# The same of a whole rail, whose server is made slow; and servers that keep to no protocol.
i4_late_and_lying_servers() {
  unset RAILFS_FULL
  RAILFS_TEST_VERBS='bare=unfenced;soon=late:250;later=late:900' \
    "$RAILFS_BIN_DIR/rail_conformance" late_and_lying_servers_over_verbs --exact --nocapture
  within 10 as_at_first
}

a_store_is_filled() {
  mkdir -p $store/d0 $store/d1
  railfsd init $store/d0 $store/d1
  rails $store
  serve $store
  local file
  for file in "${files[@]}"; do within 120 railfs put --quiet $work/"$file" $url/"$file"; done
  find $store/d0/components $store/d1/components -name "$(railfs stat --json $url/small | jq -r .version).0" >$work/component
  [[ -s $work/component ]]
  stop_serving
}

# packets DEVICE: that it has received.
packets() { cat /sys/class/infiniband/"$1"/ports/1/hw_counters/rcvd_pkts; }

i1_one_verbs_rail_reads_what_was_put() {
  all_gone
  rails $store 0
  serve $store
  mount_rails 1
  local file before other
  before=$(packets rxe0c) other=$(packets rxe1c)
  for file in "${files[@]:2}"; do right "$file"; done
  say "rxe0c received $(($(packets rxe0c) - before)) packets, rxe1c $(($(packets rxe1c) - other))"
  # Packets carry 4096 bytes at most; the large file alone takes so many.
  (($(packets rxe0c) - before >= $(stat -c %s $work/large) / 4096))
  (($(packets rxe1c) - other < 100))
  quiet 1
  railfs status $mountpoint
  all_gone
}

# Server and mount of the cases that follow: two rails, all well.
two_rails() {
  if grep -q f1 $store/railfsd.toml && usable 2 >/dev/null 2>&1 && [[ -e $work/server ]] && kill -0 "$(cat $work/server)" && right small; then
    quiet 2 && return
  fi
  rails $store 0 1
  serve $store
  mount_rails 2
}

i1_two_verbs_rails_share_a_read() {
  two_rails
  local file zero one
  zero=$(packets rxe0c) one=$(packets rxe1c)
  for file in "${files[@]:2}"; do right "$file"; done
  zero=$(($(packets rxe0c) - zero)) one=$(($(packets rxe1c) - one))
  say "packets received: rxe0c $zero, rxe1c $one; bytes by rail: $(received)"
  # About half each, by what the devices counted and by what the mount did.
  ((zero + one >= $(stat -c %s $work/large) / 4096))
  ((zero * 100 >= (zero + one) * 30 && one * 100 >= (zero + one) * 30))
  read -r zero one <<<"$(received)"
  ((zero * 100 >= (zero + one) * 30 && one * 100 >= (zero + one) * 30))
  quiet 2
}

# Readers that are killed in the middle: nothing of theirs is left, and the next read is right.
i4_readers_that_are_killed_leave_nothing_behind() {
  two_rails
  local pid before
  for _ in 1 2 3; do
    before=$(status | jq .counters.bytes_landed)
    dd if=$mountpoint/large iflag=direct bs=1M of=/dev/null status=none &
    pid=$!
    within 30 eval "((\$(status | jq .counters.bytes_landed) > $before))"
    kill -9 $pid
    wait $pid || true
  done
  right small
  quiet 2
}

# Link down in the middle of a read: the other rail serves it. Up again: new queue pairs, and bytes.
i10_a_rail_that_goes_down_costs_no_read_and_comes_back() {
  two_rails
  local before connects reader
  connects=$(connects 1)
  reading middle
  ip link set rail1s down
  # By the device's own event, not by what times out later.
  within 5 told "port 1 went down"
  within 30 eval 'status | jq -e ".rails[1].state | IN(\"down\", \"connecting\")"'
  goes_on
  done_reading
  ip link set rail1s up
  within 60 usable 2
  before=$(received | cut -d" " -f2)
  within 30 eval "right middle && ((\$(received | cut -d' ' -f2) > $before))"
  (($(connects 1) > connects))
  quiet 2
}

# The address that a rail is made from is taken from its device while it is read: the rail ends at once, and comes back with it.
i10_a_rail_whose_address_goes_costs_no_read_and_comes_back() {
  two_rails
  local connects reader
  connects=$(connects 1)
  reading middle
  ip address del 10.9.1.2/24 dev rail1c
  within 5 told "port 1 has no RoCE v2 GID of 10.9.1.2"
  goes_on
  ip address add 10.9.1.2/24 dev rail1c
  within 60 usable 2
  done_reading
  within 30 eval '(($(connects 1) > connects))'
  quiet 2
}

# A device that is taken away in the middle of a read is let go, though Soft-RoCE says nothing of it: the client's, then the
# server's. Once it is there again its rail comes back by itself.
i10_a_device_that_is_taken_away_is_let_go_and_comes_back() {
  local end connects reader
  for end in c s; do
    two_rails
    connects=$(connects 1)
    reading middle
    timeout 60 rdma link delete rxe1$end
    goes_on
    rdma link add rxe1$end type rxe netdev rail1$end
    within 90 usable 2
    done_reading
    (($(connects 1) > connects))
    quiet 2
  done
}

# Packets of verbs are dropped, and TCP is not: such a rail is never called up, and says what to look at.
i10_a_rail_whose_packets_are_dropped_is_not_up_and_says_so() {
  two_rails
  unmount
  nft add table inet lab
  nft add chain inet lab input '{ type filter hook input priority 0; }'
  nft add rule inet lab input iifname rail1s udp dport 4791 drop
  railfs mount "$url/" $mountpoint -o "$patience,log=$work/mount.log,arena=16MiB,readahead=4MiB"
  within 60 eval 'status | jq -e ".rails[1].reason | test(\"port 4791\")"'
  right middle
  up 1
  (($(connects 1) == 0))
  nft delete table inet lab
  within 60 usable 2
  right middle
  within 60 up 2
}

# The second way, without windows, on a device that has them: the same bytes, through a rail that fails as well.
i1_the_whole_arena_opened_reads_what_was_put() {
  all_gone
  rails $store 0 1
  serve $store
  mount_rails 2 "arena=16MiB,readahead=4MiB,rdma_opening=arena"
  local file reader connects
  for file in "${files[@]}"; do right "$file"; done
  connects=$(connects 1)
  reading middle
  status | jq -e '.counters.rdma_windows_now == 0'
  ip link set rail1s down
  goes_on
  ip link set rail1s up
  within 60 usable 2
  done_reading
  right middle
  (($(connects 1) > connects))
  quiet 2
  all_gone
}

# A counter of the server, by name.
counter() { railfs status $url/ --json | jq ".server.counters.$1"; }

# What is put is READ from the client's memory, all of it; what is fetched twice is read from the disk once.
i1_i4_a_put_is_read_from_the_clients_memory() {
  all_gone
  rails $store 0
  serve $store
  within 120 railfs put --quiet $work/large $url/again
  say "pulled $(counter pull_bytes), of which by READ $(counter rdma_read_bytes)"
  (($(counter rdma_read_bytes) >= $(stat -c %s $work/large)))
  (($(counter rdma_read_bytes) >= $(counter pull_bytes)))
  # Killed in the middle: the server's landings come back, and the next put succeeds.
  local putter before
  before=$(counter rdma_read_bytes)
  railfs put --quiet $work/large $url/killed &
  putter=$!
  within 60 eval "((\$(counter rdma_read_bytes) > $before))"
  kill -9 $putter
  wait $putter || true
  within 120 railfs put --quiet $work/middle $url/after
  within 60 eval 'railfs status $url/ --json | jq -e ".server.memory_used_bytes == 0 and .server.puts == 0"'
  for _ in 1 2; do
    rm -f $work/back
    railfs get --quiet $url/after $work/back
    cmp $work/middle $work/back
  done
  say "slab: $(railfs status $url/ --json | jq -c '.server.counters | with_entries(select(.key | startswith("slab")))')"
  (($(counter slab_hits) > 0 && $(counter slab_misses) > 0 && $(counter slab_refused) == 0))
  (($(counter slab_io_uring) == 1 && $(counter slab_reads_direct) > 0 && $(counter slab_reads_buffered) == 0))
  all_gone
}

# The wire swallows what one rail's server sends: its WRITEs are never completed with success, its connection ends by its
# time-outs, and the other rail serves.
i10_a_server_whose_writes_time_out_costs_no_read() {
  two_rails
  local connects reader
  connects=$(connects 0)
  reading middle
  trap 'tc qdisc del dev rail0s root 2>/dev/null || true' EXIT
  tc qdisc add dev rail0s root netem loss 100%
  within 30 eval 'status | jq -e ".rails[0].state != \"up\""'
  goes_on
  tc qdisc del dev rail0s root
  within 60 usable 2
  done_reading
  right middle
  (($(connects 0) > connects))
  quiet 2
}

# A listener that is advertised and dead, for its device has lost the address: the mount does without, and takes it when it lives.
i10_a_dead_listener_is_done_without() {
  two_rails
  unmount
  ip address del 10.9.1.1/24 dev rail1s
  local mounted=0
  railfs mount "$url/" $mountpoint -o $patience,arena=16MiB,readahead=4MiB || mounted=1
  ((mounted != 0)) || { within 30 usable 1 && right small; } || mounted=1
  status | jq -r '.rails[] | .name + " " + .state + " " + .reason'
  ip address add 10.9.1.1/24 dev rail1s
  ((mounted == 0))
  within 60 usable 2
  right middle
  quiet 2
}

# flip OFFSET: one bit of the small object's first component, from where its data begin.
flip() {
  local file byte
  file=$(cat $work/component)
  byte=$(od -An -tu1 -j $((4096 + $1)) -N 1 "$file")
  printf "\\x$(printf %x $((byte ^ 16)))" | dd of="$file" bs=1 seek=$((4096 + $1)) conv=notrunc status=none
  sync
  echo 3 >/proc/sys/vm/drop_caches
}

# A stripe that is damaged on disk: an error and not a wrong byte; mended: bytes again.
i2_a_damaged_stripe_is_an_error_until_it_is_mended() {
  two_rails
  all_gone
  serve $store
  flip 70000
  # Whatever becomes of this: other cases read it, too.
  trap 'flip 70000' EXIT
  mount_rails 2
  not dd if=$mountpoint/small iflag=direct bs=1M count=1 of=/dev/null status=none 2>$work/error
  grep -i "input/output error" $work/error
  # A guest has no /dev/fd for bash to substitute a process by.
  tail -c +1048577 $work/small >$work/rest
  dd if=$mountpoint/small iflag=direct bs=1M skip=1 status=none | cmp - $work/rest
  trap - EXIT
  flip 70000
  within 30 right small
  right middle
  quiet 2
}

# The server of one rail holds its WRITEs back for longer than the client waits for one rail; they come, and reach nobody.
i10_a_write_that_outlives_its_request_costs_no_read() {
  all_gone
  rails $store 0 1
  serve $store RAILFS_TEST_VERBS=rail0=late:6000
  mount_rails 2
  right small
  # They come now: the rail goes, for it may not write any more, and comes back.
  within 60 eval '(($(connects 0) > 1))'
  within 60 usable 2
  right small
  say "connects of the slow rail: $(connects 0), of the other one: $(connects 1)"
  status | jq -e '.counters.reads_failed == 0 and .counters.bad_pages == 0'
  within 120 eval "usable 2 && settled 2"
  all_gone
}

# Slots that stay registered after their server is gone, while a successor publishes.
i3_devices_are_not_believed_for_a_server_that_is_gone() {
  "$RAILFS_BIN_DIR/rail_conformance" i3_real_devices --nocapture
}

count() { status | jq ".counters.$1"; }
count_of_server() { status | jq ".server.counters.$1"; }

# pings RAIL: keepalives of the mount on it.
pings() { status | jq ".rails[$1].pings"; }

# warm NUMBER: so many reads of 4 KiB of a cached page, and how long they took.
warm() {
  python3 - "$mountpoint/small" "$1" <<'END'
import os, sys, time
fd = os.open(sys.argv[1], os.O_RDONLY)
want = os.pread(fd, 4096, 0)
times = []
for _ in range(int(sys.argv[2])):
    began = time.perf_counter()
    got = os.pread(fd, 4096, 0)
    times.append(time.perf_counter() - began)
    assert got == want
times.sort()
median, most = times[len(times) // 2] * 1e6, times[len(times) * 9 // 10] * 1e6
print(f"{median:.0f} us median, nine in ten within {most:.0f} us, {sum(times):.1f} s in all")
END
}

# checked WAY: mounts with this way of checking.
checked() { mount_rails 1 "arena=16MiB,readahead=0,io=direct,check=$1"; }

# During so many checks by READ the server answers no check; what else moves is bounded by time.
i3_checks_by_read_do_not_move_the_servers_counter() {
  local number=5000 reads checks renewals pings began took round undisturbed=0
  [[ -z ${RAILFS_FULL:-} ]] || number=50000
  rails $store 0
  serve $store
  checked read
  # Where this machine stands still for longer than a lease, a frame takes it anew: so it may be tried three times.
  for round in 1 2 3; do
    # Others that read keep the lease while the counters are looked at.
    warm 1000000 >/dev/null 2>&1 &
    local keeper=$!
    within 30 eval '(($(count check_reads) > 100))'
    began=$SECONDS
    reads=$(count check_reads) renewals=$(count_of_server lease_renewals) checks=$(count_of_server checks) pings=$(pings 0)
    say "$number warm reads: $(warm "$number")"
    checks=$(($(count_of_server checks) - checks)) renewals=$(($(count_of_server lease_renewals) - renewals))
    reads=$(($(count check_reads) - reads)) pings=$(($(pings 0) - pings))
    took=$((SECONDS - began + 1))
    # The program itself, which has the file open, not only the shell that waits for it.
    pkill -P $keeper
    wait $keeper || true
    within 20 not pgrep -f $mountpoint/small
    say "by READ $reads, made again $(count check_reads_again), by frame $checks, renewals $renewals, keepalives $pings in $took s"
    # One in a third of a lease of 2 s.
    ((renewals <= took * 3 / 2 + 2))
    # On each of three connections three in a second at most.
    ((pings <= 9 * took + 9))
    ((checks > 0)) || { undisturbed=1 && break; }
  done
  ((undisturbed == 1 && reads >= number))
}

# Both ways in one run; nothing is demanded of the figures.
checks_both_ways_side_by_side() {
  local round way
  rails $store 0
  serve $store
  for round in 1 2 3; do
    for way in read frame auto; do
      checked $way
      warm 100 >/dev/null
      say "round $round, check=$way, warm reads of 4 KiB: $(warm 1000)"
    done
  done
}

# A successor of a server that was killed publishes nothing for 1.25 leases and a second.
i3_the_successor_of_a_killed_server_waits_out_the_lease() {
  local began took
  rails $store 0
  serve $store
  checked read
  warm 200
  kill -9 "$(cat $work/server)"
  within 20 not kill -0 "$(cat $work/server)"
  began=$(date +%s%N)
  serve $store
  within 120 railfs put $work/small $url/newer
  took=$((($(date +%s%N) - began) / 1000000))
  say "the put was visible $took ms after the start"
  ((took >= 3500))
  within 120 right small
  all_gone
}

i11_rdma_that_is_required_and_not_there_is_refused() {
  all_gone
  rails $store
  serve $store
  not railfs mount $url/ $mountpoint -o require_rdma 2>$work/refused
  grep "RDMA is required" $work/refused
  stop_serving
  sed -i '1i require_rdma = true' $store/railfsd.toml
  printf '[[rail]]\ntransport = "rdma"\nlisten = "10.9.0.77"\n' >>$store/railfsd.toml
  not railfsd serve --config $store/railfsd.toml 2>$work/refused
  grep "10.9.0.77" $work/refused
}

# The middle one is larger than the arena of a mount: it comes over the rails each time.
files=(small middle large)
head -c $((4 << 20)) /dev/urandom >$work/small
head -c $((20 << 20)) /dev/urandom >$work/middle
head -c $((64 << 20)) /dev/urandom >$work/large
if [[ -n ${RAILFS_FULL:-} ]]; then
  files+=(huge)
  head -c $((256 << 20)) /dev/urandom >$work/huge
fi
resources >$work/resources
cases=(verbs_conformance i4_fences a_store_is_filled i1_two_verbs_rails_share_a_read
  i10_a_rail_that_goes_down_costs_no_read_and_comes_back i2_a_damaged_stripe_is_an_error_until_it_is_mended
  i11_rdma_that_is_required_and_not_there_is_refused)
# Guests are slow: what `make test` leaves to `make test-rdma`.
if [[ -n ${RAILFS_LAB_ALL:-}${RAILFS_FULL:-}${RAILFS_LAB_CASES:-} ]]; then
  cases+=(i1_one_verbs_rail_reads_what_was_put i1_i4_a_put_is_read_from_the_clients_memory
    i4_readers_that_are_killed_leave_nothing_behind i10_a_write_that_outlives_its_request_costs_no_read
    i10_a_server_whose_writes_time_out_costs_no_read i10_a_rail_whose_address_goes_costs_no_read_and_comes_back
    i10_a_device_that_is_taken_away_is_let_go_and_comes_back i10_a_rail_whose_packets_are_dropped_is_not_up_and_says_so
    i1_the_whole_arena_opened_reads_what_was_put i10_a_dead_listener_is_done_without
    i3_devices_are_not_believed_for_a_server_that_is_gone i3_checks_by_read_do_not_move_the_servers_counter
    i3_the_successor_of_a_killed_server_waits_out_the_lease checks_both_ways_side_by_side)
fi
for name in "${cases[@]}"; do try "$name" "$name"; done
if [[ -n ${RAILFS_LAB_ALL:-}${RAILFS_FULL:-}${RAILFS_LAB_CASES:-} ]]; then
  # shellcheck source=/dev/null
  . "$LAB_DIR/cases/rdma-limits.sh"
  # Last: a key that is taken away twice is the end of this kernel (Soft-RoCE of Linux 6.1).
  try i4_late_and_lying_servers i4_late_and_lying_servers
fi
status_of_cases

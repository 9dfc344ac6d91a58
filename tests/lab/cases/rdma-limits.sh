#!/usr/bin/env bash
# What may be registered, with CAP_IPC_LOCK dropped: refused at the start with what is needed, or used as far as it goes. Sourced by
# rdma.sh, after its functions; its store is filled.
# shellcheck shell=bash disable=SC2317,SC2154,SC2086

# limited KIB COMMAND...: without CAP_IPC_LOCK, under this memlock limit.
limited() {
  local kib=$1
  shift
  (
    ulimit -l "$kib"
    exec setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock "$@"
  )
}

# refused KIB OPTIONS: a mount that must not start, and says why.
refused() {
  local kib=$1 status=0
  limited "$kib" railfs mount $url/ $mountpoint -o "$2" >$work/refused 2>&1 || status=$?
  cat $work/refused
  [[ $status == 2 ]]
  grep -q "registered memory .*arena" $work/refused
  grep -q "four fifths of the memlock limit" $work/refused
  grep -q "LimitMEMLOCK=.*limits.d" $work/refused
  not mountpoint -q $mountpoint
}

i6_memlock_too_little_is_refused_at_the_start() {
  all_gone
  rails $store 0
  serve $store
  refused 64 "arena=32MiB,$patience"
  refused 8192 "arena=32MiB,$patience"
  # Also where RDMA is not demanded; and the way out that the message names.
  refused 8192 "arena=32MiB,connect_timeout=60s"
  grep -q no_rdma $work/refused
  # Raised, it starts, and says what it registers.
  limited 65536 railfs mount $url/ $mountpoint -o "arena=32MiB,$patience,log=$work/mount.log"
  right small
  grep "registered memory .*rxe0c: arena 32 MiB.*of the memlock limit of 64 MiB" $work/mount.log
  unmount
  # root's capability lifts the limit, which is said.
  (
    ulimit -l 64
    exec railfs mount $url/ $mountpoint -o "arena=32MiB,$patience,log=$work/lifted.log"
  )
  grep "does not apply (CAP_IPC_LOCK)" $work/lifted.log
  all_gone
  # The server's half.
  local status=0
  limited 8192 railfsd serve --config $store/railfsd.toml 2>$work/refused || status=$?
  cat $work/refused
  [[ $status == 2 ]]
  grep "registered memory .*rxe0s.*four fifths of the memlock limit of 8 MiB.*LimitMEMLOCK" $work/refused
}

i6_four_reads_where_memlock_has_room_for_two() {
  all_gone
  rails $store 0
  serve $store
  export RAILFS_MEMLOCK_STORE=10.9.0.1:7420
  # 4 MiB of arena: two large reads at once, and the part that is left to small ones.
  RAILFS_MEMLOCK_ROOM=two limited 7168 "$RAILFS_BIN_DIR/railfs_engine" memlock_tests --nocapture
  RAILFS_MEMLOCK_ROOM=all limited 32768 "$RAILFS_BIN_DIR/railfs_engine" memlock_tests --nocapture
  all_gone
}

# Rails named by hand, to a server that announces none.
i12_rails_by_hand_reach_a_server_that_announces_none() {
  all_gone
  rails $store 0 1
  sed -i 's/^device = /announce = false\n&/' $store/railfsd.toml
  serve $store
  not railfs mount $url/ $mountpoint -o require_rdma 2>$work/refused
  grep "announces no rails.*-o rails=" $work/refused
  mount_rails 2 "arena=16MiB,rails=rxe0c@10.9.0.2~10.9.0.1+rxe1c~10.9.1.1"
  right small
  all_gone
}

# What the lab's devices really show, as the tables of the unit tests have it: an address is there as a GID of RoCE v2.
devices_as_they_are() {
  local gid value of found=0
  # One command for a thousand files: each start of one takes an emulated machine long.
  grep -Hv '^0000:0000:0000:0000:0000:0000:0000:0000$' /sys/class/infiniband/*/ports/*/gids/* >$work/gids
  while IFS=: read -r gid value; do
    of="$value $(cat "${gid/gids/gid_attrs/types}" 2>/dev/null)"
    say "$gid $of $(cat "${gid/gids/gid_attrs/ndevs}" 2>/dev/null)"
    [[ $gid != */rxe0c/* || $of != "0000:0000:0000:0000:0000:ffff:0a09:0002 RoCE v2" ]] || found=1
  done <$work/gids
  ((found == 1))
}

try devices_as_they_are devices_as_they_are
try i6_memlock_too_little_is_refused_at_the_start i6_memlock_too_little_is_refused_at_the_start
try i6_four_reads_where_memlock_has_room_for_two i6_four_reads_where_memlock_has_room_for_two
try i12_rails_by_hand_reach_a_server_that_announces_none i12_rails_by_hand_reach_a_server_that_announces_none
cat "$LAB_OUT/devices_as_they_are.log" 2>/dev/null || true

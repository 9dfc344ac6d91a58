# For the cases of verbs rails: a store over Soft-RoCE devices, its server and a mount, and what must be as before when all is
# over. Sourced after lib.sh.
# shellcheck shell=bash disable=SC2034,SC2154
work=/dev/shm/work
mountpoint=$work/m
mkdir -p $mountpoint
# What is registered is charged to this; the guest's own limit is 8 MiB. root lifts it by CAP_IPC_LOCK.
ulimit -l unlimited

# rails DIRECTORY [RAIL...]: the configuration of a store there: its rails are the devices $rail_device of 10.9.RAIL.1; without a
# rail it serves over TCP. The control plane is on $control.
rails() {
  local directory=$1 rail
  shift
  {
    printf 'node = "lab"\nstate_dir = "%s/state"\nstripe_dirs = ["%s/d0", "%s/d1"]\n' "$directory" "$directory" "$directory"
    (($# == 0)) || echo 'require_rdma = true'
    printf '[control]\nlisten = %s\n[security]\ninsecure = true\n[memory]\nmax_registered = "64 MiB"\n' "$control"
    (($# > 0)) || printf '[[rail]]\nlisten = "%s"\n' "$server_address"
    for rail in "$@"; do
      printf '[[rail]]\nfabric = "f%s"\ntransport = "rdma"\nlisten = "10.9.%s.1"\ndevice = "rxe%s%s"\n' \
        "$rail" "$rail" "$rail" "$device_end"
    done
  } >"$directory/railfsd.toml"
}

# serve DIRECTORY [VARIABLE=VALUE...]: with these variables, instead of the server (and under the mount) that runs.
serve() {
  local directory=$1
  shift
  stop_serving
  : >$work/ready
  env "$@" railfsd serve --config "$directory/railfsd.toml" >$work/ready 2>>"$LAB_OUT/railfsd.log" &
  echo $! >$work/server
  within 60 grep -q ready $work/ready || { tail -n 20 "$LAB_OUT/railfsd.log"; return 1; }
}

stop_serving() {
  if [[ -e $work/server ]] && kill "$(cat $work/server)" 2>/dev/null; then
    within 20 not kill -0 "$(cat $work/server)" || kill -9 "$(cat $work/server)"
  fi
  rm -f $work/server
}

unmount() { if grep -q " $mountpoint " /proc/self/mountinfo; then railfs umount $mountpoint || railfs umount --lazy $mountpoint; fi; }

# mount_rails COUNT [OPTIONS]: mounts, and waits until so many rails are up, all of them RDMA. An emulated machine takes its time.
patience=require_rdma,connect_timeout=60s,read_timeout=120s
mount_rails() {
  unmount
  rm -f $work/mount.log
  railfs mount "$url/" $mountpoint -o "$patience,log=$work/mount.log,${2:-arena=16MiB,readahead=4MiB}"
  within 60 up "$1"
  pinned_there >$work/pinned
}

# What the server has registered, and how much of it is pinned.
pinned_there() { status | jq -c '.server.counters | [.rdma_regions_now, .rdma_pinned_bytes_now]'; }

status() { railfs status $mountpoint --json; }
up() { status | jq -e "[.rails[] | select(.state == \"up\" and .transport == \"rdma\")] | length == $1"; }
usable() { status | jq -e "[.rails[] | select(.state == \"up\" or .state == \"probing\")] | length == $1"; }
received() { status | jq -r '[.rails[].bytes_received] | join(" ")'; }
connects() { status | jq -r ".rails[$1].connects"; }

# right FILE: the mounted file of that name is the local one of that name, read around the kernel's cache.
right() { timeout 120 dd if=$mountpoint/"$1" iflag=direct bs=1M status=none | cmp - $work/"$1"; }

# reading FILE: begins to read that file again and again, in the background. done_reading: until now; each time it was right.
reading() {
  local before
  rm -f $work/enough
  before=$(status | jq .counters.bytes_landed)
  (
    while [[ ! -e $work/enough ]]; do right "$1" || exit 1; done
  ) >$work/reader 2>&1 &
  reader=$!
  landing "$before"
}
# landing BEFORE: a megabyte and more has come since so many bytes.
landing() { within 60 eval "((\$(status | jq .counters.bytes_landed) > $1 + 1000000))"; }
# It goes on, whatever has just happened to it.
goes_on() {
  kill -0 "$reader"
  landing "$(status | jq .counters.bytes_landed)"
  kill -0 "$reader"
}
done_reading() {
  touch $work/enough
  wait "$reader" || {
    cat $work/reader
    return 1
  }
}
# told PATTERN: the mount's log says so.
told() { grep -E -- "$1" $work/mount.log; }

# What the kernel has of devices: queue pairs, registrations and so on, whatever their numbers.
resources() { rdma resource show | tr -s ' ' | sed 's/^[0-9]*: //' | sort; }
as_at_first() { [[ $(resources) == "$(cat $work/resources)" ]]; }

# Nothing in flight and no memory held, on either side; queue pairs, registrations and pinned bytes as for so many rails that
# were just made. Windows are kept to be bound again: no more of them than each rail may make (none is left when all is gone).
settled() {
  [[ $(pinned_there) == "$(cat $work/pinned)" ]] && status | jq -e "(.rails | all(.in_flight == 0 and .held_bytes == 0 and .state == \"up\"))
    and .arena.exposed == 0 and .arena.quarantined == 0
    and .counters.rdma_queue_pairs_now == 3 * $1 and .counters.rdma_regions_now == 2 * $1
    and .counters.rdma_windows_now <= (2 * 64 + 2) * $1
    and .counters.rdma_pinned_bytes_now == $1 * (16 * 1048576 + 3 * 2 * 64 * 4096 + 2048)
    and .server.counters.rdma_queue_pairs_now == 3 * $1 and .server.counters.rdma_windows_now == 0"
}

quiet() { within 60 settled "$1"; }

# all_gone: ends mount and server; every queue pair, registration and domain must be gone.
all_gone() {
  unmount
  stop_serving
  within 30 as_at_first
}

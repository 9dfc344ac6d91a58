#!/usr/bin/env bash
# One guest, for `make bench-rdma`: two servers with the same objects, one with one verbs rail, the other with two; a mount of
# each, and the benchmark over all of it.
# shellcheck shell=bash disable=SC2317,SC2034,SC2154,SC2086,SC2016
. "$LAB_DIR/cases/lib.sh"
. "$LAB_DIR/cases/rdma_lib.sh"
server_address=10.9.0.1
device_end=s
set -e
words=()
for count in 1 2; do
  store=/mnt/disk/store$count
  port=$((7420 + 100 * count))
  url=railfs://10.9.0.1:$port/bench
  control='"10.9.0.1:'$port'"'
  mkdir -p $store/d0 $store/d1 $work/m$count
  railfsd init $store/d0 $store/d1 >/dev/null
  # Put over TCP; the rails come afterwards.
  rails $store
  : >$work/ready
  railfsd serve --config $store/railfsd.toml >$work/ready 2>$LAB_OUT/railfsd$count.log &
  server=$!
  within 60 grep -q ready $work/ready
  for size in 64 128 256; do head -c $((size << 20)) /dev/zero | tr '\0' "$count" | railfs put --quiet - $url/$size; done
  kill $server
  wait $server || true
  rails $store $(seq 0 $((count - 1)))
  : >$work/ready
  railfsd serve --config $store/railfsd.toml >$work/ready 2>>$LAB_OUT/railfsd$count.log &
  server=$!
  within 60 grep -q ready $work/ready
  mountpoint=$work/m$count
  mount_rails $count arena=32MiB,readahead=16MiB
  words+=("10.9.0.1:$port" $mountpoint "$(status | jq .mount.pid)" $server)
done
railfs-bench rdma "${words[@]}" "${RAILFS_BENCH_ROUNDS:-5}" | tee $LAB_OUT/table

#!/usr/bin/env bash
# Two guests: a server and a client on two hosts, and rails that are links of their own.
# shellcheck shell=bash disable=SC2317
. "$LAB_DIR/cases/lib.sh"
work=/dev/shm/work
mkdir -p $work/m
url=railfs://10.9.9.1/lab

if [[ $LAB_ROLE == server ]]; then
  # Serves until the client says that it has seen enough, by an object.
  store /dev/shm/store 10.9.9.1 10.9.0.1 10.9.1.1
  # The third network is for the control plane alone.
  sed -i '/^\[\[rail\]\]$/{N;N;/"f0"/d}' /dev/shm/store/railfsd.toml
  railfsd serve --config /dev/shm/store/railfsd.toml >"$LAB_OUT/railfsd.log" 2>&1 &
  server=$!
  within 240 railfs stat $url/done
  kill $server
  wait $server
  exit
fi

two_hosts_read_over_both_rails() {
  within 60 eval 'exec 3<>/dev/tcp/10.9.9.1/7420'
  head -c 8000001 /dev/urandom >$work/file
  railfs put $work/file $url/file
  railfs mount $url/ $work/m -o arena=16MiB,readahead=2MiB
  cmp $work/file $work/m/file
  railfs status $work/m --json >$work/status
  jq -e '[.rails[] | select(.bytes_received > 500000)] | length == 2' $work/status
}

s28_a_cable_pulled_in_mid_read_and_back() {
  ip link set eth1 down
  timeout 60 cmp $work/file $work/m/file
  within 30 eval "railfs status $work/m --json | jq -e '[.rails[] | select(.state == \"up\")] | length == 1'"
  ip link set eth1 up
  within 30 eval "railfs status $work/m --json | jq -e '[.rails[] | select(.state == \"up\")] | length == 2'"
  timeout 60 cmp $work/file $work/m/file
}

try two_hosts_read_over_both_rails two_hosts_read_over_both_rails
try s28_a_cable_pulled_in_mid_read_and_back s28_a_cable_pulled_in_mid_read_and_back
railfs umount $work/m || true
railfs put /etc/hostname $url/done
status_of_cases

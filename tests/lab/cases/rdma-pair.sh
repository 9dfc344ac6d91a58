#!/usr/bin/env bash
# Two guests: a server and a client on two hosts, joined by verbs rails. Links that go, a server that is killed or stopped.
# shellcheck shell=bash disable=SC2317,SC2034,SC2154,SC2086,SC2016
. "$LAB_DIR/cases/lib.sh"
. "$LAB_DIR/cases/rdma_lib.sh"
server_address=10.9.9.1
control='["10.9.0.1", "10.9.1.1", "10.9.9.1"]'
url=railfs://10.9.0.1/lab
device_end=
store=/dev/shm/store

if [[ $LAB_ROLE == server ]]; then
  [[ $# == 0 ]] || {
    set -eu
    "$@"
    exit
  }
  resources >$work/resources
  mkdir -p $store/d0 $store/d1
  railfsd init $store/d0 $store/d1
  rails $store
  serve $store || exit
  # Does what the client says, by these functions, until it says that it has seen enough.
  exec python3 - "$0" <<'PYTHON'
import socket, subprocess, sys
server = socket.create_server(("10.9.9.1", 9999))
while True:
    connection, _ = server.accept()
    words = connection.makefile().readline().split()
    if words:
        code = 0 if words == ["end"] else subprocess.run(["bash", sys.argv[1]] + words).returncode
        connection.sendall(b"%d\n" % code)
    connection.close()
    if words == ["end"]:
        sys.exit(0)
PYTHON
fi

# remote WORD...: the server's host runs it.
remote() {
  local code
  exec 3<>/dev/tcp/10.9.9.1/9999
  echo "$*" >&3
  read -r code <&3
  exec 3>&-
  return "$code"
}
there() { (: 3<>/dev/tcp/10.9.9.1/9999) 2>/dev/null; }

two_hosts_read_over_both_rails() {
  within 120 eval 'exec 3<>/dev/tcp/10.9.0.1/7420'
  local one two
  within 60 railfs put --quiet $work/large $url/large
  within 60 railfs put --quiet $work/small $url/small
  # That was over TCP; from now on it is not.
  remote rails $store 0 1
  remote serve $store
  mount_rails 2
  right large
  read -r one two <<<"$(received)"
  say "bytes by rail: $one $two"
  ((one * 100 >= (one + two) * 25 && two * 100 >= (one + two) * 25))
  quiet 2
}

# A rail's link goes in the middle of a read, and comes back: the rail has new queue pairs then.
link_goes() { # RAIL COMMAND-PREFIX...
  local rail=$1 connects reader
  shift
  connects=$(connects "$rail")
  reading large
  "$@" ip link set "eth$rail" down
  within 30 eval "status | jq -e '.rails[$rail].state | IN(\"down\", \"connecting\")'"
  goes_on
  "$@" ip link set "eth$rail" up
  within 60 usable 2
  done_reading
  right large
  (($(connects "$rail") > connects))
  quiet 2
}

s28_a_link_goes_in_mid_read_and_comes_back() { link_goes 1; }
# The control connection is on it.
s28_the_link_of_the_address_in_the_url_goes_and_comes_back() { link_goes 0; }
s28_the_link_goes_at_the_servers_end() { link_goes 1 remote; }

# ended: the reader through an outage has read everything, or was told that nobody answers; never wrong bytes.
ended() {
  touch $work/enough
  wait "$reader" || { cat $work/reader && grep -qi "timed out" $work/reader && not grep -q "differ" $work/reader; }
}

# A server that dies in the middle of a read, and another in its place.
i9_a_server_that_was_killed_is_read_from_again_without_a_remount() {
  local reader
  reading large
  kill -0 $reader
  remote eval 'kill -9 $(cat /dev/shm/work/server)'
  within 30 usable 0
  remote serve $store
  ended
  within 60 usable 2
  right large
  right small
  quiet 2
}

i9_a_server_that_was_stopped_is_read_from_again_without_a_remount() {
  local reader
  reading large
  kill -0 $reader
  remote eval 'kill -STOP $(cat /dev/shm/work/server)'
  within 30 usable 0
  remote eval 'kill -CONT $(cat /dev/shm/work/server)'
  ended
  within 60 usable 2
  right large
  quiet 2
}

when_all_is_over_nothing_is_left_on_either_host() {
  unmount
  remote stop_serving
  within 30 as_at_first
  remote within 30 as_at_first
}

head -c $((2 << 20)) /dev/urandom >$work/small
head -c $((24 << 20)) /dev/urandom >$work/large
resources >$work/resources
within 240 there
cases=(two_hosts_read_over_both_rails s28_a_link_goes_in_mid_read_and_comes_back
  s28_the_link_of_the_address_in_the_url_goes_and_comes_back s28_the_link_goes_at_the_servers_end
  i9_a_server_that_was_killed_is_read_from_again_without_a_remount
  i9_a_server_that_was_stopped_is_read_from_again_without_a_remount when_all_is_over_nothing_is_left_on_either_host)
for name in "${cases[@]}"; do try "$name" "$name"; done
remote end
status_of_cases

#!/usr/bin/env bash
# `make demo`: installs what is missing, builds railfs, and shows it at work on this machine (tests/bin/demo_steps.sh), in a
# network and a mount namespace of its own: a rail's address is taken away, which must not touch this machine's network.
#
# Guarantees: exit status 0 only if every step was verified; on success, failure and Ctrl-C no process, mount, file or
# namespace is left; only processes that were started here are ever signalled.
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH=$PATH:/usr/sbin:/sbin

fail() {
  echo "demo: $*" >&2
  exit 1
}

# Processes of this run, by the mark in their environment: what a step started is found however it was started.
ours() {
  local file pid
  for file in /proc/[0-9]*/environ; do
    pid=${file#/proc/}
    pid=${pid%/environ}
    if [[ $pid != "$$" && $pid != "$BASHPID" ]] && tr '\0' '\n' 2>/dev/null <"$file" | grep -qxF "RAILFS_DEMO=$work"; then
      echo "$pid"
    fi
  done 2>/dev/null
}

tests/bin/setup.sh demo
[[ -c /dev/fuse ]] || fail "/dev/fuse is not there: load the module (modprobe fuse), or give the container the device"
[[ -r /dev/fuse && -w /dev/fuse ]] || fail "this user may not open /dev/fuse: run the demo as root (elsewhere its mode is 0666)"

echo "demo: building (the first time takes a few minutes)"
cargo build --release --quiet -p railfs -p railfs-server --bins
programs=$(cargo metadata --format-version 1 --no-deps | jq -r .target_directory)/release

if [[ $(id -u) == 0 ]]; then
  alone=(unshare --net --mount)
else
  alone=(unshare --user --map-root-user --net --mount)
fi
if ! why=$("${alone[@]}" true 2>&1); then
  fail "this machine refuses a network and a mount namespace (${alone[*]}: $why). Run it as root, in a container with
      CAP_SYS_ADMIN; or allow users their own namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone,
      kernel.apparmor_restrict_unprivileged_userns)"
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/railfs-demo.XXXXXX")
steps=
clean() {
  local status=$? pid try
  trap '' INT TERM HUP
  # The steps clean up after themselves; whatever is left is ended here, by its number, and makes the demo fail.
  if [[ -n $steps ]] && kill -TERM "$steps" 2>/dev/null; then
    for ((try = 0; try < 150; try++)); do
      kill -0 "$steps" 2>/dev/null || break
      sleep 0.1
    done
  fi
  for pid in $(ours); do
    echo "demo: process $pid was left over: $(tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" || true)" >&2
    kill -KILL "$pid" 2>/dev/null || true
    status=1
  done
  if grep -qF " $work/" /proc/self/mountinfo; then
    echo "demo: a mount was left over below $work" >&2
    status=1
  fi
  # What was copied out of the mount has its modes: directories that may not be written to.
  chmod -R u+rwX "$work" 2>/dev/null || true
  rm -rf --one-file-system "$work" || status=1
  ((status == 0)) && echo "demo: every step was verified; no process, mount, file or namespace is left"
  exit "$status"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# In the background, so that a signal is acted upon at once; with no input, so that nothing waits for the terminal.
RAILFS_DEMO=$work PATH="$programs:$PATH" "${alone[@]}" bash tests/bin/demo_steps.sh "$PWD" "$work" </dev/null &
steps=$!
status=0
wait "$steps" || status=$?
steps=
((status == 0)) || fail "a step failed with status $status (above)"

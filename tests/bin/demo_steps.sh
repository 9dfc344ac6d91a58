#!/usr/bin/env bash
# The steps of `make demo`; tests/bin/demo.sh starts this in namespaces of its own. Prints a transcript: "$ command", then what
# it said. Each step is verified, the first that fails ends the demo with status 1.
set -euo pipefail
repository=$1
work=$2
cd "$work"

url=railfs://10.77.0.1/demo
size=$((256 << 20))
# Locks, sockets and logs of mounts: nothing outside the demo's own directory.
export RAILFS_RUNTIME_DIR=$work/run
server=
reader=

title() { printf '\n# %s\n' "$*"; }
fail() {
  echo "FAILED: $*" >&2
  exit 1
}
# Shows a command and what it says; its output is in $output. The status is the command's.
run() {
  local status=0
  printf '$ %s\n' "$1"
  output=$(eval "$1" 2>&1) || status=$?
  # What the shell itself says, without the place in this file.
  output=$(sed -E 's/^[^ ]*demo_steps\.sh: line [0-9]+: /bash: /' <<<"$output")
  [[ -z $output ]] || printf '%s\n' "$output"
  return "$status"
}
must() { run "$1" || fail "\`$1\` ended with status $?"; }
# Waits for a condition: at most SECONDS, looking ten times a second.
within() {
  local tries=$(($1 * 10))
  shift
  until "$@"; do
    ((tries-- > 0)) || return 1
    sleep 0.1
  done
}

clean() {
  local status=$?
  trap '' INT TERM HUP
  exec 9<&-
  [[ -z $reader ]] || kill "$reader" 2>/dev/null || true
  if grep -qF " $work/mnt " /proc/self/mountinfo; then
    railfs umount mnt 2>/dev/null || railfs umount --lazy mnt || true
  fi
  [[ -z $server ]] || { kill -TERM "$server" 2>/dev/null && wait "$server"; } || true
  if ((status != 0)) && [[ -s railfsd.log ]]; then
    echo "the end of railfsd's log:" >&2
    tail -n 20 railfsd.log >&2
  fi
  exit "$status"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

received() { # FABRIC: object bytes that the mount received over it
  railfs status mnt --json | jq --arg fabric "$1" '[.rails[] | select(.fabric == $fabric) | .bytes_received] | add'
}
state() {
  railfs status mnt --json | jq -r --arg fabric "$1" '.rails[] | select(.fabric == $fabric) | .state'
}
state_is() { [[ $(state "$1") == "$2" ]]; }
received_at_least() { (($(received "$1") >= $2)); }
rails="railfs status mnt --json | jq -r '.rails[] | \"\\(.name)  \\(.state)  received \\(.bytes_received)  \\(.reason)\"'"

title "A network of its own, with two addresses: one for each rail"
must "ip link set lo up"
must "ip address add 10.77.0.1/32 dev lo"
must "ip address add 10.77.1.1/32 dev lo"

title "A server with two stripe directories and two rails"
cat >railfsd.toml <<CONFIG
state_dir = "$work/state"
stripe_dirs = ["$work/disk0", "$work/disk1"]

[control]
listen = ["10.77.0.1", "10.77.1.1"]

[[rail]]
fabric = "a"
listen = "10.77.0.1"

[[rail]]
fabric = "b"
listen = "10.77.1.1"

[security]
insecure = true
CONFIG
must "mkdir disk0 disk1 state mnt"
must "railfsd init disk0 disk1"
must "cat railfsd.toml"
must "railfsd check --config railfsd.toml >/dev/null && echo fine"
printf '$ railfsd serve --config railfsd.toml &\n'
railfsd serve --config railfsd.toml >railfsd.out 2>railfsd.log &
server=$!
ready() { grep -q '^railfsd ready' railfsd.out || ! kill -0 "$server" 2>/dev/null; }
within 20 ready || fail "railfsd does not say that it is ready"
cat railfsd.out
grep -q '^railfsd ready' railfsd.out || fail "railfsd ended"

title "Real files, and one of $((size >> 20)) MiB, which is four times the memory that the mount will have"
printf '$ head -c %s /dev/urandom >big.bin\n' "$size"
head -c "$size" /dev/urandom >big.bin
must 'cp -rL "$repository/proto" source'
must "railfs put -q source $url/source/"
must "railfs put big.bin $url/"
must "echo 'the first words' >words; railfs put words $url/words"
must "railfs ls -l $url/"
must "railfs stat $url/big.bin"
must "du -sh disk0/components disk1/components"

title "A mount of it"
must "railfs mount $url/ mnt -o arena=64MiB"
must "ls -l mnt mnt/source"
must "df mnt"

title "Ordinary programs read it"
must "sha256sum big.bin mnt/big.bin"
[[ $(awk '{print $1}' <<<"$output" | sort -u | wc -l) == 1 ]] || fail "the two differ"
must "diff -r source mnt/source && echo the same"
must "cp mnt/source/Cargo.toml copy && cmp copy source/Cargo.toml && echo the same"
must "mkdir out && tar -C mnt -cf - source | tar -C out -xf - && diff -r source out/source && find out/source -type f | wc -l"
[[ $output == "$(find source -type f | wc -l)" ]] || fail "not all of it is in the archive"
must "python3 -c \"import pathlib; print(sum(len(p.read_text().split()) for p in pathlib.Path('mnt/source').rglob('*.rs')), 'words of Rust')\""
[[ $output == "$(find source -name '*.rs' -exec cat {} + | wc -w) words of Rust" ]] || fail "not the words of the source"
if run "echo more >>mnt/words"; then fail "a write was not refused"; fi
[[ $output == *"Read-only file system"* ]] || fail "the refusal is another one"

title "What is replaced is seen at once; whoever has the old version open is told so, and never gets a blend"
must "cat mnt/words"
[[ $output == "the first words" ]] || fail "not what was put"
printf '$ exec 9<mnt/words\n'
exec 9<mnt/words
must "echo 'other words, and more of them' >words; railfs put words $url/words"
must "cat mnt/words"
[[ $output == "other words, and more of them" ]] || fail "the mount shows the old version"
if run "cat <&9"; then fail "the old version was given as if it were current"; fi
[[ $output == *"Stale file handle"* ]] || fail "the error is another one"
exec 9<&-

title "Both rails carry bytes; one is taken away in the middle of a cat"
cat >slowly <<'PYTHON'
#!/usr/bin/env python3
"""Passes its input on, 32 MiB a second, and as fast as it can once the file "hurry" is there."""
import os, sys, time
while piece := sys.stdin.buffer.read(1 << 20):
    sys.stdout.buffer.write(piece)
    if not os.path.exists("hurry"):
        time.sleep(1 / 32)
PYTHON
chmod +x slowly
must "$rails"
before_a=$(received a)
before_b=$(received b)
printf '$ cat mnt/big.bin | ./slowly | sha256sum >sum &\n'
(
  set -o pipefail
  cat mnt/big.bin | ./slowly | sha256sum >sum
) &
reader=$!
within 20 received_at_least b $((before_b + (16 << 20))) || fail "rail b carries nothing"
within 20 received_at_least a $((before_a + (16 << 20))) || fail "rail a carries nothing"
must "$rails"
must "ip address del 10.77.1.1/32 dev lo"
within 20 state_is b down || fail "the mount does not notice that rail b is gone"
must "$rails"
cut_a=$(received a)
cut_b=$(received b)
kill -0 "$reader" 2>/dev/null || fail "the cat had ended before rail b was down: nothing is shown"
must "touch hurry"
printf '$ wait\n'
wait "$reader" || fail "the cat failed"
reader=
must "$rails"
must "cat sum"
[[ $output == "$(sha256sum <big.bin)" ]] || fail "the bytes are wrong"
end_a=$(received a)
end_b=$(received b)
((end_b == cut_b)) || fail "rail b went on: $cut_b, then $end_b bytes"
((cut_b - before_b < size / 2)) || fail "rail b did not stop in mid-file: it brought $((cut_b - before_b)) of $size bytes"
((end_a > cut_a)) || fail "rail a did not go on"
((end_a - before_a + end_b - before_b >= size)) || fail "fewer bytes came over the rails than the file has"
echo "rail b stopped after $(((cut_b - before_b) >> 20)) MiB of this cat, rail a went on to $(((end_a - before_a) >> 20)) MiB;" \
  "the checksum is right"

title "The address comes back, and with it the rail"
must "ip address add 10.77.1.1/32 dev lo"
is_back() { [[ $(state b) == up || $(state b) == probing ]]; }
within 20 is_back || fail "rail b does not come back: it is $(state b)"
must "sha256sum mnt/big.bin"
[[ ${output%% *} == "$(awk '{print $1}' sum)" ]] || fail "the bytes are wrong"
must "$rails"
(($(received b) > end_b)) || fail "rail b carries nothing"
state_is b up || fail "rail b is $(state b)"

title "The end"
must "railfs umount mnt"
must "ls mnt | wc -l"
printf '$ kill -TERM %s && wait\n' '$!'
kill -TERM "$server"
wait "$server" || fail "railfsd ended with status $?"
server=
left=$(ls -A run)
[[ -z $left ]] || fail "the mount left files: $left"

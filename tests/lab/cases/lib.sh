# For scripts in guests: test cases that are counted, and a railfs of their own. Sourced.
# shellcheck shell=bash
#
# try NAME FUNCTION: runs it under `set -eu` in a shell of its own, unless RAILFS_LAB_CASES names other cases. What it prints is
# shown, and its end kept as the reason when it fails. Results go to $LAB_OUT/results, a line each, "pass NAME" or
# "fail NAME: reason"; status_of_cases is the script's last line.

export PATH=$RAILFS_BIN_DIR:$PATH
failed_cases=0

try() {
  local name=$1 log=$LAB_OUT/$1.log rc began=$SECONDS
  [[ -z ${RAILFS_LAB_CASES:-} || " $RAILFS_LAB_CASES " == *" $name "* ]] || return 0
  shift
  (
    set -eEuo pipefail
    trap 'echo "line $LINENO: $BASH_COMMAND: status $?"' ERR
    "$@"
  ) >"$log" 2>&1 </dev/null
  rc=$?
  if ((rc == 0)); then
    echo "pass $name" >>"$LAB_OUT/results"
    echo "pass $name ($((SECONDS - began)) s)"
  else
    failed_cases=$((failed_cases + 1))
    echo "fail $name: $(tail -n 3 "$log" | tr '\n' ' ')" >>"$LAB_OUT/results"
    echo "FAIL $name ($((SECONDS - began)) s)"
    tail -n 30 "$log" | sed 's/^/    /'
  fi
}

status_of_cases() { ((failed_cases == 0)); }

# within SECONDS COMMAND...: until it succeeds; says what was waited for when it does not.
within() {
  local end=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    if ((SECONDS >= end)); then
      echo "not within its time: $*"
      "$@" 2>&1 | tail -n 3
      return 1
    fi
    sleep 0.1
  done
}

not() { ! "$@"; }
say() { echo "$*"; }

# store DIRECTORY ADDRESS...: makes a store there and its configuration, a control address and a rail on each address.
store() {
  local directory=$1 n=0 address
  shift
  mkdir -p "$directory/d0" "$directory/d1"
  railfsd init "$directory/d0" "$directory/d1"
  {
    echo "node = \"lab\""
    echo "state_dir = \"$directory/state\""
    echo "stripe_dirs = [\"$directory/d0\", \"$directory/d1\"]"
    printf '[control]\nlisten = [%s]\n' "$(printf '"%s", ' "$@" | sed 's/, $//')"
    printf '[security]\ninsecure = true\n'
    for address in "$@"; do
      printf '[[rail]]\nfabric = "f%s"\nlisten = "%s"\n' "$n" "$address"
      n=$((n + 1))
    done
  } >"$directory/railfsd.toml"
}

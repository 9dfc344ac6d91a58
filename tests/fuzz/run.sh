#!/usr/bin/env bash
# Fuzzes every decoder on stable Rust: run.sh [SECONDS], the time for all of them together (RAILFS_FUZZ_SECONDS, else 60).
# One line per target; status 1 if one crashed, hung or could not be run. Inputs that did so stay in target/crashes/.
# run.sh SECONDS TARGET... fuzzes only these.
set -euo pipefail
cd "$(dirname "$0")"

seconds=${1:-${RAILFS_FUZZ_SECONDS:-60}}
if [[ ! $seconds =~ ^[0-9]{1,6}$ ]]; then
  echo "usage: run.sh [SECONDS [TARGET...]]: '$seconds' is not a whole number of seconds" >&2
  exit 2
fi
shift || true
targets=("$@")
if ((${#targets[@]} == 0)); then
  for file in fuzz_targets/*.rs; do
    file=${file##*/}
    targets+=("${file%.rs}")
  done
fi

# What cargo-fuzz passes, without the sanitizer, which would need a nightly compiler: decoders here have no unsafe code.
# With --target, build scripts and procedural macros are built without it.
host=$(rustc -vV | sed -n 's/^host: //p')
export RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Cforce-frame-pointers"
export CARGO_TARGET_DIR=$PWD/target
export RUST_BACKTRACE=0
unset CARGO_BUILD_TARGET CARGO_ENCODED_RUSTFLAGS
cargo build --quiet --locked --release --target "$host" --bins

cpus=$(nproc)
jobs=$((cpus < ${#targets[@]} ? cpus : ${#targets[@]}))
rounds=$(((${#targets[@]} + jobs - 1) / jobs))
share=$((seconds / rounds))
share=$((share < 1 ? 1 : share))

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p target/crashes

# One target for its share; prints its line. libFuzzer reports to stderr.
run_one() {
  local target=$1 log=$work/$1.log status=0 runs cover
  mkdir -p "$work/$target"
  timeout --kill-after=5 $((share + 60)) "target/$host/release/$target" "$work/$target" "seeds/$target" \
    -max_total_time="$share" -timeout=5 -rss_limit_mb=1024 -max_len=16384 -print_final_stats=1 \
    -artifact_prefix="target/crashes/$target-" </dev/null >"$log" 2>&1 || status=$?
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -n 1)
  cover=$(grep -o 'cov: [0-9]* ft: [0-9]*' "$log" | tail -n 1 || true)
  if ((status == 0)) && [[ ${runs:-0} -gt 0 && -n $cover ]]; then
    echo "fuzz $target: $runs runs in $share s, ${cover/ft:/features:}"
  else
    echo "fuzz $target: FAILED with status $status after ${runs:-0} runs"
    grep -A 2 'panicked at' "$log" | sed 's/^/  /' || true
    echo "  the end of its log:"
    tail -n 15 "$log" | sed 's/^/  /'
    return 1
  fi
}

failed=0
pending=()
for target in "${targets[@]}"; do
  if ((${#pending[@]} == jobs)); then
    wait "${pending[0]}" || failed=1
    pending=("${pending[@]:1}")
  fi
  run_one "$target" &
  pending+=($!)
done
for pid in "${pending[@]}"; do
  wait "$pid" || failed=1
done
exit "$failed"

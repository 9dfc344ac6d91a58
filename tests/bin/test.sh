#!/usr/bin/env bash
# `make test`: builds, runs every suite this machine can run, and ends with the line "N passed, N failed, N skipped".
# Exit status 0 only if nothing failed and, where CI=true, everything listed in tests/suites.toml ran.
#
#   RAILFS_FUZZ_SECONDS  seconds of fuzzing in all: 0 is none; default 60 where CI=true, else 10
#   RAILFS_SKIP_LOG      set by this script: a test that cannot run here appends "SKIPPED <name>: <reason>" to it
#   RAILFS_TALLY_LOG     set by this script: a test of invariants appends what it tried, for the table by invariant
#   RAILFS_BIN_DIR       set by this script: where the railfs and railfsd just built are
#   RAILFS_LAB           0: no guests (tests/lab)
#   RAILFS_TEST_ARGS     what to run instead of --workspace, e.g. "-p railfs-proto" (then no suite is required)
#
# With the argument "faults" (`make test-faults`): only tests of invariants and of faults, and the guest of disks that fail.
set -euo pipefail
cd "$(dirname "$0")/../.."

default_seconds=10
[[ ${CI:-} == true ]] && default_seconds=60
export RAILFS_FUZZ_SECONDS=${RAILFS_FUZZ_SECONDS:-$default_seconds}
if [[ ! $RAILFS_FUZZ_SECONDS =~ ^[0-9]{1,6}$ ]]; then
  echo "RAILFS_FUZZ_SECONDS is '$RAILFS_FUZZ_SECONDS': a whole number of seconds is wanted" >&2
  exit 2
fi

target=${CARGO_TARGET_DIR:-$PWD/target}
out=$target/test-run
rm -rf "$out"
mkdir -p "$out"
export RAILFS_SKIP_LOG=$out/skipped.log
: >"$RAILFS_SKIP_LOG"
export RAILFS_TALLY_LOG=$out/tally.log
: >"$RAILFS_TALLY_LOG"
export RAILFS_BIN_DIR=$target/debug

scope=(--workspace)
report=()
if [[ -n ${RAILFS_TEST_ARGS:-} ]]; then
  read -r -a scope <<<"$RAILFS_TEST_ARGS"
  report+=(--partial)
fi

select=()
guests=()
if [[ ${1:-} == faults ]]; then
  # Tests of invariants are named by them.
  programs='binary(outages) + binary(degraded) + binary(usage) + binary(reaching) + binary(security) + binary(rail_loss)
    + binary(life) + binary(servers) + binary(refusals) + binary(put_faults) + binary(races)'
  select=(-E "test(/(^|::)(i[0-9]+_)+/) + $programs")
  # Real devices have a target of their own, and `make test` has them.
  guests=(faults)
  report+=(--partial)
  # Each decoder for a second or two; `make test` gives them more.
  RAILFS_FUZZ_SECONDS=20
fi

# One build for programs and tests: the same features, so nothing is compiled twice.
if ! cargo build "${scope[@]}" --bins --tests; then
  echo "FAILED build: nothing was run"
  echo "0 passed, 1 failed, 0 skipped"
  exit 1
fi

# Where nextest keeps its reports: below the workspace, whatever the target directory is.
junit=$PWD/target/nextest/ci/junit.xml
rm -f "$junit"
nextest_status=0
cargo nextest run --profile ci "${scope[@]}" "${select[@]}" --no-tests warn </dev/null || nextest_status=$?
echo "$nextest_status" >"$out/nextest.status"
[[ -f $junit ]] && cp "$junit" "$out/junit.xml"
# Tests marked #[ignore] do not run and are not in the report: they are counted as skipped, by name.
cargo nextest list --profile ci "${scope[@]}" --message-format json 2>/dev/null >"$out/list.json" </dev/null || true

if ((${#select[@]} == 0)); then
  echo "doctests"
  doc_status=0
  cargo test --doc "${scope[@]}" </dev/null >"$out/doctests.log" 2>&1 || doc_status=$?
  ((doc_status == 0)) || cat "$out/doctests.log"
  echo "$doc_status" >"$out/doctests.status"
fi

if ((RAILFS_FUZZ_SECONDS == 0)); then
  echo "SKIPPED fuzz: RAILFS_FUZZ_SECONDS is 0" >>"$RAILFS_SKIP_LOG"
elif [[ ! -f tests/fuzz/run.sh ]]; then
  echo "SKIPPED fuzz: tests/fuzz/run.sh is not there" >>"$RAILFS_SKIP_LOG"
else
  echo "fuzz, $RAILFS_FUZZ_SECONDS s in all"
  fuzz_status=0
  # Twice the time and ten minutes for the build; a fuzzer that hangs must not hang the run.
  timeout --kill-after=10 $((RAILFS_FUZZ_SECONDS * 2 + 600)) bash tests/fuzz/run.sh </dev/null || fuzz_status=$?
  echo "$fuzz_status" >"$out/fuzz.status"
fi

# Guests run the programs just built; where only some packages were, they may not be there.
if [[ -z ${RAILFS_TEST_ARGS:-} ]]; then
  tests/bin/lab.sh "$out" "${guests[@]}" </dev/null
fi

exec python3 tests/bin/suites.py "${report[@]}" --out "$out" tests/suites.toml

#!/usr/bin/env bash
# Runs the suites of the lab (tests/lab/cases) and leaves what became of them where suites.py counts it.
#
#   lab.sh OUT [SUITE...]       OUT/lab-SUITE.results and .status; suites: run pair systemd rdma rdma-pair faults (the first five when none is named)
#   lab.sh --only [SUITE...]    builds, runs these alone, and counts
#
# A machine that cannot start guests is said to, by a line for each suite in RAILFS_SKIP_LOG; suites.py decides whether that
# is allowed. RAILFS_LAB=0 skips them all. Needs the programs in RAILFS_BIN_DIR. What guests said stays in OUT/lab-SUITE/.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [[ ${1:-} == --only ]]; then
  shift
  target=${CARGO_TARGET_DIR:-$PWD/target}
  out=$target/test-lab
  rm -rf "$out"
  mkdir -p "$out"
  export RAILFS_LAB_ALL=1
  # As tests/bin/test.sh does, so that nothing is compiled twice.
  cargo build --workspace --bins --tests
  echo 0 >"$out/nextest.status"
  RAILFS_BIN_DIR=$target/debug RAILFS_SKIP_LOG=$out/skipped.log tests/bin/lab.sh "$out" "$@"
  exec python3 tests/bin/suites.py --partial --out "$out" tests/suites.toml
fi

out=$1
shift
suites=("$@")
((${#suites[@]})) || suites=(run pair systemd rdma rdma-pair)

skip() {
  local suite
  for suite in "${suites[@]}"; do
    echo "SKIPPED lab-$suite: $1"
    [[ -z ${RAILFS_SKIP_LOG:-} ]] || echo "SKIPPED lab-$suite: $1" >>"$RAILFS_SKIP_LOG"
  done
  exit 0
}

[[ ${RAILFS_LAB:-1} != 0 ]] || skip "RAILFS_LAB is 0"
lacking=$(tests/lab/lab missing) || skip "this machine lacks ${lacking//$'\n'/; }"
prepared=$(tests/lab/lab prepare 2>&1) || skip "${prepared//$'\n'/; }"

# Guests read programs slowly: without what only a debugger wants they are a quarter as large.
programs=$(mktemp -d "$out/lab-programs.XXXXXX")
trap 'rm -rf "$programs"' EXIT
for program in railfs railfsd; do
  strip -o "$programs/$program" "${RAILFS_BIN_DIR:?}/$program" 2>/dev/null || cp "$RAILFS_BIN_DIR/$program" "$programs/"
done
# The rails' own tests, for real devices: the newest that were built.
for name in rail_conformance railfs_engine; do
  newest=
  for program in "$RAILFS_BIN_DIR/deps/$name"-*; do
    if [[ -x $program && ! -d $program && ${program##*/} != *.* && (-z $newest || $program -nt $newest) ]]; then newest=$program; fi
  done
  [[ -z $newest ]] || strip -o "$programs/$name" "$newest" 2>/dev/null || cp "$newest" "$programs/$name"
done
# As a package would put them in place; made here, since a guest takes its time.
DESTDIR=$programs/root PREFIX=/usr HELPER_DIR=/usr/sbin BIN_DIR=$programs packaging/install.sh install
rm "$programs/railfs" "$programs/railfsd"
for name in rail_conformance railfs_engine; do
  [[ ! -e $programs/$name ]] || mv "$programs/$name" "$programs/root/usr/bin/"
done
export RAILFS_BIN_DIR=$programs/root/usr/bin

# A machine that does other things as well is slower by a multiple.
export RAILFS_LAB_LIMIT=${RAILFS_LAB_LIMIT:-600}
for suite in "${suites[@]}"; do
  began=$SECONDS
  echo "lab: $suite"
  rm -rf "$out/lab-$suite"
  status=0
  options=()
  kind=$suite
  case $suite in
    faults) kind=run ;;
    rdma)
      kind=run
      # The longest of them: what every rail promises, and whole objects over emulated devices.
      least=$((${RAILFS_FULL:-0} == 1 ? 2700 : 1200))
      ((RAILFS_LAB_LIMIT >= least)) || RAILFS_LAB_LIMIT=$least
      ;;
    rdma-pair)
      kind=pair
      ((RAILFS_LAB_LIMIT >= 1200)) || RAILFS_LAB_LIMIT=1200
      ;;
  esac
  [[ $kind == pair ]] || options=(--disk $((${RAILFS_FULL:+1} + 0 > 0 ? 1024 : 512)))
  tests/lab/lab "$kind" "${options[@]}" --out "$out/lab-$suite" "tests/lab/cases/$suite.sh" || status=$?
  cat "$out/lab-$suite"/*/results >"$out/lab-$suite.results" 2>/dev/null || true
  echo "$status" >"$out/lab-$suite.status"
  # What tests of invariants have tried there.
  [[ -z ${RAILFS_TALLY_LOG:-} ]] || cat "$out/lab-$suite"/*/tally >>"$RAILFS_TALLY_LOG" 2>/dev/null || true
  echo "lab: $suite took $((SECONDS - began)) s, status $status"
done

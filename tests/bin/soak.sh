#!/usr/bin/env bash
# `make soak MINUTES=60`: readers, puts and faults of every kind at random under three live mounts (tests/tests/storm.rs). Prints
# what was done and seen; target/soak/report.md keeps it, target/soak/logs the logs of a run that failed.
#
#   RAILFS_SEED           which faults, to make a run again; it is printed
#   RAILFS_STORM_READERS  readers at once (64)
set -euo pipefail
cd "$(dirname "$0")/../.."

minutes=$1
if [[ ! $minutes =~ ^[0-9]{1,5}$ ]] || ((minutes == 0)); then
  echo "MINUTES is '$minutes': a whole number from 1 on is wanted" >&2
  exit 2
fi
cargo build --quiet --workspace --bins --tests
target=${CARGO_TARGET_DIR:-$PWD/target}
rm -rf "$target/soak"
mkdir -p "$target/soak"
export RAILFS_BIN_DIR=$target/debug RAILFS_SKIP_LOG=$target/soak/skipped.log
export RAILFS_STORM_SECONDS=$((minutes * 60)) RAILFS_STORM_REPORT=$target/soak/report.md RAILFS_STORM_LOGS=$target/soak/logs
# Of the whole workspace: with the features with which all was built.
cargo test --quiet --workspace --test storm -- --nocapture
if [[ ! -s $RAILFS_STORM_REPORT ]]; then
  cat "$RAILFS_SKIP_LOG" 2>/dev/null || true
  echo "nothing was run" >&2
  exit 1
fi

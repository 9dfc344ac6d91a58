#!/usr/bin/env bash
# One guest, for `make test-faults`: disks that fail. `make test` has the same cases in the guest of run.sh.
# shellcheck shell=bash disable=SC2034
. "$LAB_DIR/cases/lib.sh"
work=/dev/shm/work
mkdir -p $work
. "$LAB_DIR/cases/faults_cases.sh"
. "$LAB_DIR/cases/writes_cases.sh"
status_of_cases

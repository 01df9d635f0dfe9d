#!/bin/sh
# Proves the lock-free parts of the reactor, the memtable and the block devices with loom, and that
# each proof can fail (its mutants are found).
#   scripts/loom.sh [TEST-NAME-FILTER]
# Exit code 0: all proved, all mutants found. Takes 15 s after the first build; MILLRACE_LONG=1
# searches one preemption deeper, which takes minutes.
set -eu
cd "$(dirname "$0")/.."
CARGO_TARGET_DIR=${LOOM_TARGET_DIR:-target/loom}
RUSTFLAGS="--cfg loom ${RUSTFLAGS:-}"
export CARGO_TARGET_DIR RUSTFLAGS
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
cargo test --release -p millrace-reactor -p millrace-memtable -p millrace-bdev --test loom \
  -- --nocapture --test-threads 1 "$@" >"$log" 2>&1 || status=$?
if [ "$status" -ne 0 ]; then cat "$log"; fi
echo "--- loom ---"
grep -hoE '^(test .* \.\.\. )?(proved|mutants?) .*' "$log" | sed -E 's/^test .* \.\.\. //' || true
grep -E '^(test result|error)' "$log" || true
if [ "$status" -eq 0 ]; then echo "loom: proved"; else echo "loom: FAILED"; fi
exit "$status"

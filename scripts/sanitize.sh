#!/bin/sh
# Runs the tests of the crates that have unsafe code under AddressSanitizer and ThreadSanitizer.
#   scripts/sanitize.sh [address|thread]...
# Needs a nightly toolchain; its rust-src is not needed.
#
# What this does and does not show. The standard library is the precompiled one, which is not instrumented:
#  - AddressSanitizer sees every allocation anyway (it replaces malloc) and every access that our code makes or that
#    std's generic code makes when it is compiled into ours. It also reports what is leaked.
#  - ThreadSanitizer does not see what uninstrumented std code does. Locks, condition variables and channels are futex
#    calls and atomics inside std, partly inlined into our code and partly not: edges that it misses give false alarms.
#    Where std is used between threads outside the tests, `--cfg tsan` shows it the edge (reactor/src/edge.rs). The rest is
#    named in scripts/tsan.supp, each with its reason; nothing of ours may be listed there.
#  - A page that is not there (SIGBUS) while the sanitizer does an atomic access for us: it holds a lock of its own then,
#    which the handler's atomics wait for. Tests that cut memory off are left out under ThreadSanitizer.
#  - The kernel is a blind spot too: what io_uring writes into a buffer, or orders, neither sees.
#  - ThreadSanitizer does not understand fences. What rests on one (sleep.rs) is proved by loom; here it must not raise
#    an alarm because nothing but atomics is on both sides of that fence.
set -eu
cd "$(dirname "$0")/.."
crates="-p millrace-reactor -p millrace-memtable -p millrace-bdev -p millrace-vhost -p millrace-frontend"
target=$(rustc +nightly -vV 2>/dev/null | sed -n 's/^host: //p') || true
if [ -z "$target" ]; then
  echo "sanitize: missing: rustup toolchain install nightly"
  exit 1
fi
CARGO_TARGET_DIR=${SANITIZE_TARGET_DIR:-target/sanitize}
export CARGO_TARGET_DIR
# `halt_on_error=0`: report everything, and fail at the end by the exit code.
export ASAN_OPTIONS="detect_leaks=1:detect_stack_use_after_return=1"
export TSAN_OPTIONS="suppressions=$PWD/scripts/tsan.supp:halt_on_error=0:second_deadlock_stack=1"
status=0
for sanitizer in ${*:-address thread}; do
  flags="-Zsanitizer=$sanitizer"
  # std was compiled without the sanitizer, which changes nothing in how functions are called.
  [ "$sanitizer" = thread ] && flags="$flags -Cunsafe-allow-abi-mismatch=sanitizer --cfg tsan"
  echo "--- $sanitizer ---"
  # shellcheck disable=SC2086
  RUSTFLAGS="$flags ${RUSTFLAGS:-}" cargo +nightly test $crates --target "$target" --lib --tests --no-fail-fast \
    -- --test-threads 1 || status=1
done
if [ "$status" -eq 0 ]; then echo "sanitize: clean"; else echo "sanitize: FAILED"; fi
exit "$status"

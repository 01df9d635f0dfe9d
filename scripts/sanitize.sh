#!/bin/sh
# Runs the tests of the crates that have unsafe code under AddressSanitizer and ThreadSanitizer, and those of the C library
# under AddressSanitizer.
#   scripts/sanitize.sh [address|thread]...
# Needs a nightly toolchain, without rust-src.
#
# Limits. The standard library is the precompiled one, which is not instrumented:
#  - AddressSanitizer sees every allocation anyway (it replaces malloc) and every access of our code and
#    of std's generic code compiled into ours. It also reports leaks.
#  - ThreadSanitizer does not see the actions of uninstrumented std code. Locks, condition variables and
#    channels are futex calls and atomics inside std, partly inlined into our code: missed edges give
#    false alarms. Where product code uses std between threads, `--cfg tsan` shows it the edge
#    (reactor/src/edge.rs). The rest is listed in scripts/tsan.supp, each with its reason; our own code
#    must not be listed there.
#  - A missing page (SIGBUS) during an atomic access by the sanitizer: the sanitizer holds a lock of its
#    own then, for which the handler's atomics wait. Tests that truncate memory are skipped under
#    ThreadSanitizer.
#  - Neither sees the kernel: bytes that io_uring writes into a buffer, or its ordering.
#  - ThreadSanitizer does not understand fences. Loom proves the code that depends on one (sleep.rs);
#    here it must not raise an alarm, because there are only atomics on both sides of that fence.
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
# `halt_on_error=0`: report all errors, and fail at the end by the exit code.
export ASAN_OPTIONS="detect_leaks=1:detect_stack_use_after_return=1"
export TSAN_OPTIONS="suppressions=$PWD/scripts/tsan.supp:halt_on_error=0:second_deadlock_stack=1"
status=0
for sanitizer in ${*:-address thread}; do
  flags="-Zsanitizer=$sanitizer"
  # std was compiled without the sanitizer, which does not change the calling convention.
  [ "$sanitizer" = thread ] && flags="$flags -Cunsafe-allow-abi-mismatch=sanitizer --cfg tsan"
  echo "--- $sanitizer ---"
  # shellcheck disable=SC2086
  RUSTFLAGS="$flags ${RUSTFLAGS:-}" cargo +nightly test $crates --target "$target" --lib --tests --no-fail-fast \
    -- --test-threads 1 || status=1
  # The C library's client, tokio and tracing hand over by std's locks, which ThreadSanitizer does not see.
  [ "$sanitizer" = address ] || continue
  # The C programs are instrumented, too, and have the sanitizer's runtime, which the library finds there.
  runtime=$(rustc +nightly --print target-libdir --target "$target")/librustc-nightly_rt.asan.a
  MILLRACE_CFLAGS="-fsanitize=address" \
    MILLRACE_LDFLAGS="-Wl,--whole-archive $runtime -Wl,--no-whole-archive -Wl,--export-dynamic" \
    RUSTFLAGS="$flags ${RUSTFLAGS:-}" cargo +nightly test -p millrace-capi --target "$target" --tests --no-fail-fast \
    -- --test-threads 1 || status=1
done
if [ "$status" -eq 0 ]; then echo "sanitize: clean"; else echo "sanitize: FAILED"; fi
exit "$status"

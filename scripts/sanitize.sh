#!/bin/sh
# Runs the tests of the crates that have unsafe code, and those of the C library, under AddressSanitizer and
# ThreadSanitizer.
#   scripts/sanitize.sh [address|thread]...
# Needs a nightly toolchain, without rust-src.
#
# Limits. The standard library is the precompiled one, which is not instrumented:
#  - AddressSanitizer sees every allocation anyway (it replaces malloc) and every access of our code and
#    of std's generic code compiled into ours. It also reports leaks.
#  - ThreadSanitizer does not see the actions of uninstrumented std code. Locks, condition variables and
#    channels are futex calls and atomics inside std, partly inlined into our code: missed edges give
#    false alarms. tsan_std.c shows it the locks' edges. The rest is listed in scripts/tsan.supp, each
#    with its reason.
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
CARGO_TARGET_DIR=$(realpath -m "${SANITIZE_TARGET_DIR:-target/sanitize}")
export CARGO_TARGET_DIR
# `halt_on_error=0`: report all errors, and fail at the end by the exit code.
# `handle_*=0`: a process that dies by a signal dies by it, as its tests expect.
dies="handle_segv=0:handle_sigbus=0:handle_sigill=0:handle_sigfpe=0:handle_abort=0"
export ASAN_OPTIONS="detect_leaks=1:detect_stack_use_after_return=1:$dies"
# `die_after_fork=0`: a child of the C library's tests opens what its parent has open, and is refused.
export TSAN_OPTIONS="suppressions=$PWD/scripts/tsan.supp:halt_on_error=0:second_deadlock_stack=1:die_after_fork=0:$dies"

# Sets `link`, the linker's arguments that put the functions of tsan_std.c before those of std.
wrap_std() {
  std=$(echo "$(rustc +nightly --print target-libdir --target "$target")"/libstd-*.rlib)
  built=$CARGO_TARGET_DIR/tsan_std
  macros=
  mkdir -p "$CARGO_TARGET_DIR"
  for pair in mutex_lock_contended:5mutex5futex.*14lock_contended rwlock_write_contended:6rwlock5futex.*15write_contended \
    rwlock_read_contended:6rwlock5futex.*14read_contended condvar_wait:7condvar5futex.*7Condvar4wait \
    condvar_wait_timeout:7condvar5futex.*7Condvar12wait_timeout once_call:4once5futex.*4Once4call \
    scope_decrement:6scoped.*9ScopeData29decrement_num_running_threads; do
    symbol=$(readelf -sW "$std" 2>/dev/null | awk -v name="${pair#*:}\$" '$4 == "FUNC" && $5 == "GLOBAL" && $8 ~ name { print $8 }')
    [ -n "$symbol" ] || { echo "sanitize: std has no ${pair%%:*}: tsan_std.c must follow it" >&2; exit 1; }
    macros="$macros -DREAL_${pair%%:*}=__real_$symbol -DWRAP_${pair%%:*}=__wrap_$symbol"
    link="$link -Wl,--wrap=$symbol"
  done
  # shellcheck disable=SC2086
  cc -c -O1 -fPIC $macros scripts/tsan_std.c -o "$built.o"
  ar rcs "$built.a" "$built.o"
  link="$link $built.a"
}

status=0
for sanitizer in ${*:-address thread}; do
  flags="-Zsanitizer=$sanitizer" link=
  # std was compiled without the sanitizer, which does not change the calling convention.
  [ "$sanitizer" = address ] || { flags="$flags -Cunsafe-allow-abi-mismatch=sanitizer --cfg tsan"; wrap_std; }
  for argument in $link; do flags="$flags -Clink-arg=$argument"; done
  echo "--- $sanitizer ---"
  # shellcheck disable=SC2086
  RUSTFLAGS="$flags ${RUSTFLAGS:-}" cargo +nightly test $crates --target "$target" --lib --tests --no-fail-fast \
    -- --test-threads 1 || status=1
  # The C programs are instrumented, too, and have the sanitizer's runtime, which the library finds there.
  runtime=$(rustc +nightly --print target-libdir --target "$target")/librustc-nightly_rt.$(echo "$sanitizer" | cut -c1)san.a
  MILLRACE_CFLAGS="-fsanitize=$sanitizer" \
    MILLRACE_LDFLAGS="-Wl,--whole-archive $runtime -Wl,--no-whole-archive -Wl,--export-dynamic$link" \
    RUSTFLAGS="$flags ${RUSTFLAGS:-}" cargo +nightly test -p millrace-capi --target "$target" --tests --no-fail-fast \
    -- --test-threads 1 || status=1
done
if [ "$status" -eq 0 ]; then echo "sanitize: clean"; else echo "sanitize: FAILED"; fi
exit "$status"

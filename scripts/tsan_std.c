// Shows the ordering of the standard library's locks to ThreadSanitizer.
//
// The standard library is shipped compiled, without the sanitizer's calls. What it has inlined into our code is seen, so an
// uncontended lock is; the functions below are not. `scripts/sanitize.sh` links this file into every program and library of
// its ThreadSanitizer run, and lets the linker (`--wrap`) put these functions before those of the standard library, whose
// mangled names it passes as macros: REAL_x is the function, WRAP_x its replacement.
//
// The arguments are those of the Rust functions of the same names in std/src/sys/sync (the variants for futexes)
// and std/src/thread/scoped.rs.

#include <stdbool.h>
#include <stdint.h>

void __tsan_acquire(void *);
void __tsan_release(void *);

// A lock's release is inlined into its guard's drop. It is a store at the lock's own address, so an acquire there is the
// other half.
void REAL_mutex_lock_contended(void *lock);
void WRAP_mutex_lock_contended(void *lock) {
    REAL_mutex_lock_contended(lock);
    __tsan_acquire(lock);
}

void REAL_rwlock_write_contended(void *lock);
void WRAP_rwlock_write_contended(void *lock) {
    REAL_rwlock_write_contended(lock);
    __tsan_acquire(lock);
}

void REAL_rwlock_read_contended(void *lock);
void WRAP_rwlock_read_contended(void *lock) {
    REAL_rwlock_read_contended(lock);
    __tsan_acquire(lock);
}

// Waiting gives the mutex back, and takes it again. The condition itself orders nothing.
void REAL_condvar_wait(void *condition, void *mutex);
void WRAP_condvar_wait(void *condition, void *mutex) {
    __tsan_release(mutex);
    REAL_condvar_wait(condition, mutex);
    __tsan_acquire(mutex);
}

bool REAL_condvar_wait_timeout(void *condition, void *mutex, uint64_t seconds, uint32_t nanoseconds);
bool WRAP_condvar_wait_timeout(void *condition, void *mutex, uint64_t seconds, uint32_t nanoseconds) {
    __tsan_release(mutex);
    bool notified = REAL_condvar_wait_timeout(condition, mutex, seconds, nanoseconds);
    __tsan_acquire(mutex);
    return notified;
}

// Whoever runs the closure comes before all that come after it. The closure's end must be released before the state says
// so, because the test of the state is inlined into our code: the closure is called through a table of its own, whose
// entries for calls are 3 and 4 (after drop, size and alignment).
struct once_call {
    void *closure;
    void **table;
    void *once;
};

static void once_run(struct once_call *call, void *state) {
    ((void (*)(void *, void *))call->table[4])(call->closure, state);
    __tsan_release(call->once);
}

void REAL_once_call(void *once, bool ignore_poisoning, void *closure, void **table, void *location);
void WRAP_once_call(void *once, bool ignore_poisoning, void *closure, void **table, void *location) {
    struct once_call call = {closure, table, once};
    void *own[] = {0, (void *)sizeof call, (void *)_Alignof(struct once_call), (void *)once_run, (void *)once_run};
    REAL_once_call(once, ignore_poisoning, &call, own, location);
    __tsan_acquire(once);
}

// The end of a scoped thread comes before the scope's, which reads the number of running threads (one of the first two
// words).
void REAL_scope_decrement(void *scope, bool panicked);
void WRAP_scope_decrement(void *scope, bool panicked) {
    __tsan_release(scope);
    __tsan_release((char *)scope + sizeof(uintptr_t));
    REAL_scope_decrement(scope, panicked);
}

//! What a process that serves guests takes away from itself, for ever, before a guest can reach it.
//!
//! Two walls, each for what the other does not see (docs/SANDBOX.md has the whole picture):
//!
//! 1. **Landlock** ([`confine_paths`]): no path is opened, made, renamed or removed but beneath the
//!    database's directory, and what its symbolic links led to is only read; no TCP port bound or
//!    connected to; no signal and no abstract socket reaches a process outside; no other process is
//!    traced. It holds for the thread that asks and those started later, and for what their rings
//!    do.
//! 2. **Seccomp** ([`confine_calls`]): only system calls that are listed here, for all threads at
//!    once. A ring's operations pass it by: so no ring is made after it, and those that are there
//!    take only what the reactor's driver asks for (`reactor::RuntimeConfig::confined`).
//!
//! A call that is not allowed fails with `EPERM`: who meets one is told so, rather than ended with
//! all disks. Descriptors that are open stay as good as they were.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd,
    Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

/// What is made use of: that of Linux 6.12, the first that keeps signals in. Kernels that have less
/// give what they have.
const LANDLOCK: ABI = ABI::V6;

/// A directory that stays open to a confined process.
#[derive(Clone, Copy, Debug)]
pub struct Beneath<'a> {
    /// Which.
    pub directory: &'a Path,
    /// Files there may be made, changed and removed.
    pub writable: bool,
    /// Files elsewhere that may be read, and directories that may be listed: [`lsm::outside`].
    pub outside: &'a [PathBuf],
}

/// Takes all paths away from this thread and those it starts later, but for what is beneath a
/// directory; and TCP, signals and abstract sockets beyond this process. Gives whether the kernel
/// could do all of it.
///
/// # Errors
/// When the kernel has no Landlock, or the directory cannot be opened.
pub fn confine_paths(beneath: Option<Beneath<'_>>) -> Result<bool, String> {
    let failed = |error: &dyn std::fmt::Display| format!("Landlock: {error}");
    let reads = AccessFs::ReadFile | AccessFs::ReadDir;
    let writes = AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::MakeDir
        | AccessFs::RemoveFile
        | AccessFs::RemoveDir
        | AccessFs::Refer;
    let all: BitFlags<AccessFs> = AccessFs::from_all(LANDLOCK);
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all)
        .and_then(|rules| rules.handle_access(AccessNet::from_all(LANDLOCK)))
        .and_then(|rules| rules.scope(Scope::from_all(LANDLOCK)))
        .and_then(Ruleset::create)
        .map_err(|error| failed(&error))?;
    if let Some(Beneath { directory, writable, outside }) = beneath {
        let place = PathFd::new(directory).map_err(|error| failed(&error))?;
        let access = if writable { reads | writes } else { reads };
        let rule = PathBeneath::new(place, access);
        rules = rules.add_rule(rule).map_err(|error| failed(&error))?;
        for path in outside {
            // Gone meanwhile, or not for this user: whoever needs it will say so.
            let Ok(place) = PathFd::new(path) else { continue };
            let access = if path.is_dir() { AccessFs::ReadDir } else { AccessFs::ReadFile };
            let rule = PathBeneath::new(place, access);
            rules = rules.add_rule(rule).map_err(|error| failed(&error))?;
        }
    }
    let status = rules.restrict_self().map_err(|error| failed(&error))?;
    match status.ruleset {
        RulesetStatus::FullyEnforced => Ok(true),
        RulesetStatus::PartiallyEnforced => Ok(false),
        RulesetStatus::NotEnforced => Err("this kernel has no Landlock".to_owned()),
    }
}

/// What every node does: memory, threads, time, and descriptors that are open.
const ALWAYS: &[i64] = &[
    // Descriptors.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync_file_range,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fadvise64,
    libc::SYS_eventfd2,
    libc::SYS_memfd_create,
    // Waiting.
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_futex,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_sched_yield,
    libc::SYS_restart_syscall,
    // Disks: rings that are there, and Linux AIO, which reads and writes only.
    libc::SYS_io_uring_enter,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_io_getevents,
    libc::SYS_io_cancel,
    libc::SYS_io_destroy,
    // Connections to sockets that are there.
    libc::SYS_accept4,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    // Memory.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_msync,
    libc::SYS_mlock,
    libc::SYS_munlock,
    libc::SYS_brk,
    libc::SYS_membarrier,
    // Threads and the process itself.
    libc::SYS_clone3,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_getcpu,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_getrusage,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_uname,
    libc::SYS_sysinfo,
];

/// What a database's directory takes.
const PATHS: &[i64] = &[
    libc::SYS_openat,
    libc::SYS_getdents64,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mkdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
];

/// `fcntl` of these only: others would have signals sent.
const FCNTL: &[i32] = &[
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_OFD_SETLK,
    libc::F_OFD_GETLK,
    libc::F_SETLEASE,
    libc::F_GETLEASE,
    F_SETSIG,
    libc::F_ADD_SEALS,
    libc::F_GET_SEALS,
];
/// The C library's headers have it, `libc` has not.
const F_SETSIG: i32 = 10;

/// `ioctl` of these only: what a block device is like, and what the standard library asks.
const IOCTL: &[u64] = &[
    0x8008_1272, // BLKGETSIZE64
    0x1268,      // BLKSSZGET
    0x127B,      // BLKPBSZGET
    0x1279,      // BLKIOOPT
    0x5421,      // FIONBIO
    0x5401,      // TCGETS
];

/// Takes all system calls from all threads of this process, now and later, but for those that a
/// node needs; with `paths` also those that open, make and remove files, which [`confine_paths`]
/// holds to one directory. No ring can be made any more.
///
/// # Errors
/// When the kernel has no seccomp, or a thread has got a filter of its own.
pub fn confine_calls(paths: bool) -> Result<(), String> {
    let failed = |error: &dyn std::fmt::Display| format!("seccomp: {error}");
    let build = || -> Result<[BpfProgram; 2], seccompiler::BackendError> {
        let architecture = std::env::consts::ARCH.try_into()?;
        // The C library tells threads from processes in a structure that a filter cannot read;
        // where that call is missing it uses one whose arguments can be.
        let missing = SeccompAction::Errno(libc::ENOSYS as u32);
        let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
        let clone3 = SeccompFilter::new(clone3, SeccompAction::Allow, missing, architecture)?;
        let refused = SeccompAction::Errno(libc::EPERM as u32);
        let rules = rules(paths)?;
        let all = SeccompFilter::new(rules, refused, SeccompAction::Allow, architecture)?;
        Ok([clone3.try_into()?, all.try_into()?])
    };
    // In this order: what the second leaves could not be added to it.
    let [clone3, all] = build().map_err(|error| failed(&error))?;
    for filter in [&clone3, &all] {
        seccompiler::apply_filter_all_threads(filter).map_err(|error| failed(&error))?;
    }
    Ok(())
}

fn rules(paths: bool) -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
    let calls = ALWAYS.iter().chain(if paths { PATHS } else { &[] });
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        calls.map(|call| (*call, Vec::new())).collect();
    #[cfg(target_arch = "x86_64")]
    rules.insert(libc::SYS_time, Vec::new());
    let (narrow, wide) = (SeccompCmpArgLen::Dword, SeccompCmpArgLen::Qword);
    let equal = |argument, value: u64| {
        let one = SeccompCondition::new(argument, narrow.clone(), SeccompCmpOp::Eq, value)?;
        SeccompRule::new(vec![one])
    };
    let masked = |argument, mask: u64, value: u64| {
        SeccompCondition::new(argument, wide.clone(), SeccompCmpOp::MaskedEq(mask), value)
    };
    let fcntl = FCNTL.iter().map(|command| equal(1, *command as u64));
    rules.insert(libc::SYS_fcntl, fcntl.collect::<Result<_, _>>()?);
    let ioctl = IOCTL.iter().map(|request| equal(1, *request));
    rules.insert(libc::SYS_ioctl, ioctl.collect::<Result<_, _>>()?);
    // Threads, no processes, and no name spaces.
    let thread = libc::CLONE_THREAD as u64 | libc::CLONE_VM as u64;
    let spaces = libc::CLONE_NEWNS
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWCGROUP;
    let clone = SeccompRule::new(vec![masked(0, thread, thread)?, masked(0, spaces as u64, 0)?])?;
    rules.insert(libc::SYS_clone, vec![clone]);
    // No code but the program's.
    let data = || SeccompRule::new(vec![masked(2, libc::PROT_EXEC as u64, 0)?]);
    rules.insert(libc::SYS_mmap, vec![data()?]);
    rules.insert(libc::SYS_mprotect, vec![data()?]);
    // A panic ends the process so.
    rules.insert(libc::SYS_tgkill, vec![equal(0, std::process::id().into())?]);
    let prctl = [libc::PR_SET_NAME, libc::PR_SET_PDEATHSIG, libc::PR_SET_THP_DISABLE];
    let prctl = prctl.map(|what| equal(0, what as u64));
    rules.insert(libc::SYS_prctl, prctl.into_iter().collect::<Result<_, _>>()?);
    // How the allocator asks what it has been given.
    rules.insert(libc::SYS_prlimit64, vec![SeccompRule::new(vec![masked(2, u64::MAX, 0)?])?]);
    Ok(rules)
}

//! The rights that a process gives up for ever, before it serves a guest.
//!
//! Two mechanisms, each for what the other does not cover (docs/SANDBOX.md has the whole picture):
//!
//! 1. **Landlock** ([`confine_paths`]): no path is opened, created, renamed or removed except
//!    beneath the database's directory, and targets of its symbolic links are only read; no TCP
//!    port is bound or connected to; no signal and no abstract socket reaches a process outside; no
//!    other process is traced. It applies to the calling thread and those started later, and to
//!    operations of their rings.
//! 2. **Seccomp** ([`confine_calls`]): only the system calls listed here, for all threads at once.
//!    It does not see the operations of a ring. So no ring can be made after it, and the existing
//!    rings accept only the operations of the reactor's driver
//!    (`reactor::RuntimeConfig::confined`).
//!
//! A call that is not allowed fails with `EPERM`, which does not end the process and with it all
//! disks. Open descriptors keep working.

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

/// The Landlock version to use: that of Linux 6.12, the first that confines signals. Older kernels
/// apply what they support.
const LANDLOCK: ABI = ABI::V6;

/// A directory that stays accessible to a confined process.
#[derive(Clone, Copy, Debug)]
pub struct Beneath<'a> {
    /// The directory.
    pub directory: &'a Path,
    /// Whether files there may be created, changed and removed.
    pub writable: bool,
    /// Files elsewhere that may be read, and directories that may be listed: [`lsm::outside`].
    pub outside: &'a [PathBuf],
}

/// Takes all paths from this thread and those it starts later, except those beneath a directory;
/// and TCP, signals and abstract sockets beyond this process. Returns whether the kernel supports
/// all of it.
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
            // The path has gone or is not accessible to this user. If it is needed, its user
            // reports that.
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

/// The calls of every node: memory, threads, time, and open descriptors.
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
    libc::SYS_pwritev2,
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
    libc::SYS_fgetxattr,
    libc::SYS_fsetxattr,
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
    // Disks: existing rings, and Linux AIO, which can only read and write.
    libc::SYS_io_uring_enter,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_io_getevents,
    libc::SYS_io_cancel,
    libc::SYS_io_destroy,
    // Connections at existing sockets.
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
    libc::SYS_sched_getattr,
    libc::SYS_sched_setattr,
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

/// The calls for a database's directory.
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

/// The allowed `fcntl` commands; others could have signals sent.
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
/// Defined in the C library's headers, but not in `libc`.
const F_SETSIG: i32 = 10;

/// The allowed `ioctl` requests: properties of a block device, and those of the standard library.
const IOCTL: &[u64] = &[
    0x8008_1272, // BLKGETSIZE64
    0x1268,      // BLKSSZGET
    0x127B,      // BLKPBSZGET
    0x1279,      // BLKIOOPT
    0x5421,      // FIONBIO
    0x5401,      // TCGETS
];

/// Takes all system calls that a node does not need from all threads of this process, now and
/// later. With `paths` it allows those that open, create and remove files, which [`confine_paths`]
/// restricts to one directory. No ring can be made any more.
///
/// # Errors
/// When the kernel has no seccomp, or a thread has a filter of its own.
pub fn confine_calls(paths: bool) -> Result<(), String> {
    let failed = |error: &dyn std::fmt::Display| format!("seccomp: {error}");
    let build = || -> Result<[BpfProgram; 2], seccompiler::BackendError> {
        let architecture = std::env::consts::ARCH.try_into()?;
        // The C library tells threads from processes in a structure that a filter cannot read. If
        // `clone3` is missing, it uses `clone`, whose arguments a filter can read.
        let missing = SeccompAction::Errno(libc::ENOSYS as u32);
        let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
        let clone3 = SeccompFilter::new(clone3, SeccompAction::Allow, missing, architecture)?;
        let refused = SeccompAction::Errno(libc::EPERM as u32);
        let rules = rules(paths)?;
        let all = SeccompFilter::new(rules, refused, SeccompAction::Allow, architecture)?;
        Ok([clone3.try_into()?, all.try_into()?])
    };
    // In this order: the second filter forbids adding the first.
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
    // Threads, but not processes or name spaces.
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
    // No executable memory but the program's.
    let data = || SeccompRule::new(vec![masked(2, libc::PROT_EXEC as u64, 0)?]);
    rules.insert(libc::SYS_mmap, vec![data()?]);
    rules.insert(libc::SYS_mprotect, vec![data()?]);
    // A panic ends the process this way.
    rules.insert(libc::SYS_tgkill, vec![equal(0, std::process::id().into())?]);
    let prctl = [libc::PR_SET_NAME, libc::PR_SET_PDEATHSIG, libc::PR_SET_THP_DISABLE];
    let prctl = prctl.map(|what| equal(0, what as u64));
    rules.insert(libc::SYS_prctl, prctl.into_iter().collect::<Result<_, _>>()?);
    // The allocator queries its limits.
    rules.insert(libc::SYS_prlimit64, vec![SeccompRule::new(vec![masked(2, u64::MAX, 0)?])?]);
    Ok(rules)
}

//! What a process was working on when it died. Each death is that of a process of its own: this
//! program again, with the page as its standard input.
#![cfg(not(loom))]

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use reactor::{
    Core, Killed, RuntimeConfig, killed_by, note_work_in, processors, run, work_of, work_page,
};

const VARIABLE: &str = "MILLRACE_TEST_DEATH";

/// The other process: dies, or waits to be killed, in the given way.
#[test]
fn in_another_process() {
    let Ok(how) = std::env::var(VARIABLE) else { return };
    let page = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    note_work_in(&page).unwrap();
    let config = RuntimeConfig {
        processors: processors().into_iter().cycle().take(2).collect(),
        memory: 16 << 20,
        ..RuntimeConfig::default()
    };
    let main = move |core: Core| {
        let how = how.clone();
        async move {
            if core.id() == 1 {
                // It works for another disk all the time.
                core.work_on(work_of("other"));
                return core.sleep_ns(60_000_000_000).await;
            }
            let before = core.work_on(work_of("first"));
            assert_eq!((before, core.work_on(0)), (0, work_of("first")));
            if how == "idle" {
                std::process::abort();
            }
            let worked = core.working(work_of("first"), core.sleep_ns(1_000_000));
            worked.await;
            core.working(work_of("second"), async {
                match &*how {
                    "abort" => std::process::abort(),
                    // SAFETY: none: it faults.
                    "fault" => unsafe {
                        std::ptr::without_provenance_mut::<u8>(8).write_volatile(1)
                    },
                    "stack" => println!("{}", deep(0)),
                    // SAFETY: none: it traps.
                    #[cfg(target_arch = "x86_64")]
                    "trap" => unsafe { std::arch::asm!("int3") },
                    _ => {
                        println!("waiting");
                        std::io::stdout().flush().unwrap();
                        loop {
                            std::hint::spin_loop();
                        }
                    }
                }
            })
            .await;
        }
    };
    run(&config, main).unwrap();
}

#[expect(unconditional_recursion, reason = "it ends with the stack")]
fn deep(n: u64) -> u64 {
    std::hint::black_box([n; 1000]);
    deep(n + 1) + 1
}

/// The signal by which the process ended, and what its page says.
fn died(how: &str, kill: Option<i32>) -> (i32, Option<Killed>) {
    let page: OwnedFd = work_page().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "in_another_process", "--nocapture", "--test-threads=1"])
        .env(VARIABLE, how)
        .stdin(page.try_clone().unwrap())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    if let Some(signal) = kill {
        let said = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(said.map_while(Result::ok).any(|line| line.ends_with("waiting")));
        // SAFETY: takes no pointers.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
    }
    (child.wait().unwrap().signal().unwrap(), killed_by(&page))
}

#[test]
fn the_work_of_the_core_that_died_is_known() {
    for (how, signal) in
        [("abort", libc::SIGABRT), ("fault", libc::SIGSEGV), ("stack", libc::SIGABRT)]
    {
        let work = work_of("second");
        assert_eq!(died(how, None), (signal, Some(Killed { work, signal })), "{how}");
    }
    assert_eq!(died("idle", None), (libc::SIGABRT, None));
}

/// The processor goes on after this instruction.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_trap_ends_the_process() {
    let killed = Killed { work: work_of("second"), signal: libc::SIGTRAP };
    assert_eq!(died("trap", None), (libc::SIGTRAP, Some(killed)));
}

#[test]
fn what_another_process_does_is_not_laid_at_the_work() {
    for signal in [libc::SIGABRT, libc::SIGKILL, libc::SIGTRAP] {
        assert_eq!(died("wait", Some(signal)), (signal, None));
    }
}

#[test]
fn names_have_numbers_of_their_own() {
    assert_ne!(work_of("a"), work_of("b"));
    assert_ne!(work_of(""), 0);
}

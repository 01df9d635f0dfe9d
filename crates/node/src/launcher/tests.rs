use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use reactor::{OtherProcess, Program};

use super::answers::{DeviceMemory, MoveTarget};
use super::child::{Role, spawn};
use super::*;
use crate::admin::{Commands, Request};
use crate::disks::protocol::ToLauncher;
use crate::disks::spec::DiskSpec;
use crate::disks::state::State;
use crate::ipc::channel::{Channel, Question};
use crate::ipc::frames::Limits;
use crate::upgrade::START_NS;
use crate::{Machine, Settings};

/// A short time.
const MOMENT_NS: u64 = 1_000_000;

/// A new directory for a test.
fn directory(name: &str) -> PathBuf {
    let root = std::env::temp_dir().join(format!("millrace-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&root);
    std::fs::create_dir_all(&root).unwrap();
    root
}

fn one_core() -> RuntimeConfig {
    RuntimeConfig {
        processors: vec![reactor::processors()[0]],
        memory: MEMORY_BYTES,
        driver: DriverKind::Epoll,
        ..RuntimeConfig::default()
    }
}

/// A launcher whose node is played by the test.
async fn launcher(core: &Core, root: &Path) -> (Rc<Launcher>, Rc<Child>) {
    let changed = Rc::<Event>::default();
    let node = spawn(core, Path::new("/bin/true"), Role::First, &changed).await.unwrap();
    let state = State::open(core, &root.join("state")).await.unwrap();
    let sink = Box::new(std::io::sink());
    let (log, _) = Log::start(Default::default(), "off".parse().unwrap(), sink).unwrap();
    let resources = LocalResources::new(core, &[disk(root, "asked")], Some(state));
    let beginning = Beginning {
        resources,
        admin: None,
        open: BTreeMap::new(),
        targets: BTreeMap::new(),
        node: node.clone(),
        poison: Poison::default(),
        changed,
        disks_door: None,
        store: None,
        restored: false,
    };
    let settings = Settings::from_toml("admin = 'none.sock'").unwrap();
    let config = Config::new(settings, &Machine::look()).unwrap();
    let launcher = Launcher::start(core, &config, log, Arc::default(), beginning).unwrap();
    (launcher, node)
}

/// Runs a test with a launcher, in a new directory.
fn with_launcher<F: Future<Output = ()> + 'static>(
    name: &str,
    test: impl Fn(Core, PathBuf, Rc<Launcher>) -> F + Clone + Send + 'static,
) {
    let root = directory(name);
    let place = root.clone();
    reactor::run(&one_core(), move |core| {
        let (root, test) = (place.clone(), test.clone());
        async move {
            let (launcher, _) = launcher(&core, &root).await;
            test(core, root, launcher).await;
        }
    })
    .unwrap();
    std::fs::remove_dir_all(&root).unwrap();
}

fn disk(root: &Path, name: &str) -> DiskSpec {
    let root = root.display();
    format!("name={name} uri=file:{root}/{name}.img socket={root}/{name}.sock").parse().unwrap()
}

#[test]
fn a_node_gets_what_an_operator_has_named_and_nothing_else() {
    with_launcher("launcher", |core, root, launcher| async move {
        for name in ["asked", "later", "other"] {
            let image = new_file(&root.join(format!("{name}.img")));
            image.set_len(1 << 20).unwrap();
        }
        let _channel = played(&core, &launcher, "{}");
        let node = launcher.current.borrow().clone();
        let say = async |text: &str| {
            let answer = launcher.answer(&node, &Question::of(text)).await;
            answer.map(|(_, descriptors)| descriptors.len()).map_err(|e| e.to_string())
        };
        let nobody = async |text: &str| {
            let error = say(text).await.unwrap_err();
            assert!(error.starts_with("nobody has asked for disk"), "{text}: {error}");
        };
        // A disk named at the start: an image and a socket.
        assert_eq!(say(r#"{"ask":"open","name":"asked"}"#).await, Ok(2));
        assert!(root.join("asked.sock").exists());
        // A disk that nobody has named, by any name.
        for name in ["other", "later", "", "../other", "/etc/passwd", "asked\0"] {
            for ask in ["open", "keep", "forget", "write-cache"] {
                let text = serde_json::json!({"ask": ask, "name": name}).to_string();
                nobody(&text).await;
            }
            let close = serde_json::json!({"ask": "close", "name": name}).to_string();
            assert_eq!(say(&close).await, Ok(0));
        }
        // No question takes a path.
        for text in [
            r#"{"ask":"open","name":"asked","uri":"file:/etc/passwd"}"#,
            r#"{"ask":"open","uri":"file:/etc/passwd"}"#,
            r#"{"ask":"attach","name":"other"}"#,
            r#"{"ask":"keep"}"#,
            "[]",
            "",
        ] {
            assert!(say(text).await.is_err(), "{text}");
        }
        // A named disk is not stored or forgotten without an order either.
        nobody(r#"{"ask":"keep","name":"asked"}"#).await;
        nobody(r#"{"ask":"forget","name":"asked"}"#).await;
        nobody(r#"{"ask":"prepare-moved","name":"asked"}"#).await;
        let begun = r#"{"stage":"begun","id":1,"writes_through":false}"#;
        nobody(&format!(r#"{{"ask":"prepare-transfer","name":"asked","transfer":{begun}}}"#)).await;

        // An operator's order applies to its disk, while it is being run.
        let order = Order::Attach { disk: disk(&root, "later"), incoming: false };
        launcher.orders.borrow_mut().push(order);
        nobody(r#"{"ask":"open","name":"other"}"#).await;
        assert_eq!(say(r#"{"ask":"open","name":"later"}"#).await, Ok(2));
        assert_eq!(say(r#"{"ask":"keep","name":"later"}"#).await, Ok(0));
        nobody(r#"{"ask":"forget","name":"later"}"#).await;
        launcher.orders.borrow_mut().clear();
        nobody(r#"{"ask":"keep","name":"later"}"#).await;
        let kept = launcher.resources.disks();
        let kept: Vec<_> = kept.iter().map(|named| &*named.spec.name).collect();
        assert_eq!(kept, ["asked", "later"]);
        let told = r#"{"ask":"write-cache","name":"later","told":false}"#;
        assert_eq!(say(told).await, Ok(0));
        let socket = root.join("later.sock");
        assert_eq!(launcher.resources.write_cache(&socket), Some(false));

        launcher.orders.borrow_mut().push(Order::Detach("later".into()));
        assert_eq!(say(r#"{"ask":"forget","name":"later"}"#).await, Ok(0));
        assert_eq!(say(r#"{"ask":"close","name":"later"}"#).await, Ok(0));
        assert!(!socket.exists() && launcher.resources.write_cache(&socket).is_none());
        assert_eq!(launcher.resources.disks().len(), 1);

        let other = r#"{"ask":"begin","version":1}"#;
        assert!(say(other).await.unwrap_err().contains("version 1"));
        node.kill();
    });
}

#[expect(clippy::disallowed_methods, reason = "a test's own file")]
fn new_file(path: &Path) -> std::fs::File {
    std::fs::File::create(path).unwrap()
}

#[test]
fn a_successor_that_serves_is_kept_when_the_node_before_it_has_ended() {
    with_launcher("replaced", |core, _, launcher| async move {
        let next = || spawn(&core, Path::new("/bin/true"), Role::First, &launcher.changed);
        let ended = WaitStatus::Exited(Pid::from_raw(1), 0);
        // The old node lives, so the handover has failed for another reason.
        let node = next().await.unwrap();
        node.set_serving();
        let old = next().await.unwrap();
        assert!(!launcher.has_taken_over(&old, &node).await);
        // It has ended; the successor reports a moment later that it serves, or ends, too.
        old.set_ended(ended);
        for serves in [true, false] {
            let node = next().await.unwrap();
            let (clock, later) = (core.clone(), node.clone());
            let saying = core.spawn(Class::Control, async move {
                clock.sleep_ns(3 * MOMENT_NS).await;
                match serves {
                    true => later.set_serving(),
                    false => later.set_ended(ended),
                }
            });
            assert_eq!(launcher.has_taken_over(&old, &node).await, serves);
            saying.await;
        }
    });
}

/// A serving node that the test plays: the other end of its channel, which answers every
/// question with this text.
fn played(core: &Core, launcher: &Rc<Launcher>, says: &'static str) -> Rc<Channel> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let node = Rc::new(Child::new(core, i32::MAX, ours.into(), &launcher.changed).unwrap());
    node.set_serving();
    launcher.attend(&node);
    launcher.make_current(&node);
    let limits = Limits { body_bytes: SAID_BYTES_MAX, descriptors: 9 };
    let channel = Rc::new(Channel::from_fd(core, theirs.into(), limits).unwrap());
    let ear = channel.clone();
    core.spawn(Class::Control, async move {
        while let Ok(question) = ear.next().await {
            let answer = (says.as_bytes().to_vec(), Vec::new());
            ear.answer(&question, Ok(answer)).await.unwrap();
        }
    });
    channel
}

#[test]
fn patience_with_one_disk_delays_nothing_else() {
    with_launcher("patient", |core, root, launcher| async move {
        new_file(&root.join("held.img")).set_len(1 << 20).unwrap();
        // Under another name, so that the holder is not found, which takes all patience.
        std::fs::hard_link(root.join("held.img"), root.join("asked.img")).unwrap();
        let channel = played(&core, &launcher, "{}");
        // Another process has the image.
        let held = launcher.resources.parts(&disk(&root, "held")).await.unwrap();
        let opened = Rc::new(Cell::new(false));
        let (done, asks) = (opened.clone(), channel.clone());
        core.spawn(Class::Control, async move {
            let open = ToLauncher::Open { name: "asked".into() };
            asks.ask(&open, &[]).await.unwrap();
            done.set(true);
        });
        core.sleep_ns(20 * MOMENT_NS).await;
        let listed = launcher.relay(Request::DiskList).await.unwrap();
        core.sleep_ns(20 * MOMENT_NS).await;
        assert!(listed == "{}" && !opened.get(), "it waited until that was given up");
        drop(held);
        while !opened.get() {
            core.sleep_ns(MOMENT_NS).await;
        }
    });
}

/// A device that is memory, to which a disk is being moved.
fn target(root: &Path, uri: &str) -> MoveTarget {
    let spec = DiskSpec { uri: uri.to_owned(), ..disk(root, "asked") };
    MoveTarget { spec, holes: Some(true), memory: DeviceMemory::default(), line: None }
}

#[test]
fn a_node_begins_with_what_the_one_before_was_storing() {
    with_launcher("stored", |core, root, launcher| async move {
        for nth in 1..20 {
            let channel = played(&core, &launcher, "{}");
            let node = launcher.current.borrow().clone();
            launcher
                .targets
                .borrow_mut()
                .insert("asked".to_owned(), target(&root, &format!("mem:{nth}M")));
            let moved = ToLauncher::Moved { name: "asked".into() };
            // It dies when it has asked.
            let _ = timeout(&core, MOMENT_NS / 10, channel.ask(&moved, &[])).await;
            node.stream.shutdown(Shutdown::Both).unwrap();
            node.until_it_ends().await;
            let stored = launcher.resources.disk("asked").unwrap().uri;
            assert!(launcher.targets.borrow().is_empty());
            core.sleep_ns(20 * MOMENT_NS).await;
            assert_eq!(launcher.resources.disk("asked").unwrap().uri, stored);
        }
    });
}

#[test]
fn a_disk_that_was_opened_for_a_node_that_has_ended_stays_with_the_next_one() {
    with_launcher("late", |core, root, launcher| async move {
        new_file(&root.join("asked.img")).set_len(1 << 20).unwrap();
        let channel = played(&core, &launcher, "{}");
        let node = launcher.current.borrow().clone();
        let held = launcher.resources.parts(&disk(&root, "asked")).await.unwrap();
        let open = ToLauncher::Open { name: "asked".into() };
        let _ = timeout(&core, 20 * MOMENT_NS, channel.ask(&open, &[])).await;
        assert_eq!(node.opening(), 1);
        node.stream.shutdown(Shutdown::Both).unwrap();
        node.until_it_ends().await;
        drop(held);
        while node.opening() > 0 {
            core.sleep_ns(MOMENT_NS).await;
        }
        assert!(launcher.open.borrow().is_empty());
        let _channel = played(&core, &launcher, "{}");
        let node = launcher.current.borrow().clone();
        let open = Question::of(r#"{"ask":"open","name":"asked"}"#);
        assert!(launcher.answer(&node, &open).await.is_ok());
    });
}

#[test]
fn a_node_cannot_fill_the_launchers_memory() {
    with_launcher("greedy", |core, _, launcher| async move {
        // Questions that are too long, and a second beginning.
        for again in [false, true] {
            let channel = played(&core, &launcher, "{}");
            let node = launcher.current.borrow().clone();
            let version = crate::disks::protocol::VERSION;
            let name = "x".repeat(if again { 1 } else { 70_000 });
            let ask = async |question: ToLauncher| {
                timeout(&core, 20 * MOMENT_NS, channel.ask(&question, &[])).await
            };
            match again {
                false => drop(ask(ToLauncher::Open { name }).await),
                true => {
                    ask(ToLauncher::Begin { version }).await.unwrap().unwrap();
                    drop(ask(ToLauncher::Begin { version }).await);
                }
            }
            node.until_it_ends().await;
        }
    });
}

#[test]
fn a_process_that_has_handed_over_ends_before_its_successor_is_started_again() {
    with_launcher("predecessor", |core, _, launcher| async move {
        // It ends with its input.
        let before =
            spawn(&core, Path::new("/bin/cat"), Role::First, &launcher.changed).await.unwrap();
        launcher.attend(&before);
        launcher.make_current(&before);
        let _channel = played(&core, &launcher, "{}");
        assert!(!before.has_ended());
        launcher.end_predecessor().await;
        assert!(before.has_ended());
    });
}

#[test]
fn an_upgrade_is_refused_immediately_while_disks_follow() {
    with_launcher("follow", |core, _, launcher| async move {
        let _channel = played(&core, &launcher, r#""disks are still on their way""#);
        launcher.upgrading.set(true);
        let since_ns = core.now_ns();
        let why = launcher.upgrade(Path::new("/bin/true")).await.unwrap_err();
        assert_eq!(why, "disks are still on their way");
        assert!(core.now_ns() < since_ns + START_NS / 2, "it waited for the old process");
    });
}

#[test]
fn a_node_that_may_have_disks_is_launched() {
    let wanted = |text: &str| {
        let settings = Settings::from_toml(text).unwrap();
        is_wanted(&Config::new(settings, &Machine::look()).unwrap())
    };
    let disk = "[[disk]]\nname='a'\nuri='null:1G'\nsocket='s'";
    assert!(wanted(disk) && wanted("state = 'd'") && wanted("admin = 'a.sock'"));
    assert!(!wanted(&format!("sandbox = 'off'\n{disk}")));
    assert!(wanted("data = 'd'\nsandbox = 'on'"));
}

#[test]
fn deaths_that_are_laid_at_disks_do_not_end_the_launcher() {
    let (mut deaths, poison) = (0, Poison::default());
    let disks = ["a", "b", "c", "d", "e", "f"];
    // Their deaths alternate, so the third one of a disk comes late.
    for nth in 0..3 * disks.len() as u64 {
        deaths = next_deaths(deaths, true, true);
        assert!(deaths <= DEATHS_MAX);
        poison.died_of(disks[nth as usize % disks.len()], 11, nth * MOMENT_NS);
    }
    assert_eq!(poison.all().len(), disks.len());
    // All others count.
    let nodes = 0..=DEATHS_MAX;
    assert!(nodes.fold(deaths, |deaths, _| next_deaths(deaths, true, false)) > DEATHS_MAX);
    assert_eq!(next_deaths(9, false, false), 1);
}

#[test]
fn a_launcher_ends_after_the_survivor_of_its_node_and_reaps_it() {
    let root = directory("survivor");
    let place = root.clone();
    reactor::run(&one_core(), move |core| {
        let root = place.clone();
        async move {
            let sleep = ["60"].map(Into::into).to_vec();
            let input = new_file(&root.join("input"));
            let program = Program {
                path: "/bin/sleep".into(),
                arguments: sleep,
                variables: Vec::new(),
                input: Arc::new(input.into()),
            };
            let survivor = core.start_process(program).await.unwrap().id();
            let (launcher, node) = launcher(&core, &root).await;
            node.set_survivor(OtherProcess::open(survivor).unwrap());
            launcher.stopping.set(true);
            let pid = Pid::from_raw(survivor as i32);
            let (since_ns, again) = (core.now_ns(), core.clone());
            core.spawn(Class::Control, async move {
                again.sleep_ns(20 * MOMENT_NS).await;
                kill(pid, Signal::SIGKILL).unwrap();
            });
            assert_eq!(launcher.until_the_end().await.unwrap(), 0);
            assert!(core.now_ns() >= since_ns + 20 * MOMENT_NS, "the images are still open");
            assert_eq!(waitpid(pid, None), Err(Errno::ECHILD), "nobody has waited for it");
        }
    })
    .unwrap();
    std::fs::remove_dir_all(&root).unwrap();
}

#[test]
fn a_disk_stands_still_until_the_node_has_opened_it() {
    with_launcher("resumed", |core, _, launcher| async move {
        for _ in 0..3 {
            launcher.poison.died_of("asked", 11, core.now_ns());
        }
        // What a node says if it cannot, and if it can.
        for (says, is_done) in [("\n", false), ("{}", true)] {
            let _channel = played(&core, &launcher, says);
            let resume = Request::DiskResume { name: "asked".into() };
            let done = Operators(launcher.clone()).run(resume).await;
            assert_eq!(done.is_ok(), is_done);
            assert_eq!(launcher.poison.stands_still("asked").is_none(), is_done);
        }
    });
}

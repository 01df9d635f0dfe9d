//! What has happened to a node and its disks, for operators who follow it (`millrace events`).
//!
//! The launcher keeps the events, because it outlives the node; a node without a launcher keeps its
//! own. The latest [`EVENTS_MAX`] stay. Each has a number, so a program that asks again misses
//! nothing that is still there and learns how many are gone.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use reactor::{Core, Event, timeout};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use vhost::DiskEvent;

/// How many events are kept.
const EVENTS_MAX: usize = 1024;
/// How many events one answer has at most.
const ANSWER_MAX: usize = 256;
/// How long an answer waits for an event if there is none.
const WAIT_NS: u64 = 25_000_000_000;
/// How many may wait at the same time: others need the connections of the admin socket, too.
const WAITERS_MAX: usize = 8;
/// Length of the longest text of an event, in bytes.
const TEXT_BYTES_MAX: usize = 1024;
/// Why a device has failed a request for lack of space.
const NO_SPACE: &str = "no space left";
/// Why a disk has paused that has lost its image for a time.
const LOST: &str = "another machine has used the image since this one used it";

/// What has happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub(crate) enum What {
    /// A node serves: the first one, or one after a death or an upgrade.
    Serving { process: u32 },
    /// The node has ended.
    Ended {
        process: u32,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        signal: Option<i32>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        code: Option<i32>,
    },
    /// Another program has taken over; the guests waited for the pause.
    Upgraded { program: String, process: u32, pause_us: u64 },
    /// An upgrade has failed, and the node continues.
    UpgradeFailed { program: String, why: String },
    /// A disk was added to the running node.
    Attached { disk: String, uri: String },
    /// A disk was removed from the running node.
    Detached { disk: String },
    /// A disk could not be opened.
    NotOpened { disk: String, why: String },
    /// A disk has another size.
    Resized { disk: String, old_size_bytes: u64, size_bytes: u64 },
    /// A disk or a group of disks has other limits.
    Limited {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        group: Option<String>,
    },
    /// So many events of the node were left out.
    Lost { count: u64 },
    /// A disk is being moved to another device.
    MoveBegun { disk: String, uri: String },
    /// A disk has moved; its guest waited for the pause at most.
    Moved { disk: String, uri: String, pause_us: u64 },
    /// A disk stays where it is.
    MoveFailed { disk: String, uri: String, why: String },
    /// A disk comes from another node.
    Coming { disk: String },
    /// All of a disk has come from another node.
    Came { disk: String },
    /// The guest uses a disk that has come from another node.
    Begun { disk: String },
    /// A disk that was given to another node is served here again.
    TakenBack { disk: String, uri: String },
    /// The guest of a disk that has moved to another node waits here.
    Elsewhere { disk: String, uri: String, why: String },
    /// A guest writes faster than its disk is copied: its writes are limited.
    WritesLimited { disk: String, bytes_per_second: u64 },
    /// A front end has connected; its process is 0 if it is not known.
    Connected { disk: String, process: u32 },
    /// A front end has disconnected.
    Disconnected { disk: String, process: u32 },
    /// The connection of a front end was closed by the node.
    ConnectionClosed { disk: String, process: u32, why: String },
    /// The guest has broken a ring.
    RingBroken { disk: String, ring: u16, why: String },
    /// A disk has paused, because its device has failed a request, or because another machine has
    /// used its image.
    Paused { disk: String, why: String },
    /// A disk is not served any more, because the node has died of it again and again.
    StandsStill { disk: String, why: String },
    /// The guest of a disk waits for the image's lock.
    LockAwaited { disk: String, why: String },
    /// An operator lets a disk go on that has paused or stands still.
    Resumed { disk: String },
    /// A device has failed a request.
    DeviceError { disk: String, ring: u16, request: String, offset: u64, bytes: u64, why: String },
    /// A file system has little left for the thin images on it, which may still take more.
    SpaceLow { disks: Vec<String>, available_bytes: u64, may_take_bytes: u64 },
}

/// The beginning of a text, if it is long.
fn short(text: &str) -> String {
    let mut end = text.len().min(TEXT_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

/// Why a device has failed a request.
fn reason(no_space: bool) -> String {
    if no_space { NO_SPACE } else { "an I/O error" }.to_owned()
}

impl What {
    pub fn of_disk(disk: &str, event: DiskEvent) -> What {
        let disk = disk.to_owned();
        match event {
            DiskEvent::Connected { pid } => What::Connected { disk, process: pid },
            DiskEvent::Gone { pid } => What::Disconnected { disk, process: pid },
            DiskEvent::Closed { pid, why } => What::ConnectionClosed { disk, process: pid, why },
            DiskEvent::RingBroken { ring, why } => What::RingBroken { disk, ring, why },
            DiskEvent::DeviceError { ring, kind, offset, len, no_space } => {
                let (request, why) = (kind.name().to_owned(), reason(no_space));
                What::DeviceError { disk, ring, request, offset, bytes: len, why }
            }
            DiskEvent::LockAwaited { why } => What::LockAwaited { disk, why },
            DiskEvent::Lost => What::Paused { disk, why: LOST.to_owned() },
            DiskEvent::Paused { no_space } => What::Paused { disk, why: reason(no_space) },
        }
    }

    /// The disk whose device has no space left, if this is what has happened.
    pub fn lacks_space(&self) -> Option<&str> {
        match self {
            What::Paused { disk, why } | What::DeviceError { disk, why, .. } if why == NO_SPACE => {
                Some(disk)
            }
            _ => None,
        }
    }

    /// The same, with the space of its disk.
    pub fn with_space(mut self, text: &str) -> What {
        if let What::Paused { why, .. } | What::DeviceError { why, .. } = &mut self {
            *why = format!("{why}: {text}");
        }
        self
    }

    /// Whether only the launcher knows that this has happened.
    pub fn is_of_launcher(&self) -> bool {
        matches!(
            self,
            What::Serving { .. }
                | What::Ended { .. }
                | What::Upgraded { .. }
                | What::UpgradeFailed { .. }
                | What::StandsStill { .. }
        )
    }

    /// The same with texts of bounded length.
    pub fn shortened(mut self) -> What {
        let texts: Vec<&mut String> = match &mut self {
            What::Serving { .. } | What::Ended { .. } | What::Lost { .. } => Vec::new(),
            What::Upgraded { program, .. } => vec![program],
            What::UpgradeFailed { program, why } => vec![program, why],
            What::Attached { disk, uri }
            | What::MoveBegun { disk, uri }
            | What::TakenBack { disk, uri }
            | What::Moved { disk, uri, .. } => vec![disk, uri],
            What::MoveFailed { disk, uri, why } | What::Elsewhere { disk, uri, why } => {
                vec![disk, uri, why]
            }
            What::Detached { disk }
            | What::Resumed { disk }
            | What::Resized { disk, .. }
            | What::WritesLimited { disk, .. }
            | What::Coming { disk }
            | What::Came { disk }
            | What::Begun { disk }
            | What::Connected { disk, .. }
            | What::Disconnected { disk, .. } => vec![disk],
            What::Limited { disk, group } => disk.iter_mut().chain(group).collect(),
            What::NotOpened { disk, why }
            | What::Paused { disk, why }
            | What::StandsStill { disk, why }
            | What::LockAwaited { disk, why }
            | What::ConnectionClosed { disk, why, .. }
            | What::RingBroken { disk, why, .. } => vec![disk, why],
            What::DeviceError { disk, request, why, .. } => vec![disk, request, why],
            What::SpaceLow { disks, .. } => disks.iter_mut().collect(),
        };
        texts.into_iter().for_each(|text| *text = short(text));
        self
    }
}

/// An event that was noted.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Noted {
    number: u64,
    /// When, in milliseconds since 1970.
    time_ms: u64,
    #[serde(flatten)]
    what: What,
}

/// The events, for another program.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct KeptEvents {
    log: u64,
    next: u64,
    /// As a reader gets them: another program may not know all of them.
    noted: Vec<Value>,
}

/// The latest events.
pub(crate) struct EventLog {
    core: Core,
    /// Distinguishes this log from that of another process.
    log: Cell<u64>,
    /// The number of the next event; the first one has 1.
    next: Cell<u64>,
    noted: RefCell<VecDeque<Noted>>,
    /// The number of those who wait.
    waiting: Cell<usize>,
    /// Nobody waits any more.
    closing: Cell<bool>,
    /// Notified after each change.
    changed: Event,
}

/// Counts one that waits.
struct Waits<'a>(&'a Cell<usize>);

impl Waits<'_> {
    fn new(waiting: &Cell<usize>) -> Waits<'_> {
        waiting.set(waiting.get() + 1);
        Waits(waiting)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl EventLog {
    pub fn new(core: &Core) -> EventLog {
        EventLog {
            core: core.clone(),
            log: Cell::new(core.random_u64()),
            next: Cell::new(1),
            noted: RefCell::default(),
            waiting: Cell::new(0),
            closing: Cell::new(false),
            changed: Event::new(),
        }
    }

    /// Notes what has happened now.
    pub fn note(&self, what: What) {
        let (number, time_ms) = (self.next.get(), self.core.unix_time_ms());
        let mut noted = self.noted.borrow_mut();
        if noted.len() == EVENTS_MAX {
            noted.pop_front();
        }
        noted.push_back(Noted { number, time_ms, what: what.shortened() });
        self.next.set(number + 1);
        self.changed.notify_all();
    }

    /// The events after the one with this number in a log; all that are there, if it is another
    /// log. If there is none and `wait` is set, suspends until there is one, but not for long.
    pub async fn after(&self, log: Option<&str>, number: u64, wait: bool) -> Value {
        let name = format!("{:016x}", self.log.get());
        let after = if log.is_none_or(|log| log == name) { number } else { 0 };
        let has_more = || self.next.get() > after.saturating_add(1) || self.closing.get();
        if wait && self.waiting.get() < WAITERS_MAX {
            let _waits = Waits::new(&self.waiting);
            let _ = timeout(&self.core, WAIT_NS, self.changed.wait_until(has_more)).await;
        }
        let noted = self.noted.borrow();
        let events: Vec<_> =
            noted.iter().filter(|event| event.number > after).take(ANSWER_MAX).collect();
        let first = events.first().map_or(self.next.get(), |event| event.number);
        let lost = first.saturating_sub(after.saturating_add(1));
        json!({"log": name, "lost": lost, "events": events})
    }

    /// Lets nobody wait, or lets them wait again.
    pub fn close(&self, closing: bool) {
        self.closing.set(closing);
        self.changed.notify_all();
    }

    /// Everything, for another program.
    pub fn export(&self) -> KeptEvents {
        let noted = self.noted.borrow();
        let noted = noted.iter().filter_map(|event| serde_json::to_value(event).ok()).collect();
        KeptEvents { log: self.log.get(), next: self.next.get(), noted }
    }

    /// The inverse of [`EventLog::export`].
    pub fn import(&self, kept: KeptEvents) {
        if kept.next > 0 {
            self.log.set(kept.log);
            self.next.set(kept.next);
            let noted = kept.noted.into_iter().filter_map(|one| serde_json::from_value(one).ok());
            self.noted.replace(noted.collect());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use reactor::Class;
    use reactor::sim::{SimConfig, World};

    use super::*;

    fn detached(disk: usize) -> What {
        What::Detached { disk: disk.to_string() }
    }

    /// The numbers of the events of an answer.
    fn numbers(answer: &Value) -> Vec<u64> {
        let events = answer["events"].as_array().unwrap();
        events.iter().map(|event| event["number"].as_u64().unwrap()).collect()
    }

    #[test]
    fn a_reader_gets_each_event_once_and_learns_what_it_has_missed() {
        let run = World::new(1, 1, SimConfig::default()).run(|core| async move {
            let log = Rc::new(EventLog::new(&core));
            let empty = log.after(None, 0, false).await;
            assert_eq!((numbers(&empty), &empty["lost"]), (Vec::new(), &json!(0)));
            let name = empty["log"].as_str().unwrap().to_owned();
            let waiting = {
                let (log, name) = (log.clone(), name.clone());
                core.spawn(Class::Control, async move { log.after(Some(&name), 0, true).await })
            };
            core.sleep_ns(1_000_000).await;
            log.note(detached(1));
            let woken = waiting.await;
            assert_eq!(numbers(&woken), [1]);
            assert_eq!(woken["events"][0]["event"], "detached");
            for disk in 2..=EVENTS_MAX + 10 {
                log.note(detached(disk));
            }
            let next = log.after(Some(&name), 1, true).await;
            assert_eq!(next["lost"], 9);
            assert_eq!(numbers(&next), (11..11 + ANSWER_MAX as u64).collect::<Vec<_>>());
            // What another log has numbered is nothing here.
            let all = log.after(Some("0"), 5000, true).await;
            assert_eq!(numbers(&all)[0], 11);

            let other = EventLog::new(&core);
            let mut kept = log.export();
            // An event of a program that knows more.
            kept.noted[0]["event"] = "exploded".into();
            other.import(kept);
            other.note(detached(0));
            let last = (EVENTS_MAX + 10) as u64;
            let rest = other.after(Some(&name), last, true).await;
            assert_eq!((numbers(&rest), &rest["lost"]), (vec![last + 1], &json!(0)));
            assert_eq!(numbers(&other.after(Some(&name), 0, false).await)[0], 12);
        });
        run.unwrap();
    }

    #[test]
    fn nobody_waits_for_an_event_for_ever() {
        let run = World::new(1, 1, SimConfig::default()).run(|core| async move {
            let log = Rc::new(EventLog::new(&core));
            let since = core.now_ns();
            assert!(numbers(&log.after(None, 0, true).await).is_empty());
            assert!(core.now_ns() >= since + WAIT_NS);
            log.close(true);
            let since = core.now_ns();
            assert!(numbers(&log.after(None, 0, true).await).is_empty());
            assert!(core.now_ns() < since + WAIT_NS);
        });
        run.unwrap();
    }

    #[test]
    fn a_text_is_cut_between_two_characters() {
        let why = "ä".repeat(TEXT_BYTES_MAX);
        let what = What::NotOpened { disk: "a".into(), why }.shortened();
        let expected = What::NotOpened { disk: "a".into(), why: "ä".repeat(TEXT_BYTES_MAX / 2) };
        assert_eq!(what, expected);
    }
}

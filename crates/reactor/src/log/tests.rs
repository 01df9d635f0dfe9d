#![expect(clippy::disallowed_methods, clippy::disallowed_types, reason = "real threads and files")]

use std::sync::Mutex;

use super::*;

/// A sink whose content can be seen, and which can be made to block or to fail.
#[derive(Clone, Default)]
struct Paper(Arc<State>);

#[derive(Default)]
struct State {
    bytes: Mutex<Vec<u8>>,
    blocked: AtomicBool,
    broken: AtomicBool,
}

impl Paper {
    fn block(&self, blocked: bool) {
        self.0.blocked.store(blocked, Ordering::Release);
    }

    fn breaks(&self, broken: bool) {
        self.0.broken.store(broken, Ordering::Release);
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.bytes.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Paper {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        while self.0.blocked.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_micros(100));
        }
        if self.0.broken.load(Ordering::Acquire) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.0.bytes.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn start(format: Format, level: LevelFilter) -> (Log, Writer, Paper) {
    let paper = Paper::default();
    let (log, writer) = Log::start(format, Filter::level(level), Box::new(paper.clone())).unwrap();
    (log, writer, paper)
}

const LONG: Duration = Duration::from_secs(60);

/// The text of a line after its time.
fn behind_time(line: &str) -> &str {
    let (time, rest) = line.split_at("2026-11-21T01:54:00.123456Z ".len());
    assert!(time.ends_with("Z ") && time.as_bytes()[10] == b'T', "{line}");
    rest
}

#[test]
fn lines_of_all_threads_are_written_each_threads_in_order() {
    const THREADS: usize = 4;
    const LINES: usize = if cfg!(miri) { 50 } else { LANE_LINES / 2 };
    let (log, writer, paper) = start(Format::Text, LevelFilter::INFO);
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let log = log.clone();
            std::thread::spawn(move || {
                let _entered = log.enter(Some(thread));
                for n in 0..LINES {
                    tracing::info!("line {n}");
                    tracing::debug!("not wanted");
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    // The threads are gone, and the log is stopped: what they said is there.
    drop(writer);
    assert_eq!(log.dropped(), 0);
    let text = paper.text();
    let mut next = [0; THREADS];
    for line in text.lines() {
        let rest = behind_time(line).strip_prefix("INFO  core=").unwrap();
        let (core, rest) = rest.split_once(" reactor::log::tests: line ").unwrap();
        let core: usize = core.parse().unwrap();
        assert_eq!(rest, next[core].to_string());
        next[core] += 1;
    }
    assert_eq!(next, [LINES; THREADS]);
}

#[test]
fn a_writer_that_does_not_get_on_holds_nobody_up_and_losses_are_said() {
    let (log, writer, paper) = start(Format::Text, LevelFilter::WARN);
    let _entered = log.enter(None);
    paper.block(true);
    tracing::warn!("the writer is stuck with this");
    assert!(!log.flush(Duration::from_millis(1)), "it cannot be written");
    let lines = LANE_LINES + 100;
    for n in 0..lines {
        tracing::warn!("behind it {n}");
    }
    let dropped = log.dropped();
    // The writer may have taken one ring full before it met the sink.
    assert!((100..=lines as u64).contains(&dropped), "{dropped}");
    paper.block(false);
    assert!(log.flush(LONG));
    drop(writer);
    let text = paper.text();
    assert_eq!(text.lines().count() as u64, 1 + lines as u64 - dropped + 1);
    let said = format!(
        "WARN  reactor::log: {dropped} lines of this log were dropped: it could not keep up"
    );
    assert_eq!(text.lines().filter(|line| behind_time(line) == said).count(), 1, "said once");
}

#[test]
fn a_sink_that_fails_costs_the_lines_it_refused_and_no_others() {
    let (log, writer, paper) = start(Format::Tool, LevelFilter::INFO);
    let entered = log.enter(None);
    paper.breaks(true);
    tracing::info!("lost");
    assert!(log.flush(LONG));
    assert_eq!(log.dropped(), 1);
    paper.breaks(false);
    tracing::info!("written");
    drop(entered);
    drop(writer);
    assert_eq!(
        paper.text(),
        "millrace: written\n\
         millrace: warning: 1 lines of this log were dropped: it could not keep up\n"
    );
}

#[test]
fn the_drops_of_a_thread_that_has_ended_stay_counted_once() {
    let (log, writer, paper) = start(Format::Tool, LevelFilter::INFO);
    paper.block(true);
    let thread = log.clone();
    std::thread::spawn(move || {
        let _entered = thread.enter(None);
        for _ in 0..3 * LANE_LINES {
            tracing::info!("x");
        }
    })
    .join()
    .unwrap();
    let dropped = log.dropped();
    assert!(dropped >= LANE_LINES as u64);
    paper.block(false);
    drop(writer);
    assert_eq!(log.dropped(), dropped);
    assert!(log.0.states.lock().unwrap().is_empty());
}

#[test]
fn events_are_rendered_with_their_fields() {
    let say = || {
        tracing::error!(
            file = "a b\n",
            offset = 7_u64,
            below = -1_i64,
            part = 0.5,
            none = f64::NAN,
            yes = true,
            kind = ?Some(1),
            "broken\r\nfile: \"{}\" \x1b[31m",
            "000001.sst"
        );
        tracing::warn!("alone");
        tracing::info!(only = 1);
    };
    let rendered = |format| {
        let paper = Paper::default();
        let filter = Filter::level(LevelFilter::INFO);
        tracing::dispatcher::with_default(&direct(format, filter, Box::new(paper.clone())), say);
        paper.text()
    };
    let text = rendered(Format::Text);
    let lines: Vec<&str> = text.lines().map(behind_time).collect();
    assert_eq!(
        lines,
        [
            "ERROR reactor::log::tests: broken\\r\\nfile: \"000001.sst\" \\u{1b}[31m file=\"a b\\n\" \
             offset=7 below=-1 part=0.5 none=NaN yes=true kind=Some(1)",
            "WARN  reactor::log::tests: alone",
            "INFO  reactor::log::tests:  only=1",
        ]
    );
    let text = rendered(Format::Json);
    let lines: Vec<&str> = text.lines().map(|line| line.split_once("Z\",").unwrap().1).collect();
    assert_eq!(
        lines,
        [
            r#""level":"error","target":"reactor::log::tests","message":"broken\r\nfile: \"000001.sst\" \u001b[31m","fields":{"file":"a b\n","offset":7,"below":-1,"part":0.5,"none":"NaN","yes":true,"kind":"Some(1)"}}"#,
            r#""level":"warn","target":"reactor::log::tests","message":"alone"}"#,
            r#""level":"info","target":"reactor::log::tests","fields":{"only":1}}"#,
        ]
    );
    assert!(rendered(Format::Tool).starts_with("millrace: error: broken\\r\\nfile"));
}

#[test]
fn a_long_line_is_cut_and_stays_whole_json() {
    let paper = Paper::default();
    let filter = Filter::level(LevelFilter::INFO);
    let log = direct(Format::Json, filter, Box::new(paper.clone()));
    tracing::dispatcher::with_default(&log, || {
        tracing::info!(name = "ä".repeat(LINE_MAX), number = 3, "{}", "x".repeat(10));
        tracing::info!(name = "ä", "{}", "\"".repeat(LINE_MAX));
    });
    let text = paper.text();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.iter().all(|line| line.len() < LINE_MAX + 100), "{text}");
    assert!(lines[0].ends_with("ä…\",\"number\":3}}"), "{text}");
    assert!(lines[1].ends_with("\\\"…\",\"fields\":{\"name\":\"…\"}}"), "{text}");
}

#[test]
fn lines_lost_by_a_shared_dispatcher_are_counted() {
    let (log, writer, paper) = start(Format::Tool, LevelFilter::INFO);
    let entered = log.enter(None);
    let stray = tracing::dispatcher::get_default(Clone::clone);
    let lines = 1000;
    let thread = std::thread::spawn(move || {
        tracing::dispatcher::with_default(&stray, || {
            (0..lines).for_each(|n| tracing::info!("b {n}"))
        });
    });
    (0..lines).for_each(|n| tracing::info!("a {n}"));
    thread.join().unwrap();
    drop(entered);
    drop(writer);
    let written = paper.text().lines().filter(|line| !line.contains("dropped")).count() as u64;
    assert_eq!(written + log.dropped(), 2 * lines);
}

#[test]
fn a_log_whose_output_is_not_read_does_not_block_the_exit() {
    let (log, writer, paper) = start(Format::Text, LevelFilter::INFO);
    let _entered = log.enter(None);
    paper.block(true);
    tracing::info!("this line is not written");
    drop(writer);
    assert_eq!(paper.text(), "");
}

#[test]
fn a_renamed_log_file_is_opened_again() {
    let dir = std::env::temp_dir().join(format!("millrace-log-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (path, old) = (dir.join("log"), dir.join("log.1"));
    let mut file = LogFile::open(&path).unwrap();
    file.write_all(b"one\n").unwrap();
    std::fs::rename(&path, &old).unwrap();
    file.write_all(b"two\n").unwrap();
    file.look_now().unwrap();
    file.write_all(b"three\n").unwrap();
    std::fs::remove_file(&path).unwrap();
    file.look_now().unwrap();
    file.write_all(b"four\n").unwrap();
    assert_eq!(std::fs::read_to_string(&old).unwrap(), "one\ntwo\n");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "four\n");
    // Opening keeps the contents.
    LogFile::open(&path).unwrap().write_all(b"five\n").unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "four\nfive\n");
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_log_without_the_right_to_open_files_continues_in_the_handed_files() {
    let dir = std::env::temp_dir().join(format!("millrace-next-log-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (path, old) = (dir.join("log"), dir.join("log.1"));
    let next = NextFile::default();
    let mut file = LogFile::open_once(&path, next.clone()).unwrap();
    let mut watched = LogFile::open(&path).unwrap();
    assert!(watched.renewed().unwrap().is_none());
    file.write_all(b"one\n").unwrap();
    std::fs::rename(&path, &old).unwrap();
    let renewed = watched.renewed().unwrap().unwrap().try_clone().unwrap();
    file.write_all(b"two\n").unwrap();
    next.put(renewed.into());
    file.write_all(b"three\n").unwrap();
    file.write_all(b"four\n").unwrap();
    assert_eq!(std::fs::read_to_string(&old).unwrap(), "one\ntwo\n");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "three\nfour\n");
    std::fs::remove_dir_all(&dir).unwrap();
}

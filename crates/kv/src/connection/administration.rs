//! Commands about connections and about the node: `CLIENT`, `INFO`, `CONFIG`, `LASTSAVE`. Other
//! cores are asked for their part.

use std::cmp::Reverse;
use std::rc::Rc;

use resp::{Protocol, Writer};

use crate::client::registry::{KillOrder, ListOrder};
use crate::command::args::Args;
use crate::command::commands::{ClientCommand, ClientFilter, Debug, ReplyMode, SlowLogCommand};
use crate::command::help;
use crate::connection::replies::{Length, SmallReply};
use crate::connection::session::{Session, owned};
use crate::core::slow_log::SlowCommand;
use crate::core::state::{CoreState, KvStats};
use crate::info::config_get::{self, Changed, LiveSettings};
use crate::info::{CoreReport, Report, ShardReport};
use crate::password::Password;
use crate::read::small;

impl Session {
    pub(crate) fn client_command(&mut self, command: ClientCommand<'_>) {
        match command {
            ClientCommand::Help => self.reply(|writer| help::write(help::CLIENT, writer)),
            ClientCommand::Id => {
                let id = self.client.id as i64;
                self.reply(|writer| writer.integer(id));
            }
            ClientCommand::GetName => {
                let name = self.client.name.borrow().clone();
                self.reply(
                    |writer| if name.is_empty() { writer.null() } else { writer.bulk(&name) },
                );
            }
            ClientCommand::SetName(name) => {
                *self.client.name.borrow_mut() = name.to_vec();
                self.reply(|writer| writer.ok());
            }
            ClientCommand::SetLibrary(what, word) => {
                self.client.library.borrow_mut()[what as usize] = word.to_vec();
                self.reply(|writer| writer.ok());
            }
            ClientCommand::Caching(yes) => self.caching(yes),
            ClientCommand::GetRedir => self.redirection(),
            ClientCommand::Tracking(request) => self.track(request),
            ClientCommand::TrackingInfo => self.tracking_info(),
            ClientCommand::NoEvict => self.reply(|writer| writer.ok()),
            ClientCommand::Unblock => self.reply(|writer| writer.integer(0)),
            ClientCommand::Reply(mode) => {
                match mode {
                    ReplyMode::On => (self.silent, self.skip_this) = (false, false),
                    ReplyMode::Off => self.silent = true,
                    ReplyMode::Skip => self.skip_next = !self.silent,
                }
                if mode == ReplyMode::On {
                    self.reply(|writer| writer.ok());
                }
            }
            ClientCommand::Pause { timeout_ms, all } => {
                let timeout_ns = (timeout_ms as u64).saturating_mul(1_000_000);
                let until_ns = self.state.core.now_ns().saturating_add(timeout_ns);
                self.state.node.pause_until_ns(until_ns, all);
                self.reply(|writer| writer.ok());
            }
            ClientCommand::Unpause => {
                self.state.node.end_pauses();
                self.reply(|writer| writer.ok());
            }
            ClientCommand::Info => {
                let line = self.client.describe(self.state.core.now_ns());
                self.reply(|writer| writer.verbatim(b"txt", &line));
            }
            ClientCommand::List(filter) => {
                let (state, order) = (self.state.clone(), ListOrder::new(filter));
                let (protocol, id) = (self.protocol, self.client.id);
                // This connection as it is now, with the asking command in its buffer.
                let own = self.client.describe(state.core.now_ns());
                self.small(Length::Long, async move {
                    let lists = state
                        .ask_all(move |there| there.clients.describe(&order, there.core.now_ns()))
                        .await;
                    let mut lines = lists.concat();
                    lines.sort();
                    if let Ok(at) = lines.binary_search_by_key(&id, |(id, _)| *id) {
                        lines[at].1 = own;
                    }
                    let text: Vec<u8> = lines.into_iter().flat_map(|(_, line)| line).collect();
                    let mut bytes = Vec::new();
                    Writer::new(&mut bytes, protocol).verbatim(b"txt", &text);
                    bytes.into()
                });
            }
            ClientCommand::Kill(filter) => self.kill(filter),
        }
    }

    fn kill(&mut self, filter: ClientFilter<'_>) {
        let (state, order) = (self.state.clone(), KillOrder::new(&filter, self.client.id));
        let (protocol, skip_me, old_form) = (self.protocol, filter.skip_me, filter.old_form);
        let client = self.client.clone();
        let silent = self.is_silent();
        self.small(Length::Long, async move {
            let answers = state.ask_all(move |there| there.clients.kill(&order)).await;
            let closes_asker = answers.iter().any(|answer| answer.asker) && !skip_me;
            let killed =
                answers.iter().map(|answer| answer.others).sum::<u64>() + u64::from(closes_asker);
            let mut bytes = Vec::new();
            let mut writer = Writer::new(&mut bytes, protocol);
            match (old_form, killed) {
                (true, 0) => writer.error("ERR No such client"),
                (true, _) => writer.ok(),
                (false, _) => writer.integer(killed as i64),
            }
            if closes_asker && silent {
                client.kill();
            }
            SmallReply { bytes, close: closes_asker }
        });
    }

    pub(crate) fn reset_stats(&mut self) {
        let (state, protocol) = (self.state.clone(), self.protocol);
        self.small(Length::Short, async move {
            let reset = |there: &Rc<CoreState>| {
                *there.stats.borrow_mut() = KvStats::default();
                there.commands.reset();
            };
            state.ask_all(reset).await;
            let mut bytes = Vec::new();
            Writer::new(&mut bytes, protocol).ok();
            bytes.into()
        });
    }

    pub(crate) fn config_get(&mut self, patterns: Args<'_>) {
        let node = self.state.node.clone();
        let now = self.live_settings();
        self.reply(|writer| {
            config_get::write(patterns, node.settings(), &now, node.info(), writer);
        });
    }

    fn live_settings(&self) -> LiveSettings {
        LiveSettings {
            password: self.state.password.borrow().clone(),
            writable: self.state.node.is_writable(),
            slower_than_us: self.state.slow_log.slower_than_us.get(),
            slow_log_len_max: self.state.slow_log.len_max.get(),
            tracked_keys_max: self.state.tracking.keys_max.get(),
        }
    }

    pub(crate) fn config_rewrite(&mut self) {
        let has_file = !self.state.node.info().config_file().is_empty();
        self.reply(|writer| match has_file {
            false => writer.error("ERR The server is running without a config file"),
            true => writer.error("ERR Rewriting config file: it is not written by the node"),
        });
    }

    pub(crate) fn config_set(&mut self, pairs: Args<'_>) {
        let state = self.state.clone();
        let (settings, node) = (state.node.settings(), state.node.info());
        let now = self.live_settings();
        let changed = match config_get::check(pairs, &config_get::known(settings, &now, node)) {
            Ok(changed) if changed == Changed::default() => {
                return self.reply(|writer| writer.ok());
            }
            Ok(changed) => changed,
            Err(error) => return self.reply(|writer| writer.error_bytes(&error)),
        };
        // Set here immediately, so that no new connection of this core slips through; on the other
        // cores before the reply.
        set(&state, changed.clone());
        let (asking, protocol) = (state.clone(), self.protocol);
        self.small(Length::Short, async move {
            asking.ask_all(move |there| set(there, changed.clone())).await;
            let mut bytes = Vec::new();
            Writer::new(&mut bytes, protocol).ok();
            bytes.into()
        });
    }

    pub(crate) fn slow_log(&mut self, command: SlowLogCommand) {
        let (state, protocol) = (self.state.clone(), self.protocol);
        let length = match command {
            SlowLogCommand::Get(_) => Length::Long,
            SlowLogCommand::Len | SlowLogCommand::Reset => Length::Short,
        };
        self.small(length, async move {
            let mut bytes = Vec::new();
            let len_max = state.slow_log.len_max.get();
            match command {
                SlowLogCommand::Get(count) => {
                    let mut all = state.ask_all(|there| there.slow_log.list()).await.concat();
                    all.sort_unstable_by_key(|entry| Reverse(entry.number));
                    all.truncate(count.min(len_max));
                    write_slow_log(&all, &mut Writer::new(&mut bytes, protocol));
                }
                SlowLogCommand::Len => {
                    let all = state.ask_all(|there| there.slow_log.len()).await;
                    let len = all.into_iter().sum::<usize>().min(len_max);
                    Writer::new(&mut bytes, protocol).integer(len as i64);
                }
                SlowLogCommand::Reset => {
                    state.ask_all(|there| there.slow_log.clear()).await;
                    Writer::new(&mut bytes, protocol).ok();
                }
            }
            bytes.into()
        });
    }

    pub(crate) fn memory_stats(&mut self) {
        let node = self.state.node.clone();
        let memory = node.info().memory();
        let keys = self.state.keys().unwrap_or(0);
        let budget = node.info().memory_budget_bytes();
        let ratio = memory.resident_bytes as f64 / memory.allocated_bytes.max(1) as f64;
        let numbers = [
            ("peak.allocated", memory.resident_peak_bytes),
            ("total.allocated", memory.allocated_bytes),
            ("startup.allocated", 0),
            ("keys.count", keys),
            ("allocator.allocated", memory.allocated_bytes),
            ("allocator.resident", memory.resident_bytes),
            ("maxmemory", budget),
        ];
        self.reply(|writer| {
            writer.map(numbers.len() + 1);
            for (name, number) in numbers {
                writer.bulk(name.as_bytes());
                writer.integer(i64::try_from(number).unwrap_or(i64::MAX));
            }
            writer.bulk(b"fragmentation");
            writer.double(ratio);
        });
    }

    pub(crate) fn time(&mut self) {
        let now_ms = self.state.core.unix_time_ms();
        self.reply(|writer| {
            writer.array(2);
            writer.bulk((now_ms / 1000).to_string().as_bytes());
            writer.bulk((now_ms % 1000 * 1000).to_string().as_bytes());
        });
    }

    pub(crate) fn debug(&mut self, command: Debug<'_>) {
        let (state, protocol) = (self.state.clone(), self.protocol);
        match command {
            Debug::Accepted => self.reply(|writer| writer.ok()),
            Debug::Protocol(kind) => self.reply(|writer| write_example(kind, writer)),
            Debug::Reload if !state.node.is_writable() => self.reply(|writer| writer.ok()),
            Debug::Reload => self.save(true),
            Debug::Sleep { ns } => self.small(Length::Short, async move {
                let until_ns = state.core.now_ns().saturating_add(ns);
                // A node that stops does not wait for it.
                while state.core.now_ns() < until_ns && !state.stopping.get() {
                    let left_ns = until_ns.saturating_sub(state.core.now_ns());
                    state.core.sleep_ns(left_ns.min(SLEEP_STEP_NS)).await;
                }
                let mut bytes = Vec::new();
                Writer::new(&mut bytes, protocol).ok();
                bytes.into()
            }),
            Debug::Object(key) => {
                let key = key.to_vec();
                self.small(Length::Short, async move {
                    small::describe_value(&state, &key, protocol).await.into()
                });
            }
        }
    }

    pub(crate) fn last_save(&mut self) {
        let (state, protocol) = (self.state.clone(), self.protocol);
        self.small(Length::Short, async move {
            let started_ns = state.core.now_ns() - state.started_ns;
            let started_ms = state.core.unix_time_ms().saturating_sub(started_ns / 1_000_000);
            let saved_ms =
                ShardReport::ask(&state).await.map_or(started_ms, |shard| shard.saved_ms);
            let mut bytes = Vec::new();
            Writer::new(&mut bytes, protocol).integer((saved_ms / 1000) as i64);
            bytes.into()
        });
    }

    pub(crate) fn info(&mut self, sections: Args<'_>) {
        let (state, protocol, sections) = (self.state.clone(), self.protocol, owned(sections));
        self.small(Length::Long, async move {
            let cores = state.ask_all(|there| CoreReport::of(there)).await;
            let expiry = state.reader.shared();
            let report = Report {
                node: state.node.info(),
                settings: state.node.settings(),
                cores: &cores,
                shard: ShardReport::ask_in_full(&state).await,
                memory: state.reader.db().memory(),
                keys: state.keys().unwrap_or(0),
                deadlines: expiry.map_or(0, |expiry| expiry.count()),
                expired: expiry.map_or(0, |expiry| expiry.expired()),
                unix_time_ms: state.core.unix_time_ms(),
            };
            let text = report.write(&sections);
            let mut bytes = Vec::new();
            Writer::new(&mut bytes, protocol).verbatim(b"txt", text.as_bytes());
            bytes.into()
        });
    }
}

/// How often a `DEBUG SLEEP` looks whether the node stops.
const SLEEP_STEP_NS: u64 = 50_000_000;

/// Changes settings of a core.
fn set(there: &Rc<CoreState>, changed: Changed) {
    if let Some(password) = changed.password {
        there.password.replace(Password::new(password));
    }
    if let Some(slower_than_us) = changed.slower_than_us {
        there.slow_log.slower_than_us.set(slower_than_us);
    }
    if let Some(len_max) = changed.slow_log_len_max {
        there.slow_log.len_max.set(len_max);
    }
    if let Some(keys_max) = changed.tracked_keys_max {
        there.set_tracked_keys_max(keys_max);
    }
}

fn write_slow_log(entries: &[SlowCommand], writer: &mut Writer<'_>) {
    writer.array(entries.len());
    for SlowCommand { number, unix_time_s, time_us, noted } in entries {
        writer.array(6);
        writer.integer(*number as i64);
        writer.integer(*unix_time_s as i64);
        writer.integer(i64::try_from(*time_us).unwrap_or(i64::MAX));
        writer.array(noted.args.len());
        noted.args.iter().for_each(|word| writer.bulk(word));
        writer.bulk(noted.address.as_bytes());
        writer.bulk(&noted.name);
    }
}

/// `DEBUG PROTOCOL`: Redis's example of a type.
#[expect(clippy::approx_constant, reason = "the number is Redis's")]
fn write_example(kind: &[u8], writer: &mut Writer<'_>) {
    let is = |name: &str| kind.eq_ignore_ascii_case(name.as_bytes());
    match () {
        () if is("string") => writer.bulk(b"Hello World"),
        () if is("integer") => writer.integer(12345),
        () if is("double") => writer.double(3.141),
        () if is("bignum") => writer.big_number("1234567999999999999999999999999999999"),
        () if is("null") => writer.null(),
        () if is("array") => {
            writer.array(3);
            (0..3).for_each(|number| writer.integer(number));
        }
        () if is("set") => {
            writer.set(3);
            (0..3).for_each(|number| writer.integer(number));
        }
        () if is("map") => {
            writer.map(3);
            for number in 0..3 {
                writer.integer(number);
                writer.boolean(number == 1);
            }
        }
        () if is("attrib") => {
            if writer.protocol() == Protocol::V3 {
                writer.attributes(1);
                writer.bulk(b"key-popularity");
                writer.array(2);
                writer.bulk(b"key:123");
                writer.integer(90);
            }
            writer.bulk(b"Some real reply following the attribute");
        }
        () if is("push") && writer.protocol() == Protocol::V2 => {
            writer.error("ERR RESP2 is not supported by this command");
        }
        () if is("push") => {
            writer.push(2);
            writer.bulk(b"server-cpu-usage");
            writer.integer(42);
        }
        () if is("true") => writer.boolean(true),
        () if is("false") => writer.boolean(false),
        () if is("verbatim") => writer.verbatim(b"txt", b"This is a verbatim\nstring"),
        () => writer.error(
            "ERR Wrong protocol type name. Please use one of the following: string|integer|double|bignum|null|\
             array|set|map|attrib|push|verbatim|true|false",
        ),
    }
}

//! Commands about connections and about the node: `CLIENT`, `INFO`, `CONFIG`, `LASTSAVE`. Other
//! cores are asked for their part.

use std::rc::Rc;

use resp::Writer;

use crate::client::registry::{KillOrder, ListOrder};
use crate::command::args::Args;
use crate::command::commands::{ClientCommand, ClientFilter, ReplyMode};
use crate::command::help;
use crate::connection::replies::{Length, SmallReply};
use crate::connection::session::{Session, owned};
use crate::core::state::{CoreState, KvStats};
use crate::info::config_get::{self, LiveSettings};
use crate::info::{CoreReport, Report, ShardReport};
use crate::password::Password;

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
            ClientCommand::GetRedir => self.reply(|writer| writer.integer(-1)),
            ClientCommand::TrackingInfo => self.reply(|writer| {
                writer.map(3);
                writer.bulk(b"flags");
                writer.set(1);
                writer.bulk(b"off");
                writer.bulk(b"redirect");
                writer.integer(-1);
                writer.bulk(b"prefixes");
                writer.array(0);
            }),
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
                self.state.node.pause_until_ns(0, true);
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
        let password = match config_get::check(pairs, &config_get::known(settings, &now, node)) {
            Ok(Some(password)) => Password::new(password),
            Ok(None) => return self.reply(|writer| writer.ok()),
            Err(error) => return self.reply(|writer| writer.error_bytes(&error)),
        };
        // Set here immediately, so that no new connection of this core slips through; on the other
        // cores before the reply.
        state.password.replace(password.clone());
        let (asking, protocol) = (state.clone(), self.protocol);
        self.small(Length::Short, async move {
            asking.ask_all(move |there| drop(there.password.replace(password.clone()))).await;
            let mut bytes = Vec::new();
            Writer::new(&mut bytes, protocol).ok();
            bytes.into()
        });
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
            let report = Report {
                node: state.node.info(),
                settings: state.node.settings(),
                cores: &cores,
                shard: ShardReport::ask_in_full(&state).await,
                memory: state.reader.db().memory(),
                keys: state.keys().unwrap_or(0),
                unix_time_ms: state.core.unix_time_ms(),
            };
            let text = report.write(&sections);
            let mut bytes = Vec::new();
            Writer::new(&mut bytes, protocol).verbatim(b"txt", text.as_bytes());
            bytes.into()
        });
    }
}

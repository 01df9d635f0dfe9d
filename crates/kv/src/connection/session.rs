//! One connection's conversation, without its socket.
//!
//! [`Session::work`] takes commands from the input while there is room for replies (see
//! [`Replies`]) and the node is not stopping. Commands about the connection itself are executed
//! here and in `administration`, all others through the reader and the shard.

use std::future::Future;
use std::rc::Rc;

use reactor::{Class, OneshotReceiver, oneshot};
use resp::{Parser, Progress, Protocol, Writer};

use crate::client::registry::Client;
use crate::client::write_room::WriteReservation;
use crate::command::args::Args;
use crate::command::bits::BitQuery;
use crate::command::commands::{
    Access, Ask, Command, Hello, Login, Scan, SlowLogCommand, Transaction,
};
use crate::command::describe::describe;
use crate::command::fields;
use crate::command::help;
use crate::command::parse::{Parsed, Permissions, parse};
use crate::command::range::Extent;
use crate::command::refusal::Refusal;
use crate::command::spec::CommandId;
use crate::connection::outgoing::Outgoing;
use crate::connection::replies::{Closing, Length, Replies, SmallReply};
use crate::connection::tracking::Uses;
use crate::connection::transaction::{Executing, Queue};
use crate::core::slow_log::Noted;
use crate::core::state::CoreState;
use crate::read::index;
use crate::read::small::{self, ScanOrder};
use crate::read::stream::{RangeStream, Stream};
use crate::read::stretch;
use crate::read::walk::Walk;
use crate::settings::Settings;

/// The state of one conversation.
pub(crate) struct Session {
    pub(crate) state: Rc<CoreState>,
    pub(crate) client: Rc<Client>,
    pub(crate) protocol: Protocol,
    /// `CLIENT REPLY OFF`.
    pub(crate) silent: bool,
    /// `CLIENT REPLY SKIP`: applies to the next command, or to the current one.
    pub(crate) skip_next: bool,
    pub(crate) skip_this: bool,
    /// The connection is closed while its client may still be sending.
    pub(crate) unread: bool,
    /// The client has given the password, or none was set when it connected.
    pub(crate) entered: bool,
    pub(crate) replies: Replies,
    /// Gathered writes of the commands just taken.
    pub(crate) outgoing: Outgoing,
    /// Commands executed since the last update of the counters.
    pub(super) executed: u64,
    /// The command whose time is being measured, and since when.
    metered: Option<CommandId>,
    metered_from_ns: u64,
    /// The commands since `MULTI`.
    pub(super) queue: Option<Box<Queue>>,
    /// It watches keys. The room is for the message that ends the watches.
    pub(super) watching: Option<WriteReservation>,
    /// The state of the `EXEC` at the beginning of the input.
    pub(super) executing: Executing,
    /// The command that is being executed, if it may belong into the slow log.
    noted: Option<Noted>,
    /// Length of the command at the beginning of the input, if it waits for earlier commands.
    held: Option<usize>,
    /// It waits for room for writes, or for memory for a reply of this length.
    waits_for_room: bool,
    pub(super) waits_for_reply: Option<usize>,
    /// A lookup of the length of the value that the command at the beginning of the input returns:
    /// in progress, or just finished with this result.
    lookup: Option<OneshotReceiver<usize>>,
    found_bytes: Option<usize>,
    /// Whether the connection exists to which `CLIENT TRACKING` redirects, and the question to
    /// another core.
    pub(super) target: Option<bool>,
    pub(super) target_lookup: Option<OneshotReceiver<bool>>,
    /// The keys of the transaction that is being executed.
    pub(super) uses: Uses,
    /// The next command waits for the end of a pause of writes.
    pub(crate) waits_for_pause: bool,
}

impl Session {
    pub fn new(state: &Rc<CoreState>, client: &Rc<Client>) -> Self {
        Self {
            state: state.clone(),
            client: client.clone(),
            protocol: Protocol::default(),
            silent: false,
            skip_next: false,
            skip_this: false,
            unread: false,
            entered: state.password.borrow().is_none(),
            replies: Replies::new(state, client),
            outgoing: Outgoing::default(),
            executed: 0,
            metered: None,
            metered_from_ns: 0,
            queue: None,
            watching: None,
            executing: Executing::No,
            noted: None,
            held: None,
            waits_for_room: false,
            waits_for_reply: None,
            lookup: None,
            found_bytes: None,
            target: None,
            target_lookup: None,
            uses: Uses::default(),
            waits_for_pause: false,
        }
    }

    /// Counts a call of a command, and ends the measurement of the previous commands if they were
    /// another.
    pub(super) fn meter(&mut self, command: CommandId) {
        self.state.commands.count(command, |stats| stats.calls += 1);
        if self.metered != Some(command) {
            self.stop_meter();
            self.metered = Some(command);
            self.metered_from_ns = self.state.core.now_exact_ns();
        }
    }

    /// Adds the time since the measurement began to the command's counter.
    pub(super) fn stop_meter(&mut self) {
        if let Some(command) = self.metered.take() {
            let time_ns = self.state.core.now_exact_ns().saturating_sub(self.metered_from_ns);
            self.state.commands.count(command, |stats| stats.time_ns += time_ns);
        }
    }

    /// Whether another command may be taken.
    pub fn may_take(&mut self) -> bool {
        self.replies.has_executed() || self.replies.has_room() && !self.state.stopping.get()
    }

    /// Closes the connection after an error that no command asked for.
    pub fn refuse(&mut self, text: &str) {
        self.send_writes();
        self.reply(|writer| writer.error(text));
        self.replies.closing = Closing::AfterReplies;
        self.unread = true;
        self.state.count(|stats| stats.protocol_errors += 1);
    }

    /// Takes commands from `input`, from `*consumed` on, until it may not continue or no whole
    /// command is left. Returns the number of bytes that the unfinished command at the end lacks,
    /// or `None` when there may be whole ones left.
    pub fn work(
        &mut self,
        parser: &mut Parser,
        input: &mut [u8],
        consumed: &mut usize,
    ) -> Option<usize> {
        self.waits_for_pause = false;
        let mut warmed = 0;
        let missing = loop {
            if !self.may_take() || self.state.node.paused_until_ns() > self.state.core.now_ns() {
                break None;
            }
            // Reads that wait for writes come back here each time the connection is woken.
            if *consumed >= warmed && !self.replies.is_writing() {
                warmed = *consumed + self.warm(&input[*consumed..]);
            }
            let rest = &mut input[*consumed..];
            let progress = match self.held.take() {
                Some(length) => Ok(Progress::Complete(length)),
                None => {
                    parser.set_stranger(!self.permissions().enter);
                    parser.parse(rest)
                }
            };
            match progress {
                Ok(Progress::Complete(length)) => {
                    let args = Args::new(&rest[..length], parser.args());
                    if !args.is_empty() && !self.execute(args) {
                        self.held = Some(length);
                        break None;
                    }
                    *consumed += length;
                }
                Ok(Progress::Incomplete(missing)) => break Some(missing),
                Err(error) => {
                    self.send_writes();
                    self.replies.append(|output| error.write_to(output.tail()));
                    self.replies.closing = Closing::AfterReplies;
                    self.unread = true;
                    self.state.count(|stats| stats.protocol_errors += 1);
                    break None;
                }
            }
        };
        self.send_writes();
        self.stop_meter();
        let executed = std::mem::take(&mut self.executed);
        self.state.count(|stats| stats.commands += executed);
        missing
    }

    /// Brings what the `GET`s with which the input begins will read into the processor's caches.
    /// Returns the bytes of these commands.
    fn warm(&self, input: &[u8]) -> usize {
        let mut keys = [&[][..]; lsm::WARM_MAX];
        let mut ahead = resp::gets_ahead(input);
        let mut count = 0;
        for (to, key) in keys.iter_mut().zip(ahead.by_ref()) {
            *to = key;
            count += 1;
        }
        if count > 1 {
            self.state.reader.warm(self.state.family, &keys[..count]);
        }
        ahead.bytes()
    }

    /// Whether the event it waited for has come: room for writes, memory for a reply, or the length
    /// of the reply.
    pub fn has_got_room(&mut self) -> bool {
        self.revoke_queue();
        if let Some(bytes) = self.lookup.as_ref().and_then(OneshotReceiver::try_take) {
            (self.lookup, self.found_bytes) = (None, Some(bytes));
            return true;
        }
        if let Some(found) = self.target_lookup.as_ref().and_then(OneshotReceiver::try_take) {
            (self.target_lookup, self.target) = (None, Some(found));
            return true;
        }
        if let Some(bytes) = self.waits_for_reply
            && self.replies.may_reserve(bytes)
        {
            self.waits_for_reply = None;
            return true;
        }
        if !self.waits_for_room {
            return false;
        }
        let got = self.state.writes.room.has_room(self.state.node.settings());
        if !got {
            // Other connections were quicker.
            self.state.writes.room.wait(&self.client);
        }
        self.waits_for_room = !got;
        got
    }

    /// Whether a command may be executed now. A read waits until the writes before it are visible.
    /// A write waits until the reads before it are done, and until there is room.
    pub(super) fn is_its_turn(&mut self, access: Access, heeds_pause: bool) -> bool {
        match access {
            Access::None => true,
            Access::Read => !self.replies.is_writing(),
            Access::Write | Access::Order if self.replies.is_reading() => false,
            Access::Write
                if heeds_pause
                    && self.state.node.writes_paused_until_ns() > self.state.core.now_ns() =>
            {
                self.waits_for_pause = true;
                false
            }
            Access::Write | Access::Order => {
                let has_room = self.state.writes.room.has_room(self.state.node.settings());
                if !has_room {
                    self.waits_for_room = true;
                    self.state.writes.room.wait(&self.client);
                }
                has_room
            }
        }
    }

    /// Appends a reply, unless the client wants none.
    pub(crate) fn reply(&mut self, write: impl FnOnce(&mut Writer<'_>)) {
        if self.is_silent() {
            let mut nowhere = Vec::new();
            write(&mut Writer::new(&mut nowhere, self.protocol));
            if nowhere.first() == Some(&b'-') {
                self.count_error();
            }
            return;
        }
        let protocol = self.protocol;
        let mut error = false;
        self.replies.append(|output| {
            let tail = output.tail();
            let before = tail.len();
            write(&mut Writer::new(tail, protocol));
            error = tail.get(before) == Some(&b'-');
        });
        if error {
            self.count_error();
        }
    }

    pub(super) fn count_error(&self) {
        self.state.count(|stats| stats.errors += 1);
        self.state.commands.failed(self.replies.command, 1);
    }

    pub(crate) fn is_silent(&self) -> bool {
        self.silent || self.skip_this
    }

    /// Executes a command; false when it has to wait for earlier commands.
    fn execute(&mut self, args: Args<'_>) -> bool {
        if is_http(args) {
            // What follows may be written by a web page, for a node that trusts this host.
            tracing::warn!(
                from = self.client.address_text(),
                "a client that speaks HTTP was cut off"
            );
            self.replies.closing = Closing::AfterReplies;
            return true;
        }
        let mut parsed = parse(args, self.permissions());
        if self.only_listens() {
            parsed = self.restrict(parsed);
        }
        let Parsed { command, id, name, rejected } = match self.queue.is_some() {
            true => match self.enqueue(args, parsed) {
                Some(parsed) => parsed,
                None => return true,
            },
            false => parsed,
        };
        let access = match &command {
            Ok(Command::Transaction(Transaction::Exec)) => self.exec_access(),
            Ok(command) => command.access(),
            Err(_) => Access::None,
        };
        if access != Access::Write {
            self.send_writes();
        }
        // Redis lets these go on while writes are paused.
        let saves = matches!(&command, Ok(Command::Save | Command::BackgroundSave));
        if !self.is_its_turn(access, !saves) {
            return false;
        }
        if let Ok(command) = &command
            && (self.ends_writes(command) && self.replies.is_writing()
                || !self.knows_target(command))
        {
            return false;
        }
        let Some(reply_bytes) =
            command.as_ref().map_or(Some(0), |command| self.reply_bytes(command))
        else {
            return false;
        };
        if reply_bytes > Settings::REPLY_BYTES_SMALL && !self.replies.reserve(reply_bytes) {
            self.waits_for_reply = Some(reply_bytes);
            return false;
        }
        if matches!(command, Ok(Command::Transaction(Transaction::Exec))) && !self.execute_steps() {
            return false;
        }
        self.skip_this = std::mem::take(&mut self.skip_next);
        self.client.command.set(name);
        self.replies.command = id.filter(|_| !rejected);
        self.executed += u64::from(!rejected);
        match (id, rejected) {
            (Some(id), true) => self.state.commands.count(id, |stats| stats.rejected += 1),
            (Some(id), false) => self.meter(id),
            (None, _) => self.stop_meter(),
        }
        self.note(args, id.filter(|_| !rejected));
        match command {
            Ok(command) => {
                self.enter_keys(args, id, name);
                self.execute_now(command);
            }
            Err(refusal) => {
                if refusal.ends_transaction() {
                    self.end_transaction();
                }
                self.reply(|writer| refusal.write(writer));
            }
        }
        self.end_note();
        self.replies.end_reservation();
        if self.queue.is_none() && !name.starts_with("client") {
            self.client.tracking.caching_given.set(false);
        }
        true
    }

    /// Notes a command that is about to be executed, if it may belong into the slow log.
    pub(super) fn note(&mut self, args: Args<'_>, command: Option<CommandId>) {
        let is_timed = command.is_some_and(|command| self.state.slow_log.times(command));
        self.noted = is_timed.then(|| {
            let now_ns = self.state.core.now_exact_ns();
            Noted::new(args, &self.client, now_ns)
        });
    }

    /// Ends the time of a command that was executed and not given to a task.
    pub(super) fn end_note(&mut self) {
        if let Some(noted) = self.noted.take() {
            self.state.note_slow(noted);
        }
    }

    /// An upper bound of the bytes of a command's reply, see [`Command::reply_bytes`]; `None` when
    /// the command has to wait until that is known.
    ///
    /// The value that a write returns is looked up first: once the write is made, the reply cannot
    /// be refused. If another client makes the value longer meanwhile, the reply is longer than was
    /// admitted.
    fn reply_bytes(&mut self, command: &Command<'_>) -> Option<usize> {
        if matches!(command, Command::SlowLog(SlowLogCommand::Get(_))) {
            // The cores' logs are about as long.
            return Some(self.state.slow_log.bytes() * self.state.node.cores());
        }
        let Some(key) = command.gives_old_of().filter(|_| !self.silent && !self.skip_next) else {
            return Some(command.reply_bytes());
        };
        if let Some(bytes) = self.found_bytes.take() {
            return Some(bytes);
        }
        if self.lookup.is_some() {
            return None;
        }
        if self.outgoing.leaves_long() {
            self.send_writes();
        }
        if self.replies.is_writing_long() {
            return None;
        }
        // The value exists twice for a moment: in the shard's answer and in the reply.
        let length = |found: lsm::Result<Option<lsm::Value>>| match found {
            Ok(Some(value)) => 2 * value.len(),
            // The shard meets the same error.
            Ok(None) | Err(_) => 0,
        };
        if let Some(found) = self.state.reader.get_cached(self.state.family, key) {
            return Some(length(found));
        }
        let (state, client, key) = (self.state.clone(), self.client.clone(), key.to_vec());
        let (sender, receiver) = oneshot();
        self.lookup = Some(receiver);
        self.state.core.spawn(Class::Foreground, async move {
            // The connection may have gone.
            let _ = sender.send(length(state.reader.get(state.family, &key).await));
            client.wake();
        });
        None
    }

    pub(super) fn permissions(&self) -> Permissions {
        Permissions {
            write: self.state.node.is_writable(),
            enter: self.entered || self.state.password.borrow().is_none(),
            debug: self.state.node.settings().debug_commands,
        }
    }

    pub(super) fn execute_now(&mut self, command: Command<'_>) {
        match command {
            Command::Write(command) => self.write(command),
            Command::One(key, Ask::TimeToLive(unit)) if self.state.reader.has_deadlines() => {
                let (state, key, protocol) = (self.state.clone(), key.to_vec(), self.protocol);
                self.small(Length::Short, async move {
                    small::time_to_live(&state, &key, unit, protocol).await.into()
                });
            }
            Command::One(key, ask) => {
                if !self.is_silent() {
                    self.replies.get(key, ask, self.protocol);
                }
            }
            Command::MGet(keys) => {
                if !self.is_silent() {
                    self.replies.multi_get(owned(keys), self.protocol);
                }
            }
            Command::Ping(message) if self.only_listens() => self.reply(|writer| {
                writer.array(2);
                writer.bulk(b"pong");
                writer.bulk(message.unwrap_or_default());
            }),
            Command::Ping(None) => self.reply(|writer| writer.simple("PONG")),
            Command::Ping(Some(message)) | Command::Echo(message) => {
                self.reply(|writer| writer.bulk(message));
            }
            Command::Select => self.reply(|writer| writer.ok()),
            Command::Quit => {
                self.reply(|writer| writer.ok());
                self.replies.closing = Closing::AfterReplies;
            }
            Command::Reset => self.reset(),
            Command::Auth(login) => self.auth(login),
            Command::Save | Command::BackgroundSave if !self.state.node.is_writable() => {
                // Nothing was written that could be lost.
                self.reply(|writer| writer.ok());
            }
            Command::Save => self.save(true),
            Command::BackgroundSave => self.save(false),
            Command::LastSave => self.last_save(),
            Command::ShutDown => {
                self.replies.closing = Closing::AfterReplies;
                self.state.node.info().shut_down();
            }
            Command::Transaction(command) => self.transaction(command),
            Command::ConfigRewrite => self.config_rewrite(),
            Command::ConfigSet(pairs) => self.config_set(pairs),
            Command::Hello(hello) => self.hello(hello),
            Command::Client(command) => self.client_command(command),
            Command::Describe(question) => self.reply(|writer| describe(question, writer)),
            Command::ConfigGet(patterns) => self.config_get(patterns),
            Command::ConfigHelp => self.reply(|writer| help::write(help::CONFIG, writer)),
            Command::ConfigResetStat => self.reset_stats(),
            Command::DbSize => self.db_size(),
            Command::Info(sections) => self.info(sections),
            Command::Say(said) => self.reply(|writer| said.write(writer)),
            Command::Subscribe(channels) => self.subscribe(channels),
            Command::Unsubscribe(channels) => self.unsubscribe(channels),
            Command::Time => self.time(),
            Command::MemoryStats => self.memory_stats(),
            Command::SlowLog(command) => self.slow_log(command),
            Command::Debug(command) => self.debug(command),
            Command::Dump(key) => {
                let (state, key, protocol) = (self.state.clone(), key.to_vec(), self.protocol);
                self.small(Length::Long, async move {
                    small::dump(&state, &key, protocol).await.into()
                });
            }
            Command::Lcs(a, b, options) => {
                let (state, protocol) = (self.state.clone(), self.protocol);
                let keys = [a.to_vec(), b.to_vec()];
                self.small(Length::Long, async move {
                    small::lcs(&state, keys, options, protocol).await.into()
                });
            }
            Command::Bits(key, query) => self.bits(key, query),
            Command::Fields(args) => self.fields(args),
            Command::Exists(keys) => {
                let (state, keys) = (self.state.clone(), owned(keys));
                let protocol = self.protocol;
                self.small(Length::Short, async move {
                    small::exists(&state, keys, protocol).await.into()
                });
            }
            Command::Scan(scan) => self.scan(scan),
            Command::RandomKey => {
                let (state, protocol) = (self.state.clone(), self.protocol);
                self.small(Length::Short, async move {
                    small::random_key(&state, protocol).await.into()
                });
            }
            Command::Keys(pattern) => {
                self.walk(Walk::matching(&self.state, Some(pattern)), Extent::KEYS);
            }
            Command::Index(query) => {
                let (state, protocol) = (self.state.clone(), self.protocol);
                let page = index::Page::of(query);
                self.small(Length::Bulk, async move {
                    index::read(&state, page, protocol).await.into()
                });
            }
            Command::Stretch(query) => {
                let (state, client, protocol) =
                    (self.state.clone(), self.client.clone(), self.protocol);
                let enters = client.tracking.enters_keys();
                self.small(Length::Bulk, async move {
                    stretch::read(&state, &client, query, enters, protocol).await.into()
                });
            }
            Command::Range(query) => {
                self.walk(Walk::range(&self.state, &query), query.extent);
            }
        }
    }

    /// Starts a task that makes a reply. It runs even if its reply is not wanted, because it may
    /// have effects. The number of such tasks is bounded in either case.
    pub(crate) fn small(
        &mut self,
        length: Length,
        make: impl Future<Output = SmallReply> + 'static,
    ) {
        let class = match length {
            Length::Short | Length::Long => Class::Foreground,
            Length::Bulk => Class::Bulk,
        };
        let task = match self.noted.take() {
            None => self.state.core.spawn(class, make),
            Some(noted) => {
                let state = self.state.clone();
                self.state.core.spawn(class, async move {
                    let reply = make.await;
                    state.note_slow(noted);
                    reply
                })
            }
        };
        self.replies.task(task, length, self.is_silent());
    }

    /// Sends the keys of a walk, and their values if wanted.
    fn walk(&mut self, walk: Walk, extent: Extent) {
        if !self.is_silent() {
            self.replies.noted = self.noted.take();
            let stream = RangeStream::new(&self.state, walk, extent, self.protocol);
            self.replies.stream(Stream::Range(stream));
        }
    }

    fn scan(&mut self, scan: Scan<'_>) {
        let (state, protocol) = (self.state.clone(), self.protocol);
        let order = ScanOrder {
            cursor: scan.cursor,
            pattern: scan.pattern.map(<[u8]>::to_vec),
            count: scan.count,
            of_our_type: scan.of_our_type,
        };
        self.small(Length::Long, async move { small::scan(&state, order, protocol).await.into() });
    }

    fn bits(&mut self, key: &[u8], query: BitQuery) {
        let (state, protocol) = (self.state.clone(), self.protocol);
        if let Some(Ok(value)) = state.reader.get_cached(state.family, key)
            && small::is_quick(value.as_deref())
        {
            state.count_hit(value.is_some());
            return self.reply(|writer| small::write_bits(value.as_deref(), query, writer));
        }
        let key = key.to_vec();
        self.small(Length::Short, async move {
            small::bits(&state, &key, query, protocol).await.into()
        });
    }

    fn fields(&mut self, args: Args<'_>) {
        let (state, key, protocol) = (self.state.clone(), args.get(1).to_vec(), self.protocol);
        let operations = fields::parse(args).unwrap_or_default();
        self.small(Length::Short, async move {
            small::fields(&state, &key, operations, protocol).await.into()
        });
    }

    fn db_size(&mut self) {
        let keys = self.state.keys();
        self.reply(|writer| match keys {
            Ok(keys) => writer.integer(i64::try_from(keys).unwrap_or(i64::MAX)),
            Err(error) => small::write_error(&error, writer),
        });
    }

    fn auth(&mut self, login: Login<'_>) {
        let outcome = self.log_in(login);
        self.reply(|writer| match outcome {
            Ok(()) => writer.ok(),
            Err(refusal) => refusal.write(writer),
        });
    }

    fn reset(&mut self) {
        self.end_transaction();
        self.state.end_tracking(&self.client);
        self.client.tracking.subscribed.set(false);
        self.set_protocol(Protocol::V2);
        self.client.name.borrow_mut().clear();
        (self.silent, self.skip_next) = (false, false);
        self.entered = self.state.password.borrow().is_none();
        self.reply(|writer| writer.simple("RESET"));
    }

    fn set_protocol(&mut self, protocol: Protocol) {
        if protocol != self.protocol {
            // They were made for the one before.
            self.send_pushes(false);
        }
        self.protocol = protocol;
        self.client.protocol.set(protocol);
    }

    fn hello(&mut self, hello: Hello<'_>) {
        let entered = match hello.login {
            Some(login) => self.log_in(login),
            None if self.permissions().enter => Ok(()),
            None => Err(NOT_ENTERED),
        };
        if let Err(refusal) = entered {
            return self.reply(|writer| refusal.write(writer));
        }
        if let Some(name) = hello.name {
            *self.client.name.borrow_mut() = name.to_vec();
        }
        if let Some(protocol) = hello.protocol {
            self.set_protocol(protocol);
        }
        let (id, protocol) = (self.client.id as i64, self.protocol);
        let node = self.state.node.clone();
        let version = &node.settings().redis_version;
        self.reply(|writer| {
            writer.map(7);
            writer.bulk(b"server");
            writer.bulk(b"redis");
            writer.bulk(b"version");
            writer.bulk(version.as_bytes());
            writer.bulk(b"proto");
            writer.integer(protocol.number());
            writer.bulk(b"id");
            writer.integer(id);
            writer.bulk(b"mode");
            writer.bulk(b"standalone");
            writer.bulk(b"role");
            writer.bulk(b"master");
            writer.bulk(b"modules");
            writer.array(0);
        });
    }

    /// Checks a password. If none is set, the default user may log in with any.
    fn log_in(&mut self, login: Login<'_>) -> Result<(), Refusal<'static>> {
        let password = self.state.password.borrow();
        let passes = match (&*password, login.user) {
            (None, None) => {
                return Err(Refusal::Text(
                    "ERR AUTH <password> called without any password configured for the default \
                     user. Are you sure your configuration is correct?",
                ));
            }
            (_, Some(user)) if user != b"default" => false,
            (None, Some(_)) => true,
            (Some(password), _) => password.is(login.password),
        };
        if !passes {
            return Err(WRONG_PASSWORD);
        }
        drop(password);
        self.entered = true;
        Ok(())
    }
}

const NOT_ENTERED: Refusal<'static> = Refusal::Text(
    "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO AUTH <user> <pass> \
     option can be used to authenticate the client and select the RESP protocol version at the same time",
);

const WRONG_PASSWORD: Refusal<'static> =
    Refusal::Text("WRONGPASS invalid username-password pair or user is disabled.");

/// Copies of the arguments, which outlive the connection's buffer.
pub(crate) fn owned(args: Args<'_>) -> Vec<Vec<u8>> {
    args.iter().map(<[u8]>::to_vec).collect()
}

/// Whether a command is a line of an HTTP request that can carry commands in its body, as Redis
/// finds it: `POST` or `Host:`.
fn is_http(args: Args<'_>) -> bool {
    let name = args.get(0);
    name.eq_ignore_ascii_case(b"post") || name.eq_ignore_ascii_case(b"host:")
}

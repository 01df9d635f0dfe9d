//! What a connection says and means, without its socket: commands in, replies out, in order.
//!
//! 1. [`Session::work`] takes commands from the input as long as it may. What needs no disk is executed at once, a
//!    read whose block is in memory included: nothing is allocated for it.
//! 2. Everything else becomes a task, and its place in the queue of `later` replies. Replies behind it queue up too,
//!    so the order is the client's. Up to `reads_max` reads are under way at once.
//! 3. [`Session::collect`] moves what is ready from the queue's front to the output.
//!
//! Nothing is taken from the input while the output is full, while a reply of unbounded size is being made (there is
//! at most one), or while the node pauses or stops.

use std::cell::Cell;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use lsm::Value;
use reactor::{Class, JoinHandle};
use resp::{Parser, Progress, Protocol, Writer};

use crate::args::Args;
use crate::client::{Client, KillOrder, ListOrder};
use crate::command::{Ask, ClientCommand, ClientFilter, Command, Hello, ReplyMode, parse};
use crate::config_get;
use crate::describe::describe;
use crate::help;
use crate::info::{CoreReport, Report};
use crate::output::Output;
use crate::reads::{self, ScanOrder};
use crate::refusal::Refusal;
use crate::state::{CoreState, FAMILY, KvStats, Share};
use crate::stream::{KEYS_PER_LOOKUP, LookupStream, Piece, RangeStream, Rest, Stream};
use crate::walk::Walk;

/// Reads that may be under way at once however large the values are.
const READS_MIN: usize = 4;

/// A reply that is not yet in the output.
enum Later {
    /// Ready, behind others that are not.
    Ready(Output),
    /// A question about one key.
    One { task: JoinHandle<Read>, ask: Ask, protocol: Protocol },
    /// The values of some keys.
    Some { task: JoinHandle<ReadSome>, protocol: Protocol, keys: usize },
    /// A reply of bounded size.
    Small(JoinHandle<SmallReply>),
    /// The next piece of a reply of any size.
    Piece(JoinHandle<Piece>),
    /// Such a reply, waiting for its reader.
    Parked(Box<Stream>),
}

type Answer = lsm::Result<Option<Value>>;

/// How a read ended that was started ahead of its turn.
enum Read {
    /// With the place it takes in the window.
    Answer(Answer, usize),
    /// What it found would not fit beside what the others found; it is read again when its turn has come.
    Again(Vec<u8>),
}

/// The same for several keys at once.
enum ReadSome {
    Answers(Vec<Answer>, usize),
    Again(Vec<Vec<u8>>),
}

/// The bytes of values that one connection's reads have found and that wait for their turn. Nobody knows before a
/// read how much it will find, so what does not fit is dropped and read again later.
#[derive(Clone, Default)]
struct Window(Rc<Cell<usize>>);

impl Window {
    /// Keeps a place for these answers; not if they do not fit, or if memory was short for one of them.
    fn admit(&self, answers: &[Answer], bytes_max: usize) -> Option<usize> {
        let short = answers
            .iter()
            .any(|answer| matches!(answer, Err(error) if error.kind() == lsm::Kind::Memory));
        let size = answers.iter().flatten().flatten().map(|value| value.len()).sum();
        let held = self.0.get();
        let alone = held == 0 && answers.len() == 1;
        if short || (!alone && held + size > bytes_max) {
            return None;
        }
        self.0.set(held + size);
        Some(size)
    }

    /// Gives a place back.
    fn leave(&self, size: usize) {
        self.0.set(self.0.get() - size);
    }
}

struct SmallReply {
    bytes: Vec<u8>,
    /// The connection has ended itself.
    close: bool,
}

/// Why no more commands are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closing {
    /// Not at all.
    No,
    /// The replies under way are still to be sent.
    AfterReplies,
    /// At once: what would be sent is not true.
    Now,
}

/// One connection's conversation.
pub(crate) struct Session {
    state: Rc<CoreState>,
    client: Rc<Client>,
    protocol: Protocol,
    /// `CLIENT REPLY OFF`.
    silent: bool,
    /// `CLIENT REPLY SKIP`: the next command, and the one being executed.
    skip_next: bool,
    skip_this: bool,
    pub output: Output,
    later: VecDeque<Later>,
    later_bytes: usize,
    reads: usize,
    /// The largest value read lately, which decides how many reads may be under way.
    value_bytes: usize,
    window: Window,
    streaming: bool,
    pub closing: Closing,
    unsent: Share,
    pinned: Share,
    /// Bytes and pinned bytes being sent.
    pub sending_bytes: usize,
    pub sending_pinned_bytes: usize,
    slow: bool,
}

impl Drop for Session {
    fn drop(&mut self) {
        for later in self.later.drain(..) {
            match later {
                Later::One { task, .. } => task.cancel(),
                Later::Some { task, .. } => task.cancel(),
                Later::Small(task) => task.cancel(),
                Later::Piece(task) => task.cancel(),
                Later::Ready(_) | Later::Parked(_) => {}
            }
        }
    }
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
            output: Output::default(),
            later: VecDeque::new(),
            later_bytes: 0,
            reads: 0,
            value_bytes: 0,
            window: Window::default(),
            streaming: false,
            closing: Closing::No,
            unsent: state.unsent_bytes.share(),
            pinned: state.pinned_bytes.share(),
            sending_bytes: 0,
            sending_pinned_bytes: 0,
            slow: false,
        }
    }

    /// Bytes of replies that are made and not yet sent.
    pub fn unsent_bytes(&self) -> usize {
        self.sending_bytes + self.output.len() + self.later_bytes
    }

    /// Of these, those that nothing but the client's reading holds up.
    fn sendable_bytes(&self) -> usize {
        self.sending_bytes + self.output.len()
    }

    /// Whether replies are still being made.
    pub fn is_busy(&self) -> bool {
        !self.later.is_empty()
    }

    /// Whether another command may be taken.
    pub fn may_take(&mut self) -> bool {
        let slow = self.unsent_bytes() > self.state.unsent_bytes_max();
        if slow && !self.slow {
            self.state.count(|stats| stats.slow_readers += 1);
        }
        self.slow = slow;
        !slow
            && !self.streaming
            && self.closing == Closing::No
            && self.reads < self.reads_max()
            && !self.state.stopping.get()
    }

    /// Fewer reads at once where values are large, so that what they bring stays about as large as the output may be.
    fn reads_max(&self) -> usize {
        let settings = self.state.shared.settings();
        let fitting = settings.unsent_bytes_max / self.value_bytes.max(1);
        settings.reads_max.min(fitting.max(READS_MIN))
    }

    /// Tells the core what this connection holds.
    pub fn account(&mut self) {
        self.unsent.set(self.unsent_bytes());
        self.pinned.set(self.output.pinned_bytes() + self.sending_pinned_bytes);
        self.client.unsent_bytes.set(self.unsent_bytes());
    }

    /// Ends the connection behind an error that nobody asked for.
    pub fn refuse(&mut self, text: &str) {
        self.reply(|writer| writer.error(text));
        self.closing = Closing::AfterReplies;
    }

    /// Takes commands from `input`, from `*consumed` on, until it may not or there is no whole one. Returns how many
    /// bytes the unfinished command at the end still lacks, or `None` when there may be whole ones left.
    pub fn work(
        &mut self,
        parser: &mut Parser,
        input: &mut [u8],
        consumed: &mut usize,
    ) -> Option<usize> {
        let mut commands = 0;
        let missing = loop {
            if !self.may_take() {
                break None;
            }
            let rest = &mut input[*consumed..];
            match parser.parse(rest) {
                Ok(Progress::Complete(length)) => {
                    let args = Args::new(&rest[..length], parser.args());
                    *consumed += length;
                    if !args.is_empty() {
                        commands += 1;
                        self.execute(args);
                    }
                }
                Ok(Progress::Incomplete(missing)) => break Some(missing),
                Err(error) => {
                    self.append(|output| error.write_to(output.tail()));
                    self.closing = Closing::AfterReplies;
                    self.state.count(|stats| stats.protocol_errors += 1);
                    break None;
                }
            }
        };
        self.state.count(|stats| stats.commands += commands);
        missing
    }

    /// Appends a reply that is ready, behind those that are not.
    #[inline]
    fn append(&mut self, write: impl FnOnce(&mut Output)) {
        if self.later.is_empty() {
            return write(&mut self.output);
        }
        if !matches!(self.later.back(), Some(Later::Ready(_))) {
            self.later.push_back(Later::Ready(Output::default()));
        }
        if let Some(Later::Ready(output)) = self.later.back_mut() {
            let before = output.len();
            write(output);
            self.later_bytes += output.len() - before;
        }
    }

    /// Writes a reply that is ready, unless the client wants none.
    fn reply(&mut self, write: impl FnOnce(&mut Writer<'_>)) {
        if self.is_silent() {
            let mut nowhere = Vec::new();
            write(&mut Writer::new(&mut nowhere, self.protocol));
            return;
        }
        let protocol = self.protocol;
        let mut error = false;
        self.append(|output| {
            let tail = output.tail();
            let before = tail.len();
            write(&mut Writer::new(tail, protocol));
            error = tail.get(before) == Some(&b'-');
        });
        if error {
            self.state.count(|stats| stats.errors += 1);
        }
    }

    fn is_silent(&self) -> bool {
        self.silent || self.skip_this
    }

    fn execute(&mut self, args: Args<'_>) {
        self.skip_this = std::mem::take(&mut self.skip_next);
        let command = match parse(args) {
            Ok(command) => command,
            Err(refusal) => return self.reply(|writer| refusal.write(writer)),
        };
        self.client.command.set(command.name());
        match command {
            Command::One(key, ask) => self.read_one(key, ask),
            Command::MGet(keys) => self.read_some(keys),
            Command::Ping(None) => self.reply(|writer| writer.simple("PONG")),
            Command::Ping(Some(message)) | Command::Echo(message) => {
                self.reply(|writer| writer.bulk(message));
            }
            Command::Select => self.reply(|writer| writer.ok()),
            Command::Quit => {
                self.reply(|writer| writer.ok());
                self.closing = Closing::AfterReplies;
            }
            Command::Reset => self.reset(),
            Command::Auth { user } => self.reply(|writer| match user {
                None => writer.error(
                    "ERR AUTH <password> called without any password configured for the default \
                     user. Are you sure your configuration is correct?",
                ),
                Some(b"default") => writer.ok(),
                Some(_) => WRONG_PASSWORD.write(writer),
            }),
            Command::Hello(hello) => self.hello(hello),
            Command::Client(command) => self.client_command(command),
            Command::Describe(question) => self.reply(|writer| describe(question, writer)),
            Command::ConfigGet(patterns) => {
                let shared = self.state.shared.clone();
                self.reply(|writer| {
                    let (settings, node) = (shared.settings(), shared.node());
                    config_get::write(patterns, settings, shared.cores(), node, writer);
                });
            }
            Command::ConfigHelp => self.reply(|writer| help::write(help::CONFIG, writer)),
            Command::ConfigResetStat => self.reset_stats(),
            Command::DbSize => {
                let keys = self.state.reader.approximate_keys(FAMILY);
                self.reply(|writer| match keys {
                    Ok(keys) => writer.integer(i64::try_from(keys).unwrap_or(i64::MAX)),
                    Err(error) => reads::write_error(&error, writer),
                });
            }
            Command::Info(sections) => self.info(sections),
            Command::Exists(keys) => {
                let (state, keys) = (self.state.clone(), owned(keys));
                let protocol = self.protocol;
                self.small(Class::Foreground, async move {
                    reads::exists(&state, keys, protocol).await.into()
                });
            }
            Command::Scan(scan) => {
                let (state, protocol) = (self.state.clone(), self.protocol);
                let order = ScanOrder {
                    cursor: scan.cursor,
                    pattern: scan.pattern.map(<[u8]>::to_vec),
                    count: scan.count,
                    of_our_type: scan.of_our_type,
                };
                self.small(Class::Foreground, async move {
                    reads::scan(&state, order, protocol).await.into()
                });
            }
            Command::RandomKey => {
                let (state, protocol) = (self.state.clone(), self.protocol);
                self.small(Class::Foreground, async move {
                    reads::random_key(&state, protocol).await.into()
                });
            }
            Command::Keys(pattern) => {
                let walk = Walk::matching(&self.state, Some(pattern));
                self.stream(Stream::Range(RangeStream::new(walk, false, None, self.protocol)));
            }
            Command::Range(query) => {
                let walk = Walk::range(&self.state, &query);
                let (values, limit) = (query.values, query.limit);
                self.stream(Stream::Range(RangeStream::new(walk, values, limit, self.protocol)));
            }
        }
    }

    fn read_one(&mut self, key: &[u8], ask: Ask) {
        if self.is_silent() {
            return;
        }
        let protocol = self.protocol;
        match self.state.reader.get_cached(FAMILY, key) {
            Some(answer) => {
                self.state.count(|stats| {
                    stats.reads_cached += 1;
                    hit_or_miss(&answer, stats);
                });
                let state = self.state.clone();
                self.append(|output| write_one(&state, output, &answer, ask, protocol));
            }
            None => {
                self.state.count(|stats| stats.reads_waited += 1);
                let (state, key) = (self.state.clone(), key.to_vec());
                let window = self.window.clone();
                let task = self.state.core.spawn(Class::Foreground, async move {
                    let answer = state.reader.get(FAMILY, &key, None).await;
                    let bytes_max = state.shared.settings().unsent_bytes_max;
                    match window.admit(std::slice::from_ref(&answer), bytes_max) {
                        Some(held) => Read::Answer(answer, held),
                        None => Read::Again(key),
                    }
                });
                self.reads += 1;
                self.later.push_back(Later::One { task, ask, protocol });
            }
        }
    }

    fn read_some(&mut self, keys: Args<'_>) {
        if self.is_silent() {
            return;
        }
        let (keys, protocol) = (owned(keys), self.protocol);
        let bytes_max = self.state.shared.settings().unsent_bytes_max;
        if keys.len() > KEYS_PER_LOOKUP || keys.len() * self.value_bytes > bytes_max {
            let stream = LookupStream::new(&self.state, keys, protocol);
            return self.stream(Stream::Lookup(stream));
        }
        let (state, window, count) = (self.state.clone(), self.window.clone(), keys.len());
        let task = self.state.core.spawn(Class::Foreground, async move {
            let answers = {
                let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
                state.reader.multi_get(FAMILY, &keys, None).await
            };
            match window.admit(&answers, bytes_max) {
                Some(held) => ReadSome::Answers(answers, held),
                None => ReadSome::Again(keys),
            }
        });
        self.reads += count;
        self.later.push_back(Later::Some { task, protocol, keys: count });
    }

    /// Starts a task that makes a reply of bounded size. It runs also when its reply is not wanted: it may do more
    /// than reply.
    fn small(&mut self, class: Class, make: impl Future<Output = SmallReply> + 'static) {
        let task = self.state.core.spawn(class, make);
        if !self.is_silent() {
            self.reads += 1;
            self.later.push_back(Later::Small(task));
        }
    }

    fn stream(&mut self, stream: Stream) {
        if self.is_silent() {
            return;
        }
        self.streaming = true;
        let task = self.next_piece(Box::new(stream));
        self.later.push_back(task);
    }

    fn next_piece(&self, stream: Box<Stream>) -> Later {
        Later::Piece(self.state.core.spawn(Class::Background, async move { stream.next().await }))
    }

    /// Moves what is ready from the front of the queue to the output; true when anything moved.
    pub fn collect(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        while let Some(front) = self.later.front_mut() {
            // What is ready moves; what has just been found waits for room, where it counts as little as it can.
            let ready = matches!(front, Later::Ready(_) | Later::Parked(_));
            let sendable = self.sending_bytes + self.output.len();
            if !ready && sendable > self.state.unsent_bytes_max() {
                break;
            }
            match front {
                Later::Ready(_) => {
                    if let Some(Later::Ready(output)) = self.later.pop_front() {
                        self.later_bytes -= output.len();
                        self.output.append(output);
                    }
                }
                Later::One { task, ask, protocol } => {
                    match Pin::new(&mut *task).poll(cx) {
                        Poll::Pending => break,
                        Poll::Ready(Read::Again(key)) => {
                            let reader = self.state.reader.clone();
                            // Now it is its turn: whatever it finds goes out.
                            *task = self.state.core.spawn(Class::Foreground, async move {
                                Read::Answer(reader.get(FAMILY, &key, None).await, 0)
                            });
                        }
                        Poll::Ready(Read::Answer(answer, held)) => {
                            self.window.leave(held);
                            let (ask, protocol) = (*ask, *protocol);
                            self.later.pop_front();
                            self.reads -= 1;
                            self.state.count(|stats| hit_or_miss(&answer, stats));
                            self.saw(std::slice::from_ref(&answer));
                            write_one(&self.state, &mut self.output, &answer, ask, protocol);
                        }
                    }
                }
                Later::Some { task, protocol, keys } => {
                    let Poll::Ready(found) = Pin::new(task).poll(cx) else { break };
                    let (protocol, keys) = (*protocol, *keys);
                    self.later.pop_front();
                    self.reads -= keys;
                    match found {
                        ReadSome::Again(keys) => {
                            let stream = LookupStream::of_large(&self.state, keys, protocol);
                            let task = self.next_piece(Box::new(Stream::Lookup(stream)));
                            self.later.push_front(task);
                        }
                        ReadSome::Answers(answers, held) => {
                            self.window.leave(held);
                            self.state.count(|stats| {
                                answers.iter().for_each(|answer| hit_or_miss(answer, stats));
                            });
                            self.saw(&answers);
                            let mut writer = Writer::new(self.output.tail(), protocol);
                            reads::write_values(&answers, &mut writer);
                        }
                    }
                }
                Later::Small(task) => {
                    let Poll::Ready(reply) = Pin::new(task).poll(cx) else { break };
                    self.later.pop_front();
                    self.reads -= 1;
                    self.output.tail().extend_from_slice(&reply.bytes);
                    if reply.close {
                        self.later.clear();
                        self.later_bytes = 0;
                        self.closing = Closing::AfterReplies;
                    }
                }
                Later::Piece(task) => {
                    let Poll::Ready(piece) = Pin::new(task).poll(cx) else { break };
                    self.output.tail().extend_from_slice(&piece.bytes);
                    match piece.rest {
                        Rest::Done => {
                            self.later.pop_front();
                            self.streaming = self.later.iter().any(is_stream);
                        }
                        Rest::Broken => {
                            self.later.pop_front();
                            self.closing = Closing::Now;
                        }
                        Rest::More(mut stream) => {
                            if self.sendable_bytes() <= self.state.unsent_bytes_max() {
                                let next = self.next_piece(stream);
                                self.later[0] = next;
                            } else {
                                stream.park();
                                self.state.count(|stats| stats.slow_readers += 1);
                                self.later[0] = Later::Parked(stream);
                            }
                        }
                    }
                }
                Later::Parked(_) => {
                    // Half empty before it goes on, so that it does not stop and go with every piece.
                    if self.sendable_bytes() > self.state.unsent_bytes_max() / 2 {
                        break;
                    }
                    if let Some(Later::Parked(stream)) = self.later.pop_front() {
                        let next = self.next_piece(stream);
                        self.later.push_front(next);
                    }
                }
            }
            moved = true;
        }
        moved
    }

    /// Remembers how large values are; forgets slowly.
    fn saw(&mut self, answers: &[Answer]) {
        for answer in answers {
            if let Ok(Some(value)) = answer {
                self.value_bytes = value.len().max(self.value_bytes - self.value_bytes / 16);
            }
        }
    }

    fn reset(&mut self) {
        self.set_protocol(Protocol::V2);
        self.client.name.borrow_mut().clear();
        (self.silent, self.skip_next, self.skip_this) = (false, false, false);
        self.reply(|writer| writer.simple("RESET"));
    }

    fn set_protocol(&mut self, protocol: Protocol) {
        self.protocol = protocol;
        self.client.protocol.set(protocol);
    }

    fn hello(&mut self, hello: Hello<'_>) {
        if hello.user.is_some_and(|user| user != b"default") {
            return self.reply(|writer| WRONG_PASSWORD.write(writer));
        }
        if let Some(name) = hello.name {
            *self.client.name.borrow_mut() = name.to_vec();
        }
        if let Some(protocol) = hello.protocol {
            self.set_protocol(protocol);
        }
        let (id, protocol) = (self.client.id as i64, self.protocol);
        self.reply(|writer| {
            writer.map(7);
            writer.bulk(b"server");
            writer.bulk(b"redis");
            writer.bulk(b"version");
            writer.bulk(crate::REDIS_VERSION.as_bytes());
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

    fn client_command(&mut self, command: ClientCommand<'_>) {
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
                // Nothing writes here, so there is nothing to hold back when only writes are meant.
                if all {
                    let timeout_ns = (timeout_ms as u64).saturating_mul(1_000_000);
                    let until_ns = self.state.core.now_ns().saturating_add(timeout_ns);
                    self.state.shared.pause_until_ns(until_ns);
                }
                self.reply(|writer| writer.ok());
            }
            ClientCommand::Unpause => {
                self.state.shared.pause_until_ns(0);
                self.reply(|writer| writer.ok());
            }
            ClientCommand::Info => {
                let line = self.client.describe(self.state.core.now_ns());
                self.reply(|writer| writer.verbatim(b"txt", &line));
            }
            ClientCommand::List(filter) => {
                let (state, order) = (self.state.clone(), ListOrder::new(filter));
                let protocol = self.protocol;
                self.small(Class::Foreground, async move {
                    let lists = state
                        .ask_all(move |there| there.clients.describe(&order, there.core.now_ns()))
                        .await;
                    let mut lines = lists.concat();
                    lines.sort();
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
        self.small(Class::Foreground, async move {
            let answers = state.ask_all(move |there| there.clients.kill(&order)).await;
            let suicide = answers.iter().any(|answer| answer.asker) && !skip_me;
            let killed =
                answers.iter().map(|answer| answer.others).sum::<u64>() + u64::from(suicide);
            let mut bytes = Vec::new();
            let mut writer = Writer::new(&mut bytes, protocol);
            match (old_form, killed) {
                (true, 0) => writer.error("ERR No such client"),
                (true, _) => writer.ok(),
                (false, _) => writer.integer(killed as i64),
            }
            if suicide && silent {
                client.kill();
            }
            SmallReply { bytes, close: suicide }
        });
    }

    fn reset_stats(&mut self) {
        let (state, protocol) = (self.state.clone(), self.protocol);
        self.small(Class::Foreground, async move {
            state.ask_all(|there| *there.stats.borrow_mut() = KvStats::default()).await;
            let mut bytes = Vec::new();
            Writer::new(&mut bytes, protocol).ok();
            bytes.into()
        });
    }

    fn info(&mut self, sections: Args<'_>) {
        let (state, protocol, sections) = (self.state.clone(), self.protocol, owned(sections));
        self.small(Class::Foreground, async move {
            let cores = state.ask_all(|there| CoreReport::of(there)).await;
            let report = Report {
                node: state.shared.node(),
                settings: state.shared.settings(),
                cores: &cores,
                keys: state.reader.approximate_keys(FAMILY).unwrap_or(0),
                unix_time_ms: state.core.unix_time_ms(),
            };
            let text = report.write(&sections);
            let mut bytes = Vec::new();
            Writer::new(&mut bytes, protocol).verbatim(b"txt", text.as_bytes());
            bytes.into()
        });
    }
}

fn is_stream(later: &Later) -> bool {
    matches!(later, Later::Piece(_) | Later::Parked(_))
}

const WRONG_PASSWORD: Refusal<'static> =
    Refusal::Text("WRONGPASS invalid username-password pair or user is disabled.");

impl From<Vec<u8>> for SmallReply {
    fn from(bytes: Vec<u8>) -> Self {
        Self { bytes, close: false }
    }
}

fn owned(args: Args<'_>) -> Vec<Vec<u8>> {
    args.iter().map(<[u8]>::to_vec).collect()
}

fn hit_or_miss(answer: &Answer, stats: &mut KvStats) {
    match answer {
        Ok(Some(_)) => stats.hits += 1,
        Ok(None) => stats.misses += 1,
        Err(_) => stats.errors += 1,
    }
}

/// Writes the reply to a question about one key. A long value is sent from where it lies.
#[inline]
fn write_one(
    state: &CoreState,
    output: &mut Output,
    answer: &Answer,
    ask: Ask,
    protocol: Protocol,
) {
    let value = match answer {
        Ok(value) => value.as_ref(),
        Err(error) => {
            return reads::write_error(error, &mut Writer::new(output.tail(), protocol));
        }
    };
    if let Some(value) = value
        && ask == Ask::Value
        && value.len() >= state.shared.settings().reference_bytes_min
        && let Some(slice) = value.as_slice()
        && state.pinned_bytes.get() + output.pinned_bytes() + slice.footprint()
            <= state.shared.settings().pinned_bytes_max
    {
        Writer::new(output.tail(), protocol).bulk_header(value.len());
        output.push_slice(slice.clone());
        output.tail().extend_from_slice(b"\r\n");
        return;
    }
    reads::write_answer(
        value.map(|value| &**value),
        ask,
        &mut Writer::new(output.tail(), protocol),
    );
}

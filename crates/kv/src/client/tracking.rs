//! What one connection has said with `CLIENT TRACKING`, and the invalidations that wait to be sent
//! to it.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};

use resp::{Protocol, Writer};

use crate::client::gauge::{Gauge, Share};
use crate::command::commands::CHANNEL;

/// Invalidations that wait for one connection, in bytes; beyond it they are replaced by one that
/// invalidates everything.
const PUSHES_BYTES_MAX: usize = 256 * 1024;

/// How long keys that a connection has written itself wait for the commands that have arrived.
const OWN_WAIT_NS: u64 = 100_000_000;

/// Whether a connection is told of the keys that it has read, unless it says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Caching {
    /// It is told.
    #[default]
    Always,
    /// `OPTIN`: only of the reads after `CLIENT CACHING YES`.
    OptIn,
    /// `OPTOUT`: not of the reads after `CLIENT CACHING NO`.
    OptOut,
}

/// How a connection is tracked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tracked {
    /// `BCAST`: it is told of all keys with its prefixes. Otherwise of the keys that it has read.
    pub broadcast: bool,
    pub prefixes: BTreeSet<Vec<u8>>,
    pub caching: Caching,
    /// `NOLOOP`: it is not told of its own writes.
    pub no_loop: bool,
    /// The connection that is told in its place; 0 for itself.
    pub redirect: u64,
    /// That connection has gone.
    pub broken: bool,
}

/// One connection's part of the tracking, kept by its core.
#[derive(Default)]
pub(crate) struct TrackingState {
    on: Cell<bool>,
    tracked: RefCell<Tracked>,
    /// Keys that the transaction which is being executed reads after it has written them for the
    /// last time, where another connection is told.
    pub reads_last: RefCell<BTreeSet<Vec<u8>>>,
    /// `CLIENT CACHING` was given for the next command.
    pub caching_given: Cell<bool>,
    /// It listens on the channel of invalidations.
    pub subscribed: Cell<bool>,
    pushes: RefCell<Pushes>,
}

/// Messages that wait for a connection.
#[derive(Default)]
struct Pushes {
    bytes: Vec<u8>,
    /// They were too many: one that invalidates everything stands for them.
    flushed: bool,
    /// Keys with a prefix that the connection itself has written; told when the commands that have
    /// arrived are answered.
    own: BTreeMap<Vec<u8>, BTreeSet<Vec<u8>>>,
    own_bytes: usize,
    /// When the first of them came.
    own_since_ns: u64,
    share: Option<Share>,
}

impl Pushes {
    fn account(&mut self, all: &Gauge) {
        let bytes = self.bytes.capacity() + self.own_bytes;
        match &mut self.share {
            None if bytes == 0 => {}
            share => share.get_or_insert_with(|| all.share()).set(bytes),
        }
    }
}

/// What an invalidation names.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Named<'a> {
    Keys(&'a [&'a [u8]]),
    /// Everything.
    All,
}

/// The form of the invalidations that a connection understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// A push of RESP3.
    Push,
    /// A message on [`CHANNEL`].
    Message,
}

/// Writes an invalidation.
pub(crate) fn write_invalidation(out: &mut Vec<u8>, form: Form, named: Named<'_>) {
    let protocol = match form {
        Form::Push => Protocol::V3,
        Form::Message => Protocol::V2,
    };
    let mut writer = Writer::new(out, protocol);
    match form {
        Form::Push => {
            writer.push(2);
            writer.bulk(b"invalidate");
        }
        Form::Message => {
            writer.push(3);
            writer.bulk(b"message");
            writer.bulk(CHANNEL);
        }
    }
    match named {
        Named::Keys(keys) => {
            writer.array(keys.len());
            keys.iter().for_each(|key| writer.bulk(key));
        }
        Named::All => writer.null(),
    }
}

/// Appends messages to a connection about what it has written itself, or one that stands for them
/// if they are long.
pub(crate) fn append_own(out: &mut Vec<u8>, form: Form, own: &[u8]) {
    match own.len() <= PUSHES_BYTES_MAX {
        true => out.extend_from_slice(own),
        false => write_invalidation(out, form, Named::All),
    }
}

impl TrackingState {
    /// Whether the connection is tracked.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.get()
    }

    /// How, if it is.
    pub fn tracked(&self) -> Option<std::cell::Ref<'_, Tracked>> {
        self.on.get().then(|| self.tracked.borrow())
    }

    /// Begins tracking, or changes how.
    pub fn set(&self, tracked: Tracked) {
        self.on.set(true);
        self.tracked.replace(tracked);
    }

    /// Ends tracking; returns how it was done.
    pub fn end(&self) -> Option<Tracked> {
        self.caching_given.set(false);
        self.on.replace(false).then(|| self.tracked.take())
    }

    /// Notes that the connection that is told in its place has gone.
    pub fn break_redirection(&self) {
        self.tracked.borrow_mut().broken = true;
    }

    /// Whether the keys of the next read are entered.
    #[inline]
    pub fn enters_keys(&self) -> bool {
        self.on.get() && self.enters_keys_if(self.caching_given.get())
    }

    /// The same where `given` says whether `CLIENT CACHING` was given.
    pub fn enters_keys_if(&self, given: bool) -> bool {
        let tracked = self.tracked.borrow();
        self.on.get()
            && !tracked.broadcast
            && match tracked.caching {
                Caching::Always => true,
                Caching::OptIn => given,
                Caching::OptOut => !given,
            }
    }

    /// Whether it is told of its own writes after their replies. If another connection is told in
    /// its place, that one is told like of all other writes.
    pub fn tells_itself(&self, id: u64) -> bool {
        self.on.get() && {
            let redirect = self.tracked.borrow().redirect;
            redirect == 0 || redirect == id
        }
    }

    /// The form of the messages that it understands, if any: those for itself, or those of
    /// connections that it is told of in their place.
    pub fn form(&self, protocol: Protocol, for_another: bool) -> Option<Form> {
        match protocol {
            Protocol::V3 => Some(Form::Push),
            Protocol::V2 if for_another && self.subscribed.get() => Some(Form::Message),
            Protocol::V2 => None,
        }
    }

    /// Adds a message. `all` are those of all connections of the core, `bytes_max` their limit.
    pub fn push(&self, form: Form, message: &[u8], all: &Gauge, bytes_max: usize) {
        let pushes = &mut *self.pushes.borrow_mut();
        if pushes.flushed {
            return;
        }
        let more = message.len().max(64);
        if pushes.bytes.len() + more > PUSHES_BYTES_MAX || all.get() + more > bytes_max {
            if !lsm::mutant("invalidations_are_lost_in_a_full_queue") {
                pushes.bytes = Vec::new();
                write_invalidation(&mut pushes.bytes, form, Named::All);
                pushes.flushed = true;
            }
        } else {
            pushes.bytes.extend_from_slice(message);
        }
        pushes.account(all);
    }

    /// Adds a key that the connection itself has written, to be told later.
    pub fn push_own(
        &self,
        form: Form,
        (prefix, key): (&[u8], &[u8]),
        all: &Gauge,
        bytes_max: usize,
        now_ns: u64,
    ) {
        let pushes = &mut *self.pushes.borrow_mut();
        if pushes.own.is_empty() {
            pushes.own_since_ns = now_ns;
        }
        if pushes.own_bytes + key.len() > PUSHES_BYTES_MAX || all.get() + key.len() > bytes_max {
            if !pushes.flushed {
                pushes.bytes = Vec::new();
                write_invalidation(&mut pushes.bytes, form, Named::All);
                pushes.flushed = true;
            }
            (pushes.own, pushes.own_bytes) = (BTreeMap::new(), 0);
        } else if pushes.own.entry(prefix.to_vec()).or_default().insert(key.to_vec()) {
            pushes.own_bytes += key.len() + 2 * size_of::<Vec<u8>>();
        }
        pushes.account(all);
    }

    /// Whether own keys have waited for long, or are many: a connection that always has commands in
    /// flight is told of them meanwhile.
    pub fn own_has_waited(&self, now_ns: u64) -> bool {
        let pushes = self.pushes.borrow();
        !pushes.own.is_empty()
            && (now_ns.saturating_sub(pushes.own_since_ns) >= OWN_WAIT_NS
                || pushes.own_bytes >= PUSHES_BYTES_MAX / 2)
    }

    /// Whether messages wait, including those of own keys if asked for.
    pub fn has_pushes(&self, own: bool) -> bool {
        let pushes = self.pushes.borrow();
        !pushes.bytes.is_empty() || own && !pushes.own.is_empty()
    }

    /// Takes the messages.
    pub fn take_pushes(&self, own: bool, form: Option<Form>, all: &Gauge) -> Vec<u8> {
        let pushes = &mut *self.pushes.borrow_mut();
        let mut bytes = std::mem::take(&mut pushes.bytes);
        let flushed = std::mem::take(&mut pushes.flushed);
        if own {
            pushes.own_bytes = 0;
            for keys in std::mem::take(&mut pushes.own).into_values() {
                if let Some(form) = form
                    && !flushed
                {
                    let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
                    write_invalidation(&mut bytes, form, Named::Keys(&keys));
                }
            }
        }
        pushes.account(all);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(form: Form, named: Named<'_>) -> String {
        let mut out = Vec::new();
        write_invalidation(&mut out, form, named);
        String::from_utf8(out).unwrap()
    }

    /// The bytes of redis-server 7.0.15.
    #[test]
    fn invalidations_have_redis_form() {
        let a = Named::Keys(&[b"a"]);
        assert_eq!(written(Form::Push, a), ">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\na\r\n");
        assert_eq!(written(Form::Push, Named::All), ">2\r\n$10\r\ninvalidate\r\n_\r\n");
        let before = "*3\r\n$7\r\nmessage\r\n$20\r\n__redis__:invalidate\r\n";
        assert_eq!(written(Form::Message, a), format!("{before}*1\r\n$1\r\na\r\n"));
        assert_eq!(written(Form::Message, Named::All), format!("{before}$-1\r\n"));
    }

    #[test]
    fn which_reads_enter_keys_depends_on_the_mode() {
        let state = TrackingState::default();
        assert!(!state.enters_keys());
        for (caching, not_given, given) in [
            (Caching::Always, true, true),
            (Caching::OptIn, false, true),
            (Caching::OptOut, true, false),
        ] {
            state.set(Tracked { caching, ..Tracked::default() });
            assert_eq!([false, true].map(|g| state.enters_keys_if(g)), [not_given, given]);
        }
        state.set(Tracked { broadcast: true, ..Tracked::default() });
        assert!(!state.enters_keys());
    }

    #[test]
    fn too_many_messages_become_one_that_invalidates_everything() {
        let (state, all) = (TrackingState::default(), Gauge::default());
        let message = [b'x'; 1000];
        for _ in 0..PUSHES_BYTES_MAX / 1000 {
            state.push(Form::Push, &message, &all, usize::MAX);
        }
        assert!(all.get() > PUSHES_BYTES_MAX / 2);
        state.push(Form::Push, &message, &all, usize::MAX);
        state.push(Form::Push, &message, &all, usize::MAX);
        let null = written(Form::Push, Named::All).into_bytes();
        assert_eq!(state.take_pushes(true, Some(Form::Push), &all), null);
        assert_eq!(all.get(), 0);
        state.push(Form::Push, &message, &all, usize::MAX);
        assert_eq!(state.take_pushes(false, None, &all), message);
    }

    #[test]
    fn all_connections_share_a_limit() {
        let all = Gauge::default();
        let (a, b) = (TrackingState::default(), TrackingState::default());
        a.push(Form::Push, &[b'x'; 900], &all, 1000);
        b.push(Form::Push, &[b'x'; 900], &all, 1000);
        let null = written(Form::Push, Named::All).into_bytes();
        assert_eq!(b.take_pushes(true, None, &all), null);
        assert_eq!(a.take_pushes(true, None, &all).len(), 900);
        a.push_own(Form::Push, (b"", b"b"), &all, 1000, 5);
        a.push_own(Form::Push, (b"", b"a"), &all, 1000, 9);
        assert!(!a.own_has_waited(4 + OWN_WAIT_NS) && a.own_has_waited(5 + OWN_WAIT_NS));
        assert!(a.has_pushes(true) && !a.has_pushes(false));
        let own = a.take_pushes(true, Some(Form::Push), &all);
        assert_eq!(own, written(Form::Push, Named::Keys(&[b"a", b"b"])).into_bytes());
        assert_eq!(all.get(), 0);
    }
}

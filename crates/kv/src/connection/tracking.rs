//! `CLIENT TRACKING` and its kin, and the keys that the connection's reads enter.
//!
//! A read enters its keys before it is executed, so a write that it does not see finds them
//! entered. Messages wait at the connection (`client::tracking`) until the task of the connection
//! takes them, before it takes commands: they are sent after all replies that have been begun, and
//! never while a transaction is executed.
//!
//! The messages about the connection's own writes are made here, right after the replies to these
//! writes; the shard's answers name the keys.

use std::collections::{BTreeMap, BTreeSet};

use reactor::{Class, oneshot};
use resp::Protocol;

use crate::client::tracking::{Caching, Named, Tracked, append_own, write_invalidation};
use crate::command::args::Args;
use crate::command::commands::{CHANNEL, ClientCommand, Command, TrackingRequest};
use crate::command::lookup;
use crate::command::parse::{Parsed, parse};
use crate::command::refusal::Refusal;
use crate::command::spec::{CommandId, Spec};
use crate::connection::replies::Closing;
use crate::connection::session::Session;
use crate::connection::transaction::{Queue, Queued};

const NOT_BROADCAST: &str = "ERR PREFIX option requires BCAST mode to be enabled";
const OTHER_MODE: &str = "ERR You can't switch BCAST mode on/off before disabling tracking for this client, and then \
     re-enabling it with a different mode.";
const BROADCAST_OPTIONS: &str = "ERR OPTIN and OPTOUT are not compatible with BCAST";
const BOTH_OPTIONS: &str = "ERR You can't specify both OPTIN mode and OPTOUT mode";
const OTHER_OPTION: &str = "ERR You can't switch OPTIN/OPTOUT mode before disabling tracking for this client, and then \
     re-enabling it with a different mode.";
const NO_TARGET: &str = "ERR The client ID you want redirect to does not exist";
const NOT_OPT_IN: &str =
    "ERR CLIENT CACHING YES is only valid when tracking is enabled in OPTIN mode.";
const NOT_OPT_OUT: &str =
    "ERR CLIENT CACHING NO is only valid when tracking is enabled in OPTOUT mode.";

/// What a transaction does to a key that its connection is told of.
#[derive(Default)]
struct Use {
    /// Its reads have entered the key, which was not entered before.
    is_new: bool,
    /// It reads the key before it writes it, and after its last write.
    reads_first: bool,
    is_read: bool,
    /// It is written after a read.
    is_rewritten: bool,
    reads_last: bool,
    is_written: bool,
}

/// The keys that the commands of a transaction read, and may write.
#[derive(Default)]
pub(super) struct Uses(BTreeMap<Vec<u8>, Use>);

/// The row of a command that reads keys, if it does.
fn reader(id: Option<CommandId>, name: &str) -> Option<&'static Spec> {
    if id == Some(CommandId::Get) {
        // The most frequent one.
        return lookup::find_full(b"get");
    }
    lookup::find_full(name.as_bytes())
        .filter(|spec| spec.flags.contains(&"readonly") && spec.keys.first > 0)
}

impl Session {
    /// Enters the keys of a command that is about to be executed, if it reads and is tracked.
    pub(super) fn enter_keys(&self, args: Args<'_>, id: Option<CommandId>, name: &str) {
        if self.client.tracking.enters_keys()
            && let Some(spec) = reader(id, name)
        {
            spec.key_indexes(args.len())
                .for_each(|at| self.state.enter_key(self.client.id, args.get(at)));
        }
    }

    /// Whether a command must wait for the writes before it, because their answers depend on
    /// whether the connection is tracked.
    pub(super) fn ends_writes(&self, command: &Command<'_>) -> bool {
        match command {
            Command::Client(ClientCommand::Tracking(_)) => true,
            Command::Reset => self.client.tracking.is_on(),
            _ => false,
        }
    }

    /// Whether it is known if the connection exists to which a command redirects messages. If not,
    /// its core is asked, and the connection's task is woken by the answer.
    pub(super) fn knows_target(&mut self, command: &Command<'_>) -> bool {
        let Command::Client(ClientCommand::Tracking(TrackingRequest {
            redirect: Some(id), ..
        })) = command
        else {
            return true;
        };
        if self.target.is_some() {
            return true;
        }
        let id = u64::try_from(*id).unwrap_or(0);
        let core = self.state.clients.core_of(id);
        if id == 0 || core == self.state.core.id() {
            self.target = Some(self.state.clients.get(id).is_some());
            return true;
        }
        if self.target_lookup.is_none() {
            let (state, client) = (self.state.clone(), self.client.clone());
            let (sender, receiver) = oneshot();
            self.target_lookup = Some(receiver);
            self.state.core.spawn(Class::Foreground, async move {
                let found = state.ask(core, move |there| there.clients.get(id).is_some()).await;
                // The connection may have gone.
                let _ = sender.send(found.unwrap_or(false));
                client.wake();
            });
        }
        false
    }

    /// `CLIENT TRACKING`.
    pub(super) fn track(&mut self, request: TrackingRequest<'_>) {
        let found = self.target.take();
        let done = match request {
            TrackingRequest { redirect: Some(_), .. } if found != Some(true) => {
                Err(NO_TARGET.into())
            }
            TrackingRequest { on: false, .. } => {
                self.state.end_tracking(&self.client);
                Ok(())
            }
            request => self.begin_tracking(&request),
        };
        self.reply(|writer| match done {
            Ok(()) => writer.ok(),
            Err(text) => writer.error_bytes(&text),
        });
    }

    fn begin_tracking(&self, request: &TrackingRequest<'_>) -> Result<(), Vec<u8>> {
        let prefixes: Vec<&[u8]> = request.prefixes().collect();
        let now = self.client.tracking.tracked().map(|tracked| tracked.clone());
        let caching = match (request.opt_in, request.opt_out) {
            (true, _) => Caching::OptIn,
            (_, true) => Caching::OptOut,
            _ => Caching::Always,
        };
        let refused = match &now {
            _ if !request.broadcast && !prefixes.is_empty() => Some(NOT_BROADCAST),
            Some(now) if now.broadcast != request.broadcast => Some(OTHER_MODE),
            _ if request.broadcast && (request.opt_in || request.opt_out) => {
                Some(BROADCAST_OPTIONS)
            }
            _ if request.opt_in && request.opt_out => Some(BOTH_OPTIONS),
            Some(now)
                if caching != Caching::Always
                    && now.caching != Caching::Always
                    && now.caching != caching =>
            {
                Some(OTHER_OPTION)
            }
            _ => None,
        };
        if let Some(text) = refused {
            return Err(text.into());
        }
        let mut all = now.map(|now| now.prefixes).unwrap_or_default();
        if request.broadcast {
            check_overlaps(&prefixes, &all)?;
            if prefixes.is_empty() {
                all.insert(Vec::new());
            }
            all.extend(prefixes.iter().map(|prefix| prefix.to_vec()));
        }
        let tracked = Tracked {
            broadcast: request.broadcast,
            prefixes: all,
            caching,
            no_loop: request.no_loop,
            redirect: request.redirect.and_then(|id| u64::try_from(id).ok()).unwrap_or(0),
            broken: false,
        };
        self.state.track(&self.client, tracked).map_err(Into::into)
    }

    /// `CLIENT CACHING`.
    pub(super) fn caching(&mut self, yes: Option<bool>) {
        let caching = self.client.tracking.tracked().map(|tracked| tracked.caching);
        let refusal = match (caching, yes) {
            (None, _) => Some(Refusal::NOT_TRACKED),
            (Some(Caching::OptIn), Some(true)) | (Some(Caching::OptOut), Some(false)) => None,
            (_, None) => Some(Refusal::SYNTAX),
            (Some(_), Some(true)) => Some(Refusal::Text(NOT_OPT_IN)),
            (Some(_), Some(false)) => Some(Refusal::Text(NOT_OPT_OUT)),
        };
        if refusal.is_none() {
            self.client.tracking.caching_given.set(true);
        }
        self.reply(|writer| match refusal {
            None => writer.ok(),
            Some(refusal) => refusal.write(writer),
        });
    }

    /// `CLIENT GETREDIR`.
    pub(super) fn redirection(&mut self) {
        let to = self.client.tracking.tracked().map_or(-1, |tracked| tracked.redirect as i64);
        self.reply(|writer| writer.integer(to));
    }

    /// `CLIENT TRACKINGINFO`.
    pub(super) fn tracking_info(&mut self) {
        let tracked = self.client.tracking.tracked().map(|tracked| tracked.clone());
        let given = self.client.tracking.caching_given.get();
        let mut flags = Vec::new();
        match &tracked {
            None => flags.push("off"),
            Some(tracked) => {
                let (opt_in, opt_out) =
                    (tracked.caching == Caching::OptIn, tracked.caching == Caching::OptOut);
                let all = [
                    ("on", true),
                    ("bcast", tracked.broadcast),
                    ("optin", opt_in),
                    ("caching-yes", opt_in && given),
                    ("optout", opt_out),
                    ("caching-no", opt_out && given),
                    ("noloop", tracked.no_loop),
                    ("broken_redirect", tracked.broken),
                ];
                flags.extend(all.into_iter().filter(|(_, set)| *set).map(|(flag, _)| flag));
            }
        }
        let redirect = tracked.as_ref().map_or(-1, |tracked| tracked.redirect as i64);
        let prefixes = tracked.map(|tracked| tracked.prefixes).unwrap_or_default();
        self.reply(|writer| {
            writer.map(3);
            writer.bulk(b"flags");
            writer.set(flags.len());
            flags.iter().for_each(|flag| writer.bulk(flag.as_bytes()));
            writer.bulk(b"redirect");
            writer.integer(redirect);
            writer.bulk(b"prefixes");
            writer.array(prefixes.len());
            prefixes.iter().for_each(|prefix| writer.bulk(prefix));
        });
    }

    /// `SUBSCRIBE`, of the one channel that there is.
    pub(super) fn subscribe(&mut self, channels: Args<'_>) {
        for channel in channels.iter() {
            self.client.tracking.subscribed.set(true);
            self.reply(|writer| {
                writer.push(3);
                writer.bulk(b"subscribe");
                writer.bulk(channel);
                writer.integer(1);
            });
        }
    }

    /// `UNSUBSCRIBE`.
    pub(super) fn unsubscribe(&mut self, channels: Args<'_>) {
        let subscribed = &self.client.clone().tracking.subscribed;
        let all: [&[u8]; 1] = [CHANNEL];
        let named = channels.iter().map(Some);
        let names: Vec<Option<&[u8]>> = match (channels.is_empty(), subscribed.get()) {
            (false, _) => named.collect(),
            (true, true) => all.iter().map(|channel| Some(*channel)).collect(),
            (true, false) => vec![None],
        };
        for name in names {
            if name == Some(CHANNEL) {
                subscribed.set(false);
            }
            self.reply(|writer| {
                writer.push(3);
                writer.bulk(b"unsubscribe");
                match name {
                    Some(name) => writer.bulk(name),
                    None => writer.null(),
                }
                writer.integer(subscribed.get().into());
            });
        }
    }

    /// Whether the connection has subscribed, in a protocol in which it may then hardly do anything
    /// else.
    pub(super) fn only_listens(&self) -> bool {
        self.client.tracking.subscribed.get() && self.protocol == Protocol::V2
    }

    /// Refuses a command that a connection which only listens may not send.
    pub(super) fn restrict<'a>(&mut self, parsed: Parsed<'a>) -> Parsed<'a> {
        let is_allowed = matches!(
            parsed.id,
            None | Some(
                CommandId::Ping
                    | CommandId::Quit
                    | CommandId::Reset
                    | CommandId::Subscribe
                    | CommandId::Unsubscribe
            )
        );
        if is_allowed || parsed.rejected {
            return parsed;
        }
        let command = Err(Refusal::OnlyListens(parsed.name));
        Parsed { command, rejected: true, ..parsed }
    }

    /// Whether messages may be sent now: not while a transaction is executed, whose reply they
    /// would overtake, nor while the client does not read.
    pub(crate) fn has_pushes(&self, own: bool) -> bool {
        let own = own || self.client.tracking.own_has_waited(self.state.core.now_ns());
        self.client.tracking.has_pushes(own)
            && !self.is_executing()
            && self.replies.may_push()
            && self.replies.closing == Closing::No
    }

    /// Sends the messages that wait, and those about `own` writes to keys with a prefix.
    pub(crate) fn send_pushes(&mut self, own: bool) {
        if !self.has_pushes(own) {
            return;
        }
        let tracking = &self.client.tracking;
        let own = own || tracking.own_has_waited(self.state.core.now_ns());
        let for_itself = tracking.tracked().is_some_and(|tracked| tracked.redirect != 0);
        let form = tracking.form(self.protocol, for_itself);
        let bytes = tracking.take_pushes(own, form, &self.state.tracking.pushes);
        self.replies.push(&bytes);
    }

    /// Enters the keys that the commands of a transaction read.
    pub(super) fn enter_keys_of(&self, queue: &Queue, uses: &mut Uses) {
        let tracking = &self.client.tracking;
        if !tracking.is_on() {
            return;
        }
        let caching = tracking.tracked().map(|tracked| tracked.caching);
        let mut given = tracking.caching_given.get();
        for Queued { args, .. } in queue.commands() {
            let Parsed { command, id, name, .. } = parse(args, self.inside());
            let Ok(command) = command else { continue };
            if let Command::Client(ClientCommand::Caching(yes)) = command {
                given |= match caching {
                    Some(Caching::OptIn) => yes == Some(true),
                    Some(Caching::OptOut) => yes == Some(false),
                    _ => false,
                };
            }
            if let Command::Write(_) = command
                && let Some(spec) = lookup::find_full(name.as_bytes())
            {
                let is_read = |at: usize| {
                    let others = spec.keys.rest.filter(|_| at as i64 != spec.keys.first);
                    others.unwrap_or(spec.keys.flags).contains(&"RO")
                };
                for at in spec.key_indexes(args.len()).filter(|&at| !is_read(at)) {
                    let used = uses.0.entry(args.get(at).to_vec()).or_default();
                    used.is_rewritten |= used.is_read;
                    (used.is_written, used.reads_last) = (true, false);
                }
            }
            let Some(spec) = reader(id, name).filter(|_| tracking.enters_keys_if(given)) else {
                continue;
            };
            for key in spec.key_indexes(args.len()).map(|at| args.get(at)) {
                let used = uses.0.entry(key.to_vec()).or_default();
                used.reads_first |= !used.is_written;
                (used.is_read, used.reads_last) = (true, true);
                used.is_new |= !self.state.tracking.has(key, self.client.id);
                self.state.enter_key(self.client.id, key);
            }
        }
        if !tracking.tells_itself(self.client.id) {
            let last = uses.0.iter().filter(|(_, used)| used.reads_last);
            tracking.reads_last.replace(last.map(|(key, _)| key.clone()).collect());
        }
    }

    /// The transaction has not been executed: its reads enter nothing.
    pub(super) fn forget_uses(&self, uses: Uses) {
        self.client.tracking.reads_last.take();
        for (key, _) in uses.0.into_iter().filter(|(_, used)| used.is_new) {
            self.state.tracking.forget(&key, self.client.id);
        }
    }

    /// Tells the connection, after the reply to its transaction, of the keys which that has
    /// written, and which it has read. `all` keys were removed if a command says so.
    pub(super) fn tell_of_transaction(&mut self, uses: &Uses, wrote: &[Vec<u8>], all: bool) {
        let (tracking, id) = (&self.client.tracking, self.client.id);
        tracking.reads_last.take();
        let Some(tracked) = tracking.tracked() else { return };
        let form = tracking.form(self.protocol, tracked.redirect != 0);
        let mut told = Vec::new();
        let keys = wrote.iter().filter(|_| tracking.tells_itself(id) && !tracked.broadcast);
        for key in keys {
            let used = uses.0.get(key);
            // A read after the write enters the key again.
            let stays = used.is_some_and(|used| used.reads_last);
            let was_new =
                used.is_some_and(|used| used.is_new && !used.reads_first && !used.is_rewritten);
            if was_new || tracked.no_loop && stays || !self.state.tracking.has(key, id) {
                continue;
            }
            if !stays {
                self.state.tracking.forget(key, id);
            }
            if let Some(form) = form
                && !tracked.no_loop
            {
                write_invalidation(&mut told, form, Named::Keys(&[key]));
            }
        }
        drop(tracked);
        let Some(form) = form else { return };
        let mut messages = Vec::new();
        append_own(&mut messages, form, &told);
        if all && tracking.tells_itself(id) {
            write_invalidation(&mut messages, form, Named::All);
        }
        if !messages.is_empty() {
            self.replies.push(&messages);
        }
    }
}

/// Redis's rule: of two prefixes of a connection none begins with the other.
fn check_overlaps(prefixes: &[&[u8]], existing: &BTreeSet<Vec<u8>>) -> Result<(), Vec<u8>> {
    let overlap = |a: &[u8], b: &[u8]| a.starts_with(b) || b.starts_with(a);
    let refused = |prefix: &[u8], what: &[u8], other: &[u8]| {
        let after = b"'. Prefixes for a single client must not overlap.";
        Err([b"ERR Prefix '", prefix, b"' overlaps with ", what, b" '", other, &after[..]].concat())
    };
    for (at, prefix) in prefixes.iter().enumerate() {
        if let Some(other) = existing.iter().find(|other| overlap(other, prefix)) {
            return refused(prefix, b"an existing prefix", other);
        }
        if let Some(other) = prefixes[at + 1..].iter().find(|other| overlap(other, prefix)) {
            return refused(prefix, b"another provided prefix", other);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_prefixes_are_refused_in_redis_words() {
        let existing = BTreeSet::from([b"u:".to_vec()]);
        let text = |prefixes: &[&[u8]]| {
            let refused = check_overlaps(prefixes, &existing).unwrap_err();
            String::from_utf8(refused).unwrap()
        };
        let after = "Prefixes for a single client must not overlap.";
        assert_eq!(
            text(&[b"u:1"]),
            format!("ERR Prefix 'u:1' overlaps with an existing prefix 'u:'. {after}")
        );
        assert_eq!(
            text(&[b"x", b"y", b"xz"]),
            format!("ERR Prefix 'x' overlaps with another provided prefix 'xz'. {after}")
        );
        assert_eq!(
            text(&[b""]),
            format!("ERR Prefix '' overlaps with an existing prefix 'u:'. {after}")
        );
        assert!(check_overlaps(&[b"x", b"y"], &existing).is_ok());
        assert!(check_overlaps(&[b"x", b"x"], &existing).is_err());
    }
}

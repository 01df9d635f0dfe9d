//! One connection's protocol, as bytes in and replies out. No I/O.
//!
//! What a connection sends first is its greeting: the password, the protocol's version, tracking.
//! [`Greeting`] has the bytes, and judges the replies. If the client wants an index, tracking is
//! turned on by a second greeting: how depends on what the server knows.

use resp::{Decoder, DecoderLimits, Reply};

use crate::cache::CHUNK_BYTES;
use crate::error::{Error, ErrorKind, Result};
use crate::options::{Options, Target};
use crate::seal::Seal;

/// Encodes what is sent, and decodes what the server sends.
#[derive(Debug)]
pub(crate) struct Wire {
    pub seal: Seal,
    decoder: Decoder,
}

impl Wire {
    pub fn new(target: &Target) -> Result<Wire> {
        let options = &target.options;
        let limits = DecoderLimits {
            bulk_bytes_max: options.reply_bytes_max,
            reply_bytes_max: options.reply_bytes_max,
            ..DecoderLimits::default()
        };
        Ok(Wire { seal: Seal::new(target)?, decoder: Decoder::new(limits) })
    }

    /// Takes bytes that were received.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<()> {
        self.seal.open(bytes, &mut self.decoder)
    }

    /// The next reply or message, if it has arrived whole.
    pub fn next(&mut self) -> Result<Option<Reply>> {
        self.decoder.next_reply().map_err(Error::protocol)
    }
}

/// What the server of a connection knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    /// It can be read ahead.
    pub reads_ahead: bool,
    /// It gives an index.
    pub indexes: bool,
}

/// The first commands of a connection.
#[derive(Debug)]
pub(crate) struct Greeting {
    pub bytes: Vec<u8>,
    pub replies: usize,
    tracks: bool,
    /// The last command asks what the server knows.
    asks_facts: bool,
    /// Tracking is not on afterwards: [`Greeting::tracking`] follows.
    pub is_first: bool,
}

impl Greeting {
    /// With `tracks`, the connection speaks RESP3 and has tracking on.
    pub fn new(options: &Options, tracks: bool) -> Greeting {
        let mut greeting = Greeting::empty(tracks);
        greeting.is_first = tracks && options.index_bytes > 0;
        let user = options.user.as_deref().unwrap_or("default").as_bytes();
        match (tracks, &options.password) {
            (true, Some(password)) => {
                greeting.add(&[b"HELLO", b"3", b"AUTH", user, password.as_bytes()]);
            }
            (true, None) => greeting.add(&[b"HELLO", b"3"]),
            // A server before Redis 6 knows no users.
            (false, Some(password)) if options.user.is_none() => {
                greeting.add(&[b"AUTH", password.as_bytes()]);
            }
            (false, Some(password)) => greeting.add(&[b"AUTH", user, password.as_bytes()]),
            (false, None) => {}
        }
        if options.database != 0 {
            greeting.add(&[b"SELECT", options.database.to_string().as_bytes()]);
        }
        if tracks {
            if !greeting.is_first {
                greeting.add(&[b"CLIENT", b"TRACKING", b"ON"]);
            }
            if greeting.is_first || options.read_ahead > 0 {
                greeting.add(&[b"MR.INFO"]);
                greeting.asks_facts = true;
            }
        } else {
            // Some errors are only told at the first command, such as that a password is needed.
            greeting.add(&[b"PING"]);
        }
        greeting
    }

    fn empty(tracks: bool) -> Greeting {
        Greeting { bytes: Vec::new(), replies: 0, tracks, asks_facts: false, is_first: false }
    }

    /// Turns tracking on: of every key, if the server gives an index.
    pub fn tracking(facts: Facts) -> Greeting {
        let mut greeting = Greeting::empty(true);
        match facts.indexes {
            true => greeting.add(&[b"CLIENT", b"TRACKING", b"ON", b"BCAST"]),
            false => greeting.add(&[b"CLIENT", b"TRACKING", b"ON"]),
        }
        greeting
    }

    fn add(&mut self, args: &[&[u8]]) {
        resp::write_command(&mut self.bytes, args);
        self.replies += 1;
    }

    /// Judges the replies. Returns what the server knows, if it was asked.
    ///
    /// # Errors
    /// The first error among them; [`ErrorKind::Unsupported`] if the server cannot track keys.
    pub fn check(&self, replies: &[Reply]) -> Result<Facts> {
        match replies.split_last() {
            Some((facts, others)) if self.asks_facts => {
                self.check_others(others)?;
                Ok(known(facts))
            }
            _ => self.check_others(replies).map(|()| Facts::default()),
        }
    }

    fn check_others(&self, replies: &[Reply]) -> Result<()> {
        for reply in replies {
            match reply {
                Reply::Error(text) => return Err(self.explain(Error::from_reply(text))),
                // A server that gives another version does not push.
                Reply::Map(facts) if self.tracks => {
                    let version = facts.iter().find(|(name, _)| name.as_bytes() == Some(b"proto"));
                    if version.is_none_or(|(_, version)| *version != Reply::Integer(3)) {
                        return Err(Error::protocol("HELLO 3 did not give version 3"));
                    }
                }
                Reply::Array(_) if self.tracks => {
                    return Err(Error::protocol("HELLO 3 did not give version 3"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn explain(&self, error: Error) -> Error {
        let can_be_tracking = matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Server);
        if self.tracks && can_be_tracking {
            return Error::new(
                ErrorKind::Unsupported,
                format!("the server cannot track the keys of a cache: {error}"),
            );
        }
        error
    }
}

/// What a reply to `MR.INFO` tells: whether `MR.GET` and `MR.STRETCH`, and `MR.INDEX`, are as they
/// are here.
fn known(facts: &Reply) -> Facts {
    let Reply::Map(facts) = facts else { return Facts::default() };
    let number = |wanted: &[u8]| {
        let found = facts.iter().find(|(name, _)| name.as_bytes() == Some(wanted));
        match found {
            Some((_, Reply::Integer(value))) => *value,
            _ => 0,
        }
    };
    let version = number(b"version");
    Facts {
        reads_ahead: version >= 4 && number(b"stretch-bytes-max") >= CHUNK_BYTES as i64,
        // A server with shorter pages cuts them.
        indexes: version >= 2 && number(b"index-keys-max") >= 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(options: &Options, tracks: bool) -> String {
        String::from_utf8(Greeting::new(options, tracks).bytes).unwrap().replace("\r\n", " ")
    }

    #[test]
    fn a_greeting_is_as_short_as_the_options_allow() {
        let plain = Options::new();
        assert_eq!(text(&plain, false), "*1 $4 PING ");
        assert_eq!(text(&plain, true), "*2 $5 HELLO $1 3 *3 $6 CLIENT $8 TRACKING $2 ON ");
        let secret = Options::new().password("pw").database(2);
        assert_eq!(text(&secret, false), "*2 $4 AUTH $2 pw *2 $6 SELECT $1 2 *1 $4 PING ");
        assert!(text(&secret, true).starts_with("*5 $5 HELLO $1 3 $4 AUTH $7 default $2 pw "));
        let user = secret.user("ada");
        assert!(text(&user, false).starts_with("*3 $4 AUTH $3 ada $2 pw "));
    }

    #[test]
    fn a_server_without_stretches_is_no_error() {
        let options = Options::new().cache(64 << 20).read_ahead(1 << 20);
        assert!(text(&options, true).ends_with("*1 $7 MR.INFO "));
        let greeting = Greeting::new(&options, true);
        let name = |name: &str| Reply::Bulk(name.as_bytes().to_vec());
        let hello = Reply::Map(vec![(name("proto"), Reply::Integer(3))]);
        let done = Reply::Simple(b"OK".to_vec());
        let check = |last: Reply| greeting.check(&[hello.clone(), done.clone(), last]);
        let facts = |version, bytes| {
            let pairs = [("version", version), ("stretch-bytes-max", bytes)];
            Reply::Map(pairs.map(|(fact, value)| (name(fact), Reply::Integer(value))).into())
        };
        let check = |last: Reply| check(last).unwrap().reads_ahead;
        assert!(check(facts(4, 262_144)) && check(facts(5, 1 << 20)));
        assert!(!check(facts(3, 262_144)) && !check(facts(4, 4096)));
        assert!(!check(Reply::Error(b"ERR unknown command".to_vec())));
        assert!(greeting.check(&[hello.clone(), Reply::Error(b"ERR no".to_vec()), done]).is_err());
    }

    #[test]
    fn every_write_is_asked_for_only_if_the_server_gives_an_index() {
        let options = Options::new().cache(1 << 20).index(1 << 20);
        assert_eq!(text(&options, true), "*2 $5 HELLO $1 3 *1 $7 MR.INFO ");
        assert!(!text(&options, false).contains("MR.INFO"));
        let greeting = Greeting::new(&options, true);
        assert!(greeting.is_first);
        let name = |name: &str| Reply::Bulk(name.as_bytes().to_vec());
        let hello = Reply::Map(vec![(name("proto"), Reply::Integer(3))]);
        let facts = |version, keys| {
            let pairs = [("version", version), ("index-keys-max", keys)];
            Reply::Map(pairs.map(|(fact, value)| (name(fact), Reply::Integer(value))).into())
        };
        for (last, indexes) in [
            (facts(2, 32_768), true),
            (facts(3, 1), true),
            (facts(1, 32_768), false),
            (facts(2, 0), false),
            (facts(2, 1 << 40), true),
            (Reply::Error(b"ERR unknown command".to_vec()), false),
        ] {
            let facts = greeting.check(&[hello.clone(), last]).unwrap();
            assert_eq!(facts.indexes, indexes);
            let second = Greeting::tracking(facts);
            let bytes = String::from_utf8(second.bytes).unwrap();
            assert_eq!(bytes.contains("BCAST"), indexes);
            assert_eq!((second.replies, second.is_first), (1, false));
        }
        let refused = [Reply::Error(b"ERR no".to_vec())];
        let error = Greeting::tracking(Facts::default()).check(&refused).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn refusals_are_told_apart() {
        let greeting = Greeting::new(&Options::new(), true);
        let hello =
            |version| Reply::Map(vec![(Reply::Bulk(b"proto".to_vec()), Reply::Integer(version))]);
        let done = Reply::Simple(b"OK".to_vec());
        assert!(greeting.check(&[hello(3), done.clone()]).is_ok());
        let kind = |replies: &[Reply]| greeting.check(replies).unwrap_err().kind();
        assert_eq!(kind(&[hello(2), done.clone()]), ErrorKind::Protocol);
        assert_eq!(kind(&[Reply::Array(vec![]), done]), ErrorKind::Protocol);
        let error = |text: &str| Reply::Error(text.as_bytes().to_vec());
        assert_eq!(kind(&[error("ERR unknown command 'HELLO'")]), ErrorKind::Unsupported);
        assert_eq!(kind(&[hello(3), error("ERR syntax error")]), ErrorKind::Unsupported);
        assert_eq!(kind(&[error("WRONGPASS no")]), ErrorKind::Denied);
        assert_eq!(kind(&[error("NOAUTH no")]), ErrorKind::Denied);
        assert_eq!(kind(&[error("ERR max number of clients reached")]), ErrorKind::Busy);
    }
}

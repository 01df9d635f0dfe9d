//! Batches of writes.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::command::{ARGS_MAX, Class, Command, Touches};
use crate::error::{Error, ErrorKind, Result};
use crate::ttl::milliseconds;

/// The bytes of one `MSET` or `DEL`. Larger batches have several.
const COMMAND_BYTES_MAX: usize = 1 << 20;
/// The commands of a batch: the server's answers to them wait while the batch is being sent.
const COMMANDS_MAX: usize = 4096;
/// The bytes of a batch.
pub(crate) const BATCH_BYTES_MAX: usize = 256 << 20;

#[derive(Clone, Debug)]
enum Step {
    Set(Vec<u8>, Vec<u8>, Option<Duration>),
    Delete(Vec<u8>),
    DeleteRange(Vec<u8>, Vec<u8>),
}

/// What a batch leaves of a key.
#[derive(Clone, Copy)]
enum Net<'a> {
    Set(&'a [u8]),
    SetWithTtl(&'a [u8], Duration),
    Deleted,
}

/// Writes that are done together or not at all, in this order; see
/// [`Client::write`](crate::Client::write).
///
/// ```
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration/example.rs"));
/// # fn main() -> client::Result<()> {
/// # let server = Redis::start(&[]);
/// # let client = client::blocking::Client::connect(&server.address())?;
/// use millrace::client::WriteBatch;
///
/// let mut batch = WriteBatch::new();
/// batch.set("user:1", "Ada").delete("user:2");
/// assert_eq!(batch.len(), 2);
/// client.write(batch)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct WriteBatch {
    steps: Vec<Step>,
    bytes: usize,
}

impl WriteBatch {
    /// A batch without writes.
    pub fn new() -> WriteBatch {
        WriteBatch::default()
    }

    /// Sets a key.
    pub fn set(&mut self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> &mut WriteBatch {
        let (key, value) = (key.as_ref().to_vec(), value.as_ref().to_vec());
        self.bytes += key.len() + value.len();
        self.steps.push(Step::Set(key, value, None));
        self
    }

    /// Sets a key that the server removes after this time, from the moment when it makes the batch;
    /// see [`Client::set_with_ttl`](crate::Client::set_with_ttl). A batch may have 4,000 such keys.
    pub fn set_with_ttl(
        &mut self,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        ttl: Duration,
    ) -> &mut WriteBatch {
        let (key, value) = (key.as_ref().to_vec(), value.as_ref().to_vec());
        self.bytes += key.len() + value.len();
        self.steps.push(Step::Set(key, value, Some(ttl)));
        self
    }

    /// Deletes a key.
    pub fn delete(&mut self, key: impl AsRef<[u8]>) -> &mut WriteBatch {
        let key = key.as_ref().to_vec();
        self.bytes += key.len();
        self.steps.push(Step::Delete(key));
        self
    }

    /// Deletes all keys from the start of the range to before its end: only on a Millrace node.
    pub fn delete_range<K: AsRef<[u8]>>(&mut self, keys: std::ops::Range<K>) -> &mut WriteBatch {
        let (start, end) = (keys.start.as_ref().to_vec(), keys.end.as_ref().to_vec());
        self.bytes += start.len() + end.len();
        self.steps.push(Step::DeleteRange(start, end));
        self
    }

    /// The number of writes.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether there are no writes.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Bytes of all keys and values. A batch may have 256 MiB.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Removes all writes.
    pub fn clear(&mut self) {
        self.steps.clear();
        self.bytes = 0;
    }

    /// What the batch sets a key to: `None` is nothing, `Some(None)` is that it deletes it.
    pub(crate) fn says(&self, key: &[u8]) -> Option<Option<&[u8]>> {
        self.steps.iter().rev().find_map(|step| match step {
            Step::Set(set, value, _) if set == key => Some(Some(value.as_slice())),
            Step::Delete(deleted) if deleted == key => Some(None),
            Step::DeleteRange(start, end) if start.as_slice() <= key && key < end.as_slice() => {
                Some(None)
            }
            _ => None,
        })
    }

    /// The commands with the same effect as the batch, if they are executed as one.
    fn commands(&self) -> Result<Commands> {
        let mut commands = Commands::default();
        // What the steps since the last deletion of a range do to each key in the end.
        let mut net: BTreeMap<&[u8], Net<'_>> = BTreeMap::new();
        for step in &self.steps {
            match step {
                Step::Set(key, value, None) => {
                    net.insert(key, Net::Set(value));
                }
                Step::Set(key, value, Some(ttl)) => {
                    net.insert(key, Net::SetWithTtl(value, *ttl));
                }
                Step::Delete(key) => {
                    net.insert(key, Net::Deleted);
                }
                Step::DeleteRange(start, end) => {
                    commands.add_net(&net)?;
                    net.clear();
                    if start < end {
                        let bounds =
                            [[b"[", start.as_slice()].concat(), [b"(", end.as_slice()].concat()];
                        commands.add(&[b"MR.DELRANGE", &bounds[0], &bounds[1]]);
                    }
                }
            }
        }
        commands.add_net(&net)?;
        Ok(commands)
    }

    /// The whole batch as one request; `None` if it does nothing. With `watched`, it fails with
    /// [`ErrorKind::Conflict`] if a key that the connection watches was written.
    pub(crate) fn request(&self, watched: bool) -> Result<Option<Command>> {
        if self.bytes > BATCH_BYTES_MAX {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                format!("a batch may have {BATCH_BYTES_MAX} bytes, not {}", self.bytes),
            ));
        }
        let commands = self.commands()?;
        if commands.count > COMMANDS_MAX {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                format!(
                    "a batch may have {COMMANDS_MAX} commands, not {}: each key with a time to \
                     live is one, and ranges that are deleted between other writes",
                    commands.count
                ),
            ));
        }
        let touches = if self.steps.iter().any(|step| matches!(step, Step::DeleteRange(..))) {
            Touches::Everything
        } else {
            let key = |step: &Step| match step {
                Step::Set(key, ..) | Step::Delete(key) | Step::DeleteRange(key, _) => key.clone(),
            };
            Touches::Keys(self.steps.iter().map(key).collect())
        };
        // One command is atomic by itself.
        if commands.count == 1 && !watched {
            let bytes = commands.bytes;
            return Ok(Some(Command { bytes, replies: 1, class: Class::Write, touches }));
        }
        if commands.count == 0 && !watched {
            return Ok(None);
        }
        let mut bytes = Vec::with_capacity(commands.bytes.len() + 64);
        resp::write_command(&mut bytes, &[b"MULTI"]);
        bytes.extend_from_slice(&commands.bytes);
        resp::write_command(&mut bytes, &[b"EXEC"]);
        let replies = commands.count + 2;
        Ok(Some(Command { bytes, replies, class: Class::Write, touches }))
    }
}

#[derive(Default)]
struct Commands {
    bytes: Vec<u8>,
    count: usize,
}

impl Commands {
    fn add(&mut self, args: &[&[u8]]) {
        resp::write_command(&mut self.bytes, args);
        self.count += 1;
    }

    fn add_net(&mut self, net: &BTreeMap<&[u8], Net<'_>>) -> Result<()> {
        let set = net.iter().filter_map(|(key, net)| match net {
            Net::Set(value) => Some([*key, *value]),
            _ => None,
        });
        self.add_chunks(b"MSET", set);
        for (key, net) in net {
            if let Net::SetWithTtl(value, ttl) = net {
                self.add(&[b"SET", key, value, b"PX", milliseconds(*ttl)?.as_bytes()]);
            }
        }
        let deleted = net.iter().filter(|(_, net)| matches!(net, Net::Deleted));
        self.add_chunks(b"DEL", deleted.map(|(key, _)| [*key]));
        Ok(())
    }

    fn add_chunks<'a, const N: usize>(
        &mut self,
        name: &'a [u8],
        parts: impl Iterator<Item = [&'a [u8]; N]>,
    ) {
        let (mut args, mut bytes) = (vec![name], 0);
        for part in parts {
            let more: usize = part.iter().map(|word| word.len()).sum();
            if args.len() > 1 && (bytes + more > COMMAND_BYTES_MAX || args.len() + N > ARGS_MAX) {
                self.add(&args);
                args.truncate(1);
                bytes = 0;
            }
            args.extend(part);
            bytes += more;
        }
        if args.len() > 1 {
            self.add(&args);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text(batch: &WriteBatch) -> String {
        let request = batch.request(false).unwrap().unwrap();
        String::from_utf8(request.bytes).unwrap().replace("\r\n", " ")
    }

    #[test]
    fn a_batch_is_as_few_commands_as_possible() {
        let mut batch = WriteBatch::new();
        assert!(batch.request(false).unwrap().is_none());
        batch.set("a", "1").set("b", "2");
        assert_eq!(text(&batch), "*5 $4 MSET $1 a $1 1 $1 b $1 2 ");
        batch.delete("a").set("b", "3").set("c", "4").delete("c");
        let request = batch.request(false).unwrap().unwrap();
        assert_eq!(request.replies, 4);
        assert_eq!(
            text(&batch),
            "*1 $5 MULTI *3 $4 MSET $1 b $1 3 *3 $3 DEL $1 a $1 c *1 $4 EXEC "
        );
        batch.clear();
        batch.set("a", "1").delete_range("a".."b").set("a", "2");
        assert_eq!(batch.request(false).unwrap().unwrap().replies, 5);
        batch.clear();
        batch.delete_range("b".."a");
        assert!(batch.request(false).unwrap().is_none());
        // What the keys were is still checked.
        assert_eq!(batch.request(true).unwrap().unwrap().replies, 2);
    }

    #[test]
    fn a_key_with_a_deadline_is_a_command_of_its_own() {
        let ttl = Duration::from_millis(1500);
        let mut batch = WriteBatch::new();
        batch.set_with_ttl("a", "1", ttl);
        assert_eq!(batch.bytes(), 2);
        assert_eq!(text(&batch), "*5 $3 SET $1 a $1 1 $2 PX $4 1500 ");
        batch.set("b", "2").delete("c").set("d", "3").set_with_ttl("d", "4", ttl);
        assert_eq!(
            text(&batch),
            "*1 $5 MULTI *3 $4 MSET $1 b $1 2 *5 $3 SET $1 a $1 1 $2 PX $4 1500 \
             *5 $3 SET $1 d $1 4 $2 PX $4 1500 *2 $3 DEL $1 c *1 $4 EXEC "
        );
        // The last one counts.
        batch.clear();
        batch.set_with_ttl("a", "1", ttl).set("a", "2").set_with_ttl("b", "3", ttl).delete("b");
        assert_eq!(text(&batch), "*1 $5 MULTI *3 $4 MSET $1 a $1 2 *2 $3 DEL $1 b *1 $4 EXEC ");
        for n in 0..COMMANDS_MAX {
            batch.set_with_ttl(n.to_string(), "v", ttl);
        }
        let refused = batch.request(false).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidOption);
        assert!(refused.to_string().contains("4098"), "{refused}");
        batch.clear();
        batch.set("a", "1").set_with_ttl("b", "2", Duration::ZERO);
        assert_eq!(batch.request(true).unwrap_err().kind(), ErrorKind::InvalidOption);
    }

    #[test]
    fn large_batches_have_several_commands_of_bounded_size() {
        let mut batch = WriteBatch::new();
        for n in 0..1000_u32 {
            batch.set(n.to_be_bytes(), [0; 5000]);
        }
        let request = batch.request(false).unwrap().unwrap();
        assert_eq!(request.replies, 5 + 2);
        let mut batch = WriteBatch::new();
        for n in 0..300_000_u32 {
            batch.delete(n.to_be_bytes());
        }
        assert_eq!(batch.request(false).unwrap().unwrap().replies, 2 + 2);
        let mut batch = WriteBatch::new();
        for n in 0..3000_u32 {
            batch.set("k", n.to_be_bytes()).delete_range("a".."b");
        }
        assert_eq!(batch.request(false).unwrap_err().kind(), ErrorKind::InvalidOption);
    }

    proptest! {
        /// The commands do to a map what the steps do to it one by one.
        #[test]
        fn the_commands_have_the_effect_of_the_steps(
            steps in prop::collection::vec((0..4_u8, 0..6_u8, 1..9_u8), 0..30),
        ) {
            let mut batch = WriteBatch::new();
            // The values, and the times to live.
            let mut model: BTreeMap<Vec<u8>, (Vec<u8>, Option<String>)> = BTreeMap::new();
            for (kind, key, other) in steps {
                match kind {
                    0 => {
                        batch.set([key], [other]);
                        model.insert(vec![key], (vec![other], None));
                    }
                    3 => {
                        batch.set_with_ttl([key], [other], Duration::from_millis(other.into()));
                        model.insert(vec![key], (vec![other], Some(other.to_string())));
                    }
                    1 => { batch.delete([key]); model.remove(&vec![key]); }
                    _ => {
                        batch.delete_range([key]..[other]);
                        model.retain(|k, _| !(k[0] >= key && k[0] < other));
                    }
                }
            }
            for key in 0..9_u8 {
                if let Some(said) = batch.says(&[key]) {
                    let value = model.get(&vec![key]).map(|(value, _)| value.as_slice());
                    prop_assert_eq!(said, value);
                }
            }
            let mut map: BTreeMap<Vec<u8>, (Vec<u8>, Option<String>)> = BTreeMap::new();
            let mut bytes = batch.commands().unwrap().bytes;
            let (mut parser, mut at) = (resp::Parser::new(resp::Limits::default()), 0);
            while at < bytes.len() {
                let input = &mut bytes[at..];
                let Ok(resp::Progress::Complete(n)) = parser.parse(input) else { panic!() };
                let args: Vec<&[u8]> = parser.args().iter().map(|span| &input[span.range()]).collect();
                match args[0] {
                    b"MSET" => for pair in args[1..].chunks(2) {
                        map.insert(pair[0].to_vec(), (pair[1].to_vec(), None));
                    },
                    b"SET" => {
                        let ttl = String::from_utf8(args[4].to_vec()).unwrap();
                        map.insert(args[1].to_vec(), (args[2].to_vec(), Some(ttl)));
                    }
                    b"DEL" => for key in &args[1..] {
                        map.remove(*key);
                    },
                    _ => map.retain(|k, _| !(k.as_slice() >= &args[1][1..] && k.as_slice() < &args[2][1..])),
                }
                at += n;
            }
            prop_assert_eq!(map, model);
        }
    }
}

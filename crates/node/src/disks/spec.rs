//! How a user names a disk: `name=vm1 uri=file:vm1.img?engine=uring socket=vm1.sock queues=2` on
//! the command line, the same keys in a `[[disk]]` table of the configuration file.
//!
//! On the command line spaces separate the keys, and the first `=` ends a key. There is one quoting
//! rule: `%` and two hexadecimal digits stand for a byte, so a space in a value is `%20` and a
//! percent sign `%25`. A URI has the same quoting rule itself, so it is not quoted twice: the text
//! after `uri=`, up to the next space, is the URI.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Maximum number of queues of a disk.
pub const QUEUES_MAX: u16 = 64;
/// The default number of queues.
const QUEUES_DEFAULT: u16 = 16;
/// Maximum length of a disk's name in bytes; the guest sees 20 of them as its serial number.
const NAME_MAX: usize = 64;

/// A disk for a virtual machine, as requested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DiskSpec {
    /// Unique in the node. The guest reads it as the serial number, unless one is given.
    pub name: String,
    /// The block device.
    pub uri: String,
    /// The socket to which the virtual machine's process connects.
    pub socket: PathBuf,
    /// Maximum number of queues that the virtual machine may use.
    #[serde(default = "queues_default")]
    pub queues: u16,
    /// The serial number that the guest reads, instead of the name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// What happens to requests that the device fails.
    #[serde(rename = "on_error", default, skip_serializing_if = "OnError::is_default")]
    pub on_error: OnError,
}

/// What a disk does with a request that its device fails, for lack of space or for any other
/// reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnError {
    /// The guest gets an error.
    #[default]
    Report,
    /// The disk pauses until `millrace disk resume`, and then tries again.
    Pause,
    /// The guest is told that all is well.
    Ignore,
}

impl OnError {
    fn is_default(&self) -> bool {
        *self == OnError::default()
    }

    fn parse(text: &str) -> Result<OnError, String> {
        match text {
            "report" => Ok(OnError::Report),
            "pause" => Ok(OnError::Pause),
            "ignore" => Ok(OnError::Ignore),
            _ => Err(format!("on_error={text} must be report, pause or ignore")),
        }
    }
}

impl From<OnError> for vhost::OnError {
    fn from(on_error: OnError) -> vhost::OnError {
        match on_error {
            OnError::Report => vhost::OnError::Report,
            OnError::Pause => vhost::OnError::Pause,
            OnError::Ignore => vhost::OnError::Ignore,
        }
    }
}

fn queues_default() -> u16 {
    QUEUES_DEFAULT
}

impl FromStr for DiskSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<DiskSpec, String> {
        let (mut name, mut uri, mut socket) = (None, None, None);
        let (mut queues, mut serial, mut on_error) = (None, None, None);
        for word in text.split_ascii_whitespace() {
            let (key, value) = word
                .split_once('=')
                .ok_or_else(|| format!("'{word}' is not KEY=VALUE; a space in a value is %20"))?;
            let slot = match key {
                "name" => &mut name,
                "uri" => &mut uri,
                "socket" => &mut socket,
                "queues" => &mut queues,
                "serial" => &mut serial,
                "on_error" => &mut on_error,
                _ => {
                    return Err(format!(
                        "'{key}' is not a key of a disk: use name, uri, socket, queues, serial or on_error"
                    ));
                }
            };
            if slot.replace(value).is_some() {
                return Err(format!("{key} is given twice"));
            }
        }
        let needed = |value: Option<&str>, key: &str| match value {
            None | Some("") => Err(format!("a disk needs {key}=...")),
            Some(value) => Ok(value.to_owned()),
        };
        let spec = DiskSpec {
            name: unquote(&needed(name, "name")?)?,
            uri: needed(uri, "uri")?,
            socket: unquote(&needed(socket, "socket")?)?.into(),
            queues: match queues {
                None => QUEUES_DEFAULT,
                Some(text) => text.parse().map_err(|_| format!("queues={text} is not a number"))?,
            },
            serial: serial.map(unquote).transpose()?,
            on_error: on_error.map(OnError::parse).transpose()?.unwrap_or_default(),
        };
        spec.check()?;
        Ok(spec)
    }
}

impl DiskSpec {
    /// Refuses a disk that cannot be served.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.name.is_empty() || self.name.len() > NAME_MAX {
            return Err(format!("the name of a disk must have from 1 to {NAME_MAX} bytes"));
        }
        if self.name.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(format!("the name of a disk must not have white space: '{}'", self.name));
        }
        if !(1..=QUEUES_MAX).contains(&self.queues) {
            return Err(format!(
                "a disk must have from 1 to {QUEUES_MAX} queues, not {}",
                self.queues
            ));
        }
        Ok(())
    }

    /// The same disk for a process with another working directory: makes relative paths begin at
    /// `dir`.
    #[must_use]
    pub fn under(mut self, dir: &Path) -> DiskSpec {
        self.socket = dir.join(&self.socket);
        self.uri = bdev::uri_under(&self.uri, dir);
        self
    }

    /// The serial number that the guest reads.
    pub fn serial(&self) -> &str {
        self.serial.as_deref().unwrap_or(&self.name)
    }
}

/// Refuses disks that cannot be served together.
pub(crate) fn check_all(disks: &[DiskSpec]) -> Result<(), String> {
    let (mut names, mut sockets) = (BTreeSet::new(), BTreeSet::new());
    for disk in disks {
        disk.check().map_err(|what| format!("disk {}: {what}", disk.name))?;
        if !names.insert(&disk.name) {
            return Err(format!("two disks have the name {}", disk.name));
        }
        if !sockets.insert(&disk.socket) {
            return Err(format!("two disks have the socket {}", disk.socket.display()));
        }
    }
    Ok(())
}

/// Decodes `%` and two hexadecimal digits.
fn unquote(text: &str) -> Result<String, String> {
    let wrong = || format!("'{text}': write two hexadecimal digits after %, and %25 for % itself");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|digit| (digit as char).to_digit(16));
        match (digit(), digit()) {
            (Some(high), Some(low)) => bytes.push((high * 16 + low) as u8),
            _ => return Err(wrong()),
        }
    }
    String::from_utf8(bytes).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_written_as_keys_and_values() {
        let text = "name=vm1 uri=file:vm%201.img?engine=uring&write=cached  socket=/run/a%20b.sock queues=2";
        let disk: DiskSpec = text.parse().unwrap();
        assert_eq!(disk.name, "vm1");
        assert_eq!(disk.uri, "file:vm%201.img?engine=uring&write=cached");
        assert_eq!(disk.socket, PathBuf::from("/run/a b.sock"));
        assert_eq!((disk.queues, disk.serial()), (2, "vm1"));
        let disk: DiskSpec = "name=a uri=null:1G socket=s serial=x%25y".parse().unwrap();
        assert_eq!((disk.queues, disk.serial()), (QUEUES_DEFAULT, "x%y"));
        assert_eq!(disk.on_error, OnError::Report);
        let disk: DiskSpec = "name=a uri=null:1G socket=s on_error=pause".parse().unwrap();
        assert_eq!(disk.on_error, OnError::Pause);
        assert!(serde_json::to_string(&disk).unwrap().contains(r#""on_error":"pause""#));
    }

    #[test]
    fn a_relative_path_begins_at_the_directory() {
        let text = "name=a uri=delay:all=1ms|file:vm.img?engine=aio socket=a.sock";
        let disk = text.parse::<DiskSpec>().unwrap().under(Path::new("/a b"));
        assert_eq!(disk.uri, "delay:all=1ms|file:/a%20b/vm.img?engine=aio");
        assert_eq!(disk.socket, Path::new("/a b/a.sock"));
    }

    #[test]
    fn each_mistake_is_named() {
        for (text, expected) in [
            ("", "needs name="),
            ("name=a socket=s", "needs uri="),
            ("name=a uri=null:1G", "needs socket="),
            ("name=a uri=null:1G socket=s name=b", "name is given twice"),
            ("name=a uri=null:1G socket=s size=4", "'size' is not a key"),
            ("name=a uri=my file socket=s", "'file' is not KEY=VALUE"),
            ("name=a uri=null:1G socket=s queues=0", "from 1 to 64 queues"),
            ("name=a uri=null:1G socket=s queues=many", "queues=many is not a number"),
            ("name=a uri=null:1G socket=s%2", "two hexadecimal digits"),
            ("name=a uri=null:1G socket=s on_error=stop", "must be report, pause or ignore"),
            ("name=%20 uri=null:1G socket=s", "must not have white space"),
        ] {
            let error = text.parse::<DiskSpec>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
        let disk = |name: &str, socket: &str| DiskSpec {
            name: name.into(),
            uri: "null:1G".into(),
            socket: socket.into(),
            queues: 1,
            serial: None,
            on_error: OnError::Report,
        };
        assert!(check_all(&[disk("a", "s"), disk("b", "t")]).is_ok());
        assert!(check_all(&[disk("a", "s"), disk("a", "t")]).unwrap_err().contains("name a"));
        assert!(check_all(&[disk("a", "s"), disk("b", "s")]).unwrap_err().contains("socket s"));
    }
}

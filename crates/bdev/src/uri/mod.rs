//! The parser of device URIs.
//!
//! ```text
//! uri    = *( layer "|" ) device
//! device = ( "file:" PATH / "mem:" SIZE / "null:" SIZE / nbd ) [ "?" params ]
//! nbd    = "nbd://" HOST [ ":" PORT ] "/" [ EXPORT ] / "nbd+unix:///" [ EXPORT ]
//! layer  = ( "error:" / "delay:" / "limit:" / "dirty:" ) params
//! params = KEY "=" VALUE *( "&" KEY "=" VALUE )
//! ```
//!
//! A layer covers the device after the bar. There is one quoting rule: in a path and in a value,
//! `%` and two hexadecimal digits stand for a byte. A `%`, a bar, white space and control
//! characters must be quoted; in a path `?` too, in a value `&` too. So an unquoted bar, question
//! mark or ampersand is always a separator.
//!
//! The parser guesses nothing: an unknown key, a repeated key or an invalid value is an error that
//! names it.

mod layer;
mod nbd;
mod params;

use std::ffi::OsString;
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use self::layer::layer;
pub use self::layer::parse_rate;
pub(crate) use self::nbd::{NbdExport, NbdServer};
use self::params::{Params, block, decoded, decoded_bytes, escaped, named, size, switch};
use crate::error::Error;
use crate::io::Status;
use crate::layers::limit::Rates;

/// The engine that reads and writes a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    Uring,
    Aio,
    Mmap,
    Sync,
}

/// When the image of a file is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lock {
    /// As long as it is open.
    Open,
    /// While a virtual machine uses it: see [`Bdev::lock`](crate::Bdev::lock).
    Ring,
    /// Never.
    Never,
}

/// A device below all layers.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Base {
    File {
        path: PathBuf,
        engine: Engine,
        fua: bool,
        read_only: bool,
        /// `None`: direct if the file system supports it.
        direct: Option<bool>,
        lock: Lock,
        block: Option<u32>,
    },
    Mem {
        size: u64,
        block: u32,
    },
    Null {
        size: u64,
        block: u32,
    },
    Nbd(NbdExport),
}

/// A device over another device.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Layer {
    Error(Failures),
    /// Minimum and maximum in nanoseconds, by kind.
    Delay {
        ns: [(u64, u64); 5],
    },
    Limit(Rates),
    Dirty {
        /// The path of the bitmap; `None`: an unnamed file.
        path: Option<PathBuf>,
        /// Bytes per bit, a power of two.
        granule: u64,
    },
}

/// What becomes of a request that is to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It fails.
    Fails(Status),
    /// It panics.
    Panics,
}

/// Which requests fail, and how.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Failures {
    pub kinds: [bool; 5],
    /// The range of bytes that fails.
    pub range: Range<u64>,
    /// One of this many matching requests fails.
    pub every: u64,
    /// Of those, this many in a million fail.
    pub per_million: u32,
    /// The maximum number of failures.
    pub count: u64,
    pub outcome: Outcome,
}

/// A parsed URI: the device, and the layers over it from the innermost to the outermost.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Spec {
    pub base: Base,
    pub layers: Vec<Layer>,
}

/// Maximum number of layers over one device.
pub(crate) const LAYERS_MAX: usize = 8;
/// The longest delay.
const DELAY_MAX_NS: u64 = 3_600_000_000_000;
/// The unit of sizes, and the smallest block.
const SECTOR: u64 = 512;

impl std::str::FromStr for Spec {
    type Err = Error;

    fn from_str(uri: &str) -> Result<Spec, Error> {
        if let Some(wrong) = uri.chars().find(|c| c.is_whitespace() || c.is_control()) {
            return Err(Error::uri(format!(
                "'{uri}': write the character {wrong:?} as {}",
                escaped(wrong)
            )));
        }
        let mut parts: Vec<&str> = uri.split('|').collect();
        let base = base(parts.pop().unwrap_or_default())?;
        if parts.len() > LAYERS_MAX {
            return Err(Error::uri(format!("more than {LAYERS_MAX} layers over one device")));
        }
        let layers = parts.into_iter().rev().map(layer).collect::<Result<_, _>>()?;
        Ok(Spec { base, layers })
    }
}

fn scheme(text: &str) -> Result<(&str, &str), Error> {
    text.split_once(':').ok_or_else(|| {
        Error::uri(format!(
            "'{text}': a device is file:PATH, mem:SIZE, null:SIZE or nbd://HOST/EXPORT"
        ))
    })
}

fn base(text: &str) -> Result<Base, Error> {
    let (scheme, rest) = scheme(text)?;
    let (body, params) = match rest.split_once('?') {
        Some((body, params)) => (body, Params::parse(params)?),
        None => (rest, Params::default()),
    };
    match scheme {
        "file" => file(body, params),
        "nbd" | "nbd+unix" => nbd::nbd(scheme, body, params),
        "nbds" | "nbds+unix" => Err(named(scheme, "TLS is not supported: use a tunnel")),
        "mem" | "null" => {
            let mut params = params;
            let size = size(&decoded(body)?).map_err(|why| named(scheme, &why))?;
            let block = params.take("block", block)?.unwrap_or(SECTOR as u32);
            params.end(scheme, "block")?;
            if size == 0 || !size.is_multiple_of(u64::from(block)) {
                let text = format!("{scheme}: the size must be a multiple of the block, {block}");
                return Err(Error::uri(text));
            }
            match scheme {
                "mem" => Ok(Base::Mem { size, block }),
                _ => Ok(Base::Null { size, block }),
            }
        }
        _ if layer::is_layer(scheme) => Err(Error::uri(format!(
            "'{text}': {scheme} lies over a device, as in {scheme}:...|file:PATH"
        ))),
        _ => Err(Error::uri(format!(
            "'{scheme}:' is not a device: use file:, mem:, null: or nbd:, and {} as layers over one of them",
            layer::list("or")
        ))),
    }
}

fn file(body: &str, mut params: Params) -> Result<Base, Error> {
    let path = PathBuf::from(OsString::from_vec(decoded_bytes(body)?));
    if path.as_os_str().is_empty() {
        return Err(Error::uri("file: needs a path"));
    }
    let engine = params.take("engine", |text| match text {
        "uring" => Ok(Engine::Uring),
        "aio" => Ok(Engine::Aio),
        "mmap" => Ok(Engine::Mmap),
        "sync" => Ok(Engine::Sync),
        _ => Err("must be uring, aio, mmap or sync".to_owned()),
    })?;
    let fua = params.take("write", is_through)?;
    let read_only = params.take("readonly", switch)?;
    let direct = params.take("direct", |text| match text {
        "auto" => Ok(None),
        _ => switch(text).map(Some).map_err(|_| "must be on, off or auto".to_owned()),
    })?;
    let lock = params.take("lock", |text| match text {
        "ring" => Ok(Lock::Ring),
        _ => switch(text)
            .map(|on| if on { Lock::Open } else { Lock::Never })
            .map_err(|_| "must be on, ring or off".to_owned()),
    })?;
    let block = params.take("block", block)?;
    params.end("file", "engine, write, readonly, direct, lock, block")?;
    let (engine, direct) = (engine.unwrap_or(Engine::Uring), direct.flatten());
    match (engine, direct) {
        (Engine::Aio, Some(false)) => {
            return Err(Error::uri(
                "file: engine=aio needs direct I/O: through the page cache its calls block",
            ));
        }
        (Engine::Mmap, Some(true)) => {
            return Err(Error::uri("file: engine=mmap uses the page cache and cannot be direct"));
        }
        _ => {}
    }
    Ok(Base::File {
        path,
        engine,
        fua: fua.unwrap_or(false),
        read_only: read_only.unwrap_or(false),
        direct,
        lock: lock.unwrap_or(Lock::Open),
        block,
    })
}

/// The value of `write`: whether each write is durable.
fn is_through(text: &str) -> Result<bool, String> {
    match text {
        "cached" => Ok(false),
        "through" => Ok(true),
        _ => Err("must be cached or through".to_owned()),
    }
}

/// The URI of the same device for a process with another working directory: makes a relative path
/// of a file begin at `dir`. Returns any other text unchanged.
pub fn uri_under(uri: &str, dir: &Path) -> String {
    let device = uri.rfind('|').map_or(0, |at| at + 1);
    let Some(path) = uri[device..].strip_prefix("file:") else { return uri.to_owned() };
    let quoted_root = path.get(..3).is_some_and(|head| head.eq_ignore_ascii_case("%2F"));
    if path.starts_with(['/', '?']) || path.is_empty() || quoted_root {
        return uri.to_owned();
    }
    format!("{}{}/{path}", &uri[..device], file_uri(dir))
}

/// The URI of a file.
pub fn file_uri(path: &Path) -> String {
    let mut uri = "file:".to_owned();
    for &byte in path.as_os_str().as_bytes() {
        match byte {
            b'%' | b'|' | b'?' | 0..=b' ' | 0x7f.. => uri.push_str(&format!("%{byte:02X}")),
            byte => uri.push(char::from(byte)),
        }
    }
    uri
}

/// The path of the image, if the device below all layers is a file.
pub fn image_of(uri: &str) -> Option<PathBuf> {
    match uri.parse::<Spec>().ok()?.base {
        Base::File { path, .. } => Some(path),
        _ => None,
    }
}

/// Whether the device below all layers is on a server.
pub fn is_remote(uri: &str) -> bool {
    nbd_of(uri).is_some()
}

/// The export, if the device below all layers is one of an NBD server.
pub(crate) fn nbd_of(uri: &str) -> Option<NbdExport> {
    match uri.parse::<Spec>().ok()?.base {
        Base::Nbd(export) => Some(export),
        _ => None,
    }
}

/// Whether the image of a URI is locked only while a virtual machine uses it.
pub fn locks_for_use(uri: &str) -> bool {
    let spec = uri.parse::<Spec>();
    spec.is_ok_and(|spec| matches!(spec.base, Base::File { lock: Lock::Ring, .. }))
}

/// For fuzzers: an invalid URI is refused with a text, and a valid one names the same device from
/// another directory.
#[cfg(feature = "testing")]
pub fn fuzz(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let dir = Path::new("/a b/%|?&=\u{fc}");
    let under = uri_under(text, dir).parse::<Spec>();
    match text.parse::<Spec>() {
        Ok(mut spec) => {
            assert!(spec.layers.len() <= LAYERS_MAX);
            if let Base::File { path, .. } = &mut spec.base {
                *path = dir.join(&*path);
            }
            assert_eq!(under.expect("the same in another directory"), spec);
        }
        Err(error) => assert!(!error.to_string().is_empty() && under.is_err()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(uri: &str) -> Spec {
        uri.parse().unwrap()
    }

    fn refusal(uri: &str) -> String {
        uri.parse::<Spec>().unwrap_err().to_string()
    }

    #[test]
    fn a_relative_path_begins_at_the_directory() {
        let under = |uri| uri_under(uri, Path::new("/a b/ü"));
        assert_eq!(
            under("delay:all=1ms|file:vm.img?engine=aio"),
            "delay:all=1ms|file:/a%20b/%C3%BC/vm.img?engine=aio"
        );
        for same in ["limit:iops=1|file:/vm.img", "file:%2fvm.img", "null:1G", "file:", "file:?a"] {
            assert_eq!(under(same), same);
        }
    }

    #[test]
    fn the_image_is_below_all_layers() {
        let image = |uri| super::image_of(uri).map(|path| path.display().to_string());
        for uri in
            ["file:/a%20b", "file:/a%20b?engine=mmap", "delay:all=1s|limit:iops=1|file:/a%20b"]
        {
            assert_eq!(image(uri).as_deref(), Some("/a b"), "{uri}");
        }
        assert_eq!(image("mem:1M"), None);
        assert_eq!(image("delay:all=1s|null:1M"), None);
        assert_eq!(image("nothing"), None);
    }

    #[test]
    fn devices_and_their_defaults() {
        assert_eq!(parse("mem:8G").base, Base::Mem { size: 8 << 30, block: 512 });
        assert_eq!(parse("null:1T?block=4K").base, Base::Null { size: 1 << 40, block: 4096 });
        let expected = Base::File {
            path: "vm1.img".into(),
            engine: Engine::Uring,
            fua: false,
            read_only: false,
            direct: None,
            lock: Lock::Open,
            block: None,
        };
        assert_eq!(parse("file:vm1.img"), Spec { base: expected, layers: Vec::new() });
        let Base::File { engine, fua, read_only, direct, lock, block, .. } =
            parse("file:a?engine=sync&write=through&readonly=on&direct=off&lock=off&block=4096")
                .base
        else {
            unreachable!()
        };
        assert_eq!((engine, fua, read_only), (Engine::Sync, true, true));
        assert_eq!((direct, lock, block), (Some(false), Lock::Never, Some(4096)));
    }

    #[test]
    fn an_export_is_named_as_qemu_names_it() {
        let nbd = |uri: &str| match parse(uri).base {
            Base::Nbd(export) => export,
            other => panic!("{other:?}"),
        };
        let tcp = |host: &str, port| NbdServer::Tcp(host.to_owned(), port);
        let all = NbdExport {
            server: tcp("storage-1.example", 10809),
            export: "vm1".to_owned(),
            fua: false,
            read_only: false,
            reconnect_ns: 30_000_000_000,
            block: None,
        };
        assert_eq!(nbd("nbd://storage-1.example/vm1"), all);
        for (uri, server, export) in [
            ("nbd://10.0.0.1:99/", tcp("10.0.0.1", 99), ""),
            ("nbd://localhost", tcp("localhost", 10809), ""),
            ("nbd://[::1]:99/a%20b", tcp("::1", 99), "a b"),
            ("nbd://[fe80::1]//a/b", tcp("fe80::1", 10809), "/a/b"),
            ("nbd+unix:///a?socket=/run/a%20b", NbdServer::Unix("/run/a b".into()), "a"),
            ("nbd+unix://?socket=/s", NbdServer::Unix("/s".into()), ""),
        ] {
            let found = nbd(uri);
            assert_eq!((found.server, &*found.export), (server, export), "{uri}");
        }
        let keys =
            nbd("limit:iops=9|nbd://h/x?write=through&readonly=on&reconnect-delay=5&block=4K");
        assert_eq!((keys.fua, keys.read_only, keys.block), (true, true, Some(4096)));
        assert_eq!(keys.reconnect_ns, 5_000_000_000);
        assert_eq!(nbd("nbd://h/x?reconnect-delay=100ms").reconnect_ns, 100_000_000);
        assert_eq!(nbd("nbd://[::1]/x").to_string(), "nbd://[::1]:10809/x");
        assert_eq!(uri_under("nbd://h/x", Path::new("/a")), "nbd://h/x");
    }

    #[test]
    fn a_path_may_hold_any_quoted_byte() {
        for (uri, expected) in [
            ("file:/a=b&c,d;e", "/a=b&c,d;e"),
            ("file:a%20b%7Cc%3Fd%25e", "a b|c?d%e"),
            ("file:C:x%0A", "C:x\n"),
            ("file:grün.img", "grün.img"),
        ] {
            let Base::File { path, .. } = parse(uri).base else { unreachable!() };
            assert_eq!(path, PathBuf::from(expected));
        }
    }

    #[test]
    fn layers_cover_the_device_after_the_bar() {
        let spec = parse("delay:read=5ms&write=1us..2s|limit:iops=100&bytes=1M&burst=1s|mem:1M");
        let limit = Layer::Limit(Rates { iops: 100, bytes: 1 << 20, burst_ns: 1_000_000_000 });
        let (read, write) = ((5_000_000, 5_000_000), (1_000, 2_000_000_000));
        let delay = Layer::Delay { ns: [read, write, (0, 0), (0, 0), (0, 0)] };
        assert_eq!(spec.layers, [limit, delay]);
        let all = parse("error:|null:1M").layers;
        assert_eq!(all, parse("error:?kind=all|null:1M").layers);
        let dirty = parse("dirty:file=/a%26b&granule=4K|dirty:|mem:1M").layers;
        let path = Some("/a&b".into());
        let unnamed = Layer::Dirty { path: None, granule: 65536 };
        assert_eq!(dirty, [unnamed, Layer::Dirty { path, granule: 4096 }]);
        let some = "error:kind=read,flush&range=4K..8K&every=3&chance=0.25&count=2&status=nospace";
        let expected = Layer::Error(Failures {
            kinds: [true, false, true, false, false],
            range: 4096..8192,
            every: 3,
            per_million: 250_000,
            count: 2,
            outcome: Outcome::Fails(Status::NoSpace),
        });
        assert_eq!(parse(&format!("{some}|null:1M")).layers, [expected]);
    }

    #[test]
    fn each_mistake_is_named() {
        for (uri, expected) in [
            ("", "file:PATH"),
            ("vm1.img", "file:PATH"),
            ("http://x", "'http:' is not a device"),
            ("file:", "needs a path"),
            ("file:a b", "%20"),
            ("file:a%2", "%25"),
            ("file:a%zz", "%25"),
            ("file:a%00", "zero byte"),
            ("file:a?engine=uring&engine=aio", "'engine' is repeated"),
            ("file:a?engine=fast", "engine=fast: must be uring, aio, mmap or sync"),
            ("file:a?cache=none", "unknown key 'cache'"),
            ("file:a?readonly", "'readonly' is not KEY=VALUE"),
            ("file:a?readonly=maybe", "must be on or off"),
            ("file:a?engine=aio&direct=off", "needs direct I/O"),
            ("file:a?engine=mmap&direct=on", "page cache"),
            ("file:a|file:b", "%7C"),
            ("mem:", "is not a size"),
            ("mem:8Q", "is not a size"),
            ("mem:-1", "is not a size"),
            ("mem:+1", "is not a size"),
            ("mem:99999999T", "above the limit"),
            ("mem:1000", "multiple of the block, 512"),
            ("mem:0", "multiple of the block"),
            ("null:1M?block=1000", "power of two"),
            ("nbd:unix:/s", "needs two slashes"),
            ("nbd:///x", "needs a host"),
            ("nbd://a:b:c/x", "needs a host"),
            ("nbd://user@h/x", "needs a host"),
            ("nbd://h:0/x", "needs a host"),
            ("nbd://h:65536/x", "needs a host"),
            ("nbd://[127.0.0.1]/x", "needs a host"),
            ("nbd://[::1]x/x", "needs a host"),
            ("nbd://h/x?socket=/s", "belongs to nbd+unix:"),
            ("nbd+unix:///x", "needs socket=PATH"),
            ("nbd+unix://h/x?socket=/s", "has no host"),
            ("nbd+unix:///x?socket=s", "must be an absolute path"),
            ("nbd://h/x?reconnect-delay=2h", "is not a time"),
            ("nbd://h/x?reconnect-delay=3601", "at most an hour"),
            ("nbd://h/x?tls-hostname=h", "unknown key 'tls-hostname'"),
            ("nbds://h/x", "TLS is not supported"),
            ("delay:read=5ms", "lies over a device"),
            ("delay:read=5|mem:1M", "is not a time"),
            ("delay:read=2ms..1ms|mem:1M", "must not end before it begins"),
            ("delay:read=2000000s|mem:1M", "at most an hour"),
            ("limit:burst=1s|mem:1M", "needs iops"),
            ("limit:iops=0|mem:1M", "must be a number, at least 1"),
            ("dirty:granule=2K|mem:1M", "from 4K to 1G"),
            ("dirty:granule=5000|mem:1M", "power of two"),
            ("dirty:file=map|mem:1M", "must be an absolute path"),
            ("dirty:", "lies over a device"),
            ("error:chance=2|mem:1M", "from 0 to 1"),
            ("error:chance=NaN|mem:1M", "from 0 to 1"),
            ("error:kind=reads|mem:1M", "must be a list"),
            ("error:range=8K..4K|mem:1M", "empty range"),
            ("error:|error:|error:|error:|error:|error:|error:|error:|error:|mem:1M", "layers"),
        ] {
            let text = refusal(uri);
            assert!(text.contains(expected), "{uri}: {text}");
        }
    }
}

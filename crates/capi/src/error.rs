//! Codes, errors, and the fence that no panic passes.

use std::any::Any;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use millrace::{ErrorKind, client};

use crate::bytes::Out;

/// The result of a call: `millrace_code`. The numbers never change.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// It succeeded.
    Ok = 0,
    /// [`ErrorKind::NoDatabase`].
    NoDatabase = 1,
    /// [`ErrorKind::Locked`].
    Locked = 2,
    /// [`ErrorKind::Corruption`].
    Corruption = 3,
    /// [`ErrorKind::Unsupported`].
    Unsupported = 4,
    /// [`ErrorKind::Io`].
    Io = 5,
    /// [`ErrorKind::Full`].
    Full = 6,
    /// [`ErrorKind::Memory`].
    Memory = 7,
    /// [`ErrorKind::Conflict`].
    Conflict = 8,
    /// [`ErrorKind::Expired`].
    Expired = 9,
    /// [`ErrorKind::Older`].
    Older = 10,
    /// [`ErrorKind::UnknownColumnFamily`].
    UnknownFamily = 11,
    /// [`ErrorKind::InvalidOption`].
    InvalidOption = 12,
    /// [`ErrorKind::Closed`].
    Closed = 13,
    /// [`ErrorKind::Panicked`], or a panic of the call itself.
    Panicked = 14,
    /// An argument is null, or impossible.
    InvalidArgument = 15,
    /// The completion queue has its full number of operations.
    Busy = 16,
    /// A kind that this version has no number for.
    Other = 17,
    /// [`client::ErrorKind::Unreachable`].
    Unreachable = 18,
    /// [`client::ErrorKind::Timeout`].
    Timeout = 19,
    /// [`client::ErrorKind::OutcomeUnknown`].
    OutcomeUnknown = 20,
    /// [`client::ErrorKind::Denied`].
    Denied = 21,
    /// [`client::ErrorKind::ReadOnly`].
    ReadOnly = 22,
    /// [`client::ErrorKind::WrongType`].
    WrongType = 23,
    /// [`client::ErrorKind::Busy`].
    ServerBusy = 24,
    /// [`client::ErrorKind::Server`].
    Server = 25,
    /// [`client::ErrorKind::Protocol`].
    Protocol = 26,
}

/// All codes with their names.
const NAMES: [(Code, &CStr); 27] = [
    (Code::Ok, c"ok"),
    (Code::NoDatabase, c"no database"),
    (Code::Locked, c"locked"),
    (Code::Corruption, c"corruption"),
    (Code::Unsupported, c"unsupported"),
    (Code::Io, c"io"),
    (Code::Full, c"full"),
    (Code::Memory, c"memory"),
    (Code::Conflict, c"conflict"),
    (Code::Expired, c"expired"),
    (Code::Older, c"older"),
    (Code::UnknownFamily, c"unknown family"),
    (Code::InvalidOption, c"invalid option"),
    (Code::Closed, c"closed"),
    (Code::Panicked, c"panicked"),
    (Code::InvalidArgument, c"invalid argument"),
    (Code::Busy, c"busy"),
    (Code::Other, c"other"),
    (Code::Unreachable, c"unreachable"),
    (Code::Timeout, c"timeout"),
    (Code::OutcomeUnknown, c"outcome unknown"),
    (Code::Denied, c"denied"),
    (Code::ReadOnly, c"read only"),
    (Code::WrongType, c"wrong type"),
    (Code::ServerBusy, c"server busy"),
    (Code::Server, c"server"),
    (Code::Protocol, c"protocol"),
];

impl From<ErrorKind> for Code {
    fn from(kind: ErrorKind) -> Code {
        match kind {
            ErrorKind::NoDatabase => Code::NoDatabase,
            ErrorKind::Locked => Code::Locked,
            ErrorKind::Corruption => Code::Corruption,
            ErrorKind::Unsupported => Code::Unsupported,
            ErrorKind::Io => Code::Io,
            ErrorKind::Full => Code::Full,
            ErrorKind::Memory => Code::Memory,
            ErrorKind::Conflict => Code::Conflict,
            ErrorKind::Expired => Code::Expired,
            ErrorKind::Older => Code::Older,
            ErrorKind::UnknownColumnFamily => Code::UnknownFamily,
            ErrorKind::InvalidOption => Code::InvalidOption,
            ErrorKind::Closed => Code::Closed,
            ErrorKind::Panicked => Code::Panicked,
            _ => Code::Other,
        }
    }
}

impl From<client::ErrorKind> for Code {
    fn from(kind: client::ErrorKind) -> Code {
        use client::ErrorKind;

        match kind {
            ErrorKind::Unreachable => Code::Unreachable,
            ErrorKind::Timeout => Code::Timeout,
            ErrorKind::OutcomeUnknown => Code::OutcomeUnknown,
            ErrorKind::Conflict => Code::Conflict,
            ErrorKind::Unsupported => Code::Unsupported,
            ErrorKind::Denied => Code::Denied,
            ErrorKind::ReadOnly => Code::ReadOnly,
            ErrorKind::WrongType => Code::WrongType,
            ErrorKind::Busy => Code::ServerBusy,
            ErrorKind::Full => Code::Full,
            ErrorKind::Server => Code::Server,
            ErrorKind::Protocol => Code::Protocol,
            ErrorKind::InvalidOption => Code::InvalidOption,
            ErrorKind::Closed => Code::Closed,
            _ => Code::Other,
        }
    }
}

/// A failed call: `millrace_error`.
#[derive(Clone, Debug)]
pub struct Error {
    code: Code,
    message: CString,
}

/// The result of an operation of this crate.
pub(crate) type Result<T> = std::result::Result<T, Error>;

/// Where a call puts its error, or null if it succeeds: `millrace_error **`.
pub type ErrorOut<'a> = Out<'a, Option<Box<Error>>>;

impl Error {
    #[cold]
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Error {
        let mut bytes = message.into().into_bytes();
        bytes.retain(|&byte| byte != 0);
        Error { code, message: CString::new(bytes).unwrap_or_default() }
    }

    /// An argument is wrong.
    #[cold]
    pub(crate) fn argument(message: impl Into<String>) -> Error {
        Error::new(Code::InvalidArgument, message)
    }

    pub(crate) fn code(&self) -> Code {
        self.code
    }

    #[cold]
    pub(crate) fn panicked(payload: &(dyn Any + Send)) -> Error {
        let what = payload.downcast_ref::<&str>().copied();
        let what = what.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        Error::new(Code::Panicked, format!("the call panicked: {}", what.unwrap_or("no message")))
    }
}

impl From<millrace::Error> for Error {
    #[cold]
    fn from(error: millrace::Error) -> Error {
        Error::new(error.kind().into(), error.to_string())
    }
}

impl From<client::Error> for Error {
    #[cold]
    fn from(error: client::Error) -> Error {
        Error::new(error.kind().into(), error.to_string())
    }
}

/// The handle, or the error that it is null.
pub(crate) fn given<T>(handle: Option<T>, name: &str) -> Result<T> {
    handle.ok_or_else(|| Error::argument(format!("{name} is NULL")))
}

/// Does the work of a call, and reports how it went.
pub(crate) fn answer(error: ErrorOut<'_>, work: impl FnOnce() -> Result<()>) -> Code {
    let outcome = catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|payload| Err(Error::panicked(&*payload)));
    let code = outcome.as_ref().map_or_else(Error::code, |()| Code::Ok);
    if let Some(error) = error {
        error.write(outcome.err().map(Box::new));
    }
    code
}

/// Does the work of a call that reports no error; if it panics, the result is `otherwise`.
pub(crate) fn or_else<T>(otherwise: T, work: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(otherwise)
}

/// The name of a code, such as `locked`.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_code_name(code: c_int) -> *const c_char {
    let named = NAMES.iter().find(|(known, _)| *known as c_int == code);
    named.map_or(c"unknown", |(_, name)| name).as_ptr()
}

/// The code of an error.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_error_code(error: Option<&Error>) -> Code {
    error.map_or(Code::Ok, Error::code)
}

/// The text of an error.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_error_message(error: Option<&Error>) -> *const c_char {
    error.map_or(c"no error", |error| &error.message).as_ptr()
}

/// Frees an error.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_error_free(error: Option<Box<Error>>) {
    drop(error);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_code_and_a_message() {
        let mut error = std::mem::MaybeUninit::uninit();
        let code = answer(Some(&mut error), || panic!("on purpose {}", 1));
        assert_eq!(code, Code::Panicked);
        // SAFETY: `answer` wrote it.
        let error = unsafe { error.assume_init() }.unwrap();
        assert_eq!(error.message.as_c_str(), c"the call panicked: on purpose 1");
        assert_eq!(or_else(7, || panic!("on purpose")), 7);
    }

    #[test]
    fn a_message_has_no_zero_byte() {
        let error = Error::argument("a\0b");
        assert_eq!(error.message.as_c_str(), c"ab");
    }
}

//! Options of clients.

use std::ffi::{c_char, c_int};
use std::time::Duration;

use millrace::client;

use crate::bytes::{path, text};
use crate::error::{Code, ErrorOut, Result, answer, given};

/// How a client connects and behaves: `millrace_client_options`.
#[derive(Clone, Debug, Default)]
pub struct ClientOptions {
    options: client::Options,
    /// `None`: no TLS, unless the address asks for it.
    tls: Option<client::Tls>,
}

impl ClientOptions {
    pub(super) fn all(&self) -> client::Options {
        match &self.tls {
            None => self.options.clone(),
            Some(tls) => self.options.clone().tls(tls.clone()),
        }
    }
}

fn set(
    options: Option<&mut ClientOptions>,
    error: ErrorOut<'_>,
    change: impl FnOnce(client::Options) -> Result<client::Options>,
) -> Code {
    answer(error, || {
        let options = given(options, "options")?;
        options.options = change(options.options.clone())?;
        Ok(())
    })
}

fn set_tls(
    options: Option<&mut ClientOptions>,
    error: ErrorOut<'_>,
    change: impl FnOnce(client::Tls) -> Result<client::Tls>,
) -> Code {
    answer(error, || {
        let options = given(options, "options")?;
        options.tls = Some(change(options.tls.clone().unwrap_or_default())?);
        Ok(())
    })
}

/// Makes the default options.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_options_new() -> Box<ClientOptions> {
    Box::default()
}

/// Frees options.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_options_free(options: Option<Box<ClientOptions>>) {
    drop(options);
}

/// See [`client::Options::password`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_options_set_password(
    options: Option<&mut ClientOptions>,
    password: *const c_char,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| {
        // SAFETY: the caller's promise.
        Ok(options.password(unsafe { text(password, "password") }?))
    })
}

/// See [`client::Options::user`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_options_set_user(
    options: Option<&mut ClientOptions>,
    user: *const c_char,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| {
        // SAFETY: the caller's promise.
        Ok(options.user(unsafe { text(user, "user") }?))
    })
}

/// See [`client::Options::database`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_options_set_database(
    options: Option<&mut ClientOptions>,
    number: u32,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| Ok(options.database(number)))
}

/// See [`client::Options::timeout`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_options_set_timeout_ms(
    options: Option<&mut ClientOptions>,
    ms: u64,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| Ok(options.timeout(Duration::from_millis(ms))))
}

/// See [`client::Options::connect_timeout`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_options_set_connect_timeout_ms(
    options: Option<&mut ClientOptions>,
    ms: u64,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| Ok(options.connect_timeout(Duration::from_millis(ms))))
}

/// See [`client::Options::retry`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_options_set_retry(
    options: Option<&mut ClientOptions>,
    retry: c_int,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| Ok(options.retry(retry != 0)))
}

/// See [`client::Options::cache`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_options_set_cache(
    options: Option<&mut ClientOptions>,
    bytes: usize,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| Ok(options.cache(bytes)))
}

/// See [`client::Options::staleness_max`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_options_set_staleness_max_ms(
    options: Option<&mut ClientOptions>,
    ms: u64,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| Ok(options.staleness_max(Duration::from_millis(ms))))
}

/// See [`client::Options::read_ahead`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_options_set_read_ahead(
    options: Option<&mut ClientOptions>,
    bytes: usize,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| Ok(options.read_ahead(bytes)))
}

/// See [`client::Options::index`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_options_set_index(
    options: Option<&mut ClientOptions>,
    bytes: usize,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| Ok(options.index(bytes)))
}

/// See [`client::Options::reply_bytes_max`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_options_set_reply_bytes_max(
    options: Option<&mut ClientOptions>,
    bytes: usize,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| Ok(options.reply_bytes_max(bytes)))
}

/// See [`client::Options::tls`]; 0 also forgets what TLS was told before.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_options_set_tls(
    options: Option<&mut ClientOptions>,
    tls: c_int,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let options = given(options, "options")?;
        options.tls = (tls != 0).then(|| options.tls.take().unwrap_or_default());
        Ok(())
    })
}

/// See [`client::Tls::authority`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_options_set_tls_authority(
    options: Option<&mut ClientOptions>,
    file: *const c_char,
    error: ErrorOut<'_>,
) -> Code {
    set_tls(options, error, |tls| {
        // SAFETY: the caller's promise.
        Ok(tls.authority(unsafe { path(file, "file") }?))
    })
}

/// See [`client::Tls::certificate`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_options_set_tls_certificate(
    options: Option<&mut ClientOptions>,
    file: *const c_char,
    key: *const c_char,
    error: ErrorOut<'_>,
) -> Code {
    set_tls(options, error, |tls| {
        // SAFETY: the caller's promise.
        let (file, key) = unsafe { (path(file, "file")?, path(key, "key")?) };
        Ok(tls.certificate(file, key))
    })
}

/// See [`client::Tls::server_name`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_options_set_tls_server_name(
    options: Option<&mut ClientOptions>,
    name: *const c_char,
    error: ErrorOut<'_>,
) -> Code {
    set_tls(options, error, |tls| {
        // SAFETY: the caller's promise.
        Ok(tls.server_name(unsafe { text(name, "name") }?))
    })
}

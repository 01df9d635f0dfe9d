//! Options for opening a database.

use std::ffi::{c_char, c_int};

use millrace::{Compression, Durability};

use crate::bytes::{array, text};
use crate::error::{Code, Error, ErrorOut, Result, answer, given};

/// How to open a database: `millrace_options`.
#[derive(Clone, Debug, Default)]
pub struct Options(pub(crate) millrace::Options);

fn set(
    options: Option<&mut Options>,
    error: ErrorOut<'_>,
    change: impl FnOnce(millrace::Options) -> Result<millrace::Options>,
) -> Code {
    answer(error, || {
        let options = given(options, "options")?;
        options.0 = change(options.0.clone())?;
        Ok(())
    })
}

/// Makes the default options.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_options_new() -> Box<Options> {
    Box::default()
}

/// Frees options.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_options_free(options: Option<Box<Options>>) {
    drop(options);
}

/// See [`millrace::Options::cores`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_options_set_cores(
    options: Option<&mut Options>,
    cores: usize,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| Ok(options.cores(cores)))
}

/// See [`millrace::Options::processors`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_options_set_processors(
    options: Option<&mut Options>,
    processors: *const usize,
    count: usize,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| {
        // SAFETY: the caller's promise.
        let processors = unsafe { array(processors, count, "processors") }?;
        Ok(options.processors(processors))
    })
}

/// See [`millrace::Options::memory`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_options_set_memory(
    options: Option<&mut Options>,
    bytes: u64,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| Ok(options.memory(bytes)))
}

/// See [`millrace::Options::durability`]; 0 is `Power`, 1 is `Process`.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_options_set_durability(
    options: Option<&mut Options>,
    durability: c_int,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| {
        let durability = match durability {
            0 => Durability::Power,
            1 => Durability::Process,
            _ => return Err(Error::argument(format!("there is no durability {durability}"))),
        };
        Ok(options.durability(durability))
    })
}

/// See [`millrace::Options::create`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_options_set_create(
    options: Option<&mut Options>,
    create: c_int,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| Ok(options.create(create != 0)))
}

/// See [`millrace::Options::adopt`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_options_set_adopt(
    options: Option<&mut Options>,
    adopt: c_int,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| Ok(options.adopt(adopt != 0)))
}

/// See [`millrace::Options::compression`]; the numbers are those of the header.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_options_set_compression(
    options: Option<&mut Options>,
    compression: c_int,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| {
        let compression = match compression {
            0 => Compression::None,
            1 => Compression::Snappy,
            2 => Compression::Zlib,
            3 => Compression::Bzip2,
            4 => Compression::Lz4,
            5 => Compression::Zstd,
            _ => return Err(Error::argument(format!("there is no compression {compression}"))),
        };
        Ok(options.compression(compression))
    })
}

/// See [`millrace::Options::merge_operator`]; the name is that of RocksDB.
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_options_set_merge_operator(
    options: Option<&mut Options>,
    name: *const c_char,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| {
        // SAFETY: the caller's promise.
        let name = unsafe { text(name, "name") }?;
        let operator = name.parse::<millrace::MergeOperator>();
        let operator =
            operator.map_err(|error| Error::new(Code::Unsupported, error.to_string()))?;
        Ok(options.merge_operator(operator))
    })
}

/// See [`millrace::Options::blob_min`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_options_set_blob_min(
    options: Option<&mut Options>,
    bytes: usize,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| Ok(options.blob_min(bytes)))
}

/// See [`millrace::Options::verify_checksums`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_options_set_verify_checksums(
    options: Option<&mut Options>,
    verify: c_int,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| Ok(options.verify_checksums(verify != 0)))
}

/// See [`millrace::Options::rocksdb_option`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_options_set_rocksdb_option(
    options: Option<&mut Options>,
    name: *const c_char,
    value: *const c_char,
    error: ErrorOut<'_>,
) -> Code {
    set(options, error, |options| {
        // SAFETY: the caller's promise.
        let (name, value) = unsafe { (text(name, "name")?, text(value, "value")?) };
        Ok(options.rocksdb_option(name, value))
    })
}

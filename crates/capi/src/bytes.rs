//! Memory of the caller, and values that the caller gets.

use std::ffi::{CStr, OsStr, c_char};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::{ptr, slice};

use crate::error::{Error, Result, given, or_else};

/// Where a call puts a result; the memory need not be initialized.
pub type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// Bytes of somebody else: `millrace_slice`. Null with size 0 is empty; as a bound it is none.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    data: *const u8,
    size: usize,
}

/// A value that the caller frees: `millrace_value`. There is none if `data` is null.
#[repr(C)]
#[derive(Debug)]
pub struct Value {
    data: *const u8,
    size: usize,
    /// What `data` points into.
    owner: Option<Box<millrace::Value>>,
}

// As in the header.
const _: () = assert!(size_of::<Slice>() == 2 * size_of::<usize>());
const _: () = assert!(size_of::<Value>() == 3 * size_of::<usize>());

// SAFETY: `data` points into memory that `owner` keeps, whose type is `Send` and is never changed.
unsafe impl Send for Value {}

impl Slice {
    /// No bytes.
    pub(crate) const NONE: Slice = Slice { data: ptr::null(), size: 0 };

    /// A view of bytes.
    pub(crate) fn of(bytes: &[u8]) -> Slice {
        Slice { data: bytes.as_ptr(), size: bytes.len() }
    }

    /// The bytes.
    ///
    /// # Safety
    /// The [contract](crate#contract), during `'a`.
    pub(crate) unsafe fn bytes<'a>(self, name: &str) -> Result<&'a [u8]> {
        // SAFETY: the caller's promise is the same.
        match unsafe { self.bound(name) }? {
            Some(bytes) => Ok(bytes),
            None => Ok(&[]),
        }
    }

    /// The bytes, or `None` for null.
    ///
    /// # Safety
    /// The [contract](crate#contract), during `'a`.
    pub(crate) unsafe fn bound<'a>(self, name: &str) -> Result<Option<&'a [u8]>> {
        if self.data.is_null() {
            return match self.size {
                0 => Ok(None),
                size => Err(Error::argument(format!("{name} is NULL and has {size} bytes"))),
            };
        }
        if isize::try_from(self.size).is_err() {
            return Err(Error::argument(format!("{name} cannot have {} bytes", self.size)));
        }
        // SAFETY: `data` is not null, and by the contract it points to `size` bytes that nobody
        // changes during `'a`. Their number fits an `isize`; bytes are always aligned.
        Ok(Some(unsafe { slice::from_raw_parts(self.data, self.size) }))
    }
}

impl Value {
    /// No value.
    pub(crate) const NONE: Value = Value { data: ptr::null(), size: 0, owner: None };

    pub(crate) fn new(value: Option<millrace::Value>) -> Value {
        let Some(value) = value else { return Value::NONE };
        let owner = Box::new(value);
        Value { data: owner.as_ptr(), size: owner.len(), owner: Some(owner) }
    }
}

/// Where the value of a call goes: at first there is none, so that it may be freed after an error.
pub(crate) fn value_out(out: Out<'_, Value>) -> Result<&mut Value> {
    Ok(given(out, "value")?.write(Value::NONE))
}

/// Where a new handle goes; at first there is none.
pub(crate) fn handle_out<'a, T>(
    out: Out<'a, Option<Box<T>>>,
    name: &str,
) -> Result<&'a mut Option<Box<T>>> {
    Ok(given(out, name)?.write(None))
}

/// An array of the caller.
///
/// # Safety
/// The [contract](crate#contract), during `'a`.
pub(crate) unsafe fn array<'a, T>(items: *const T, count: usize, name: &str) -> Result<&'a [T]> {
    check_array::<T>(items.is_null(), count, name)?;
    if count == 0 {
        return Ok(&[]);
    }
    // SAFETY: it is not null, by the contract it points to `count` aligned items that nobody
    // changes during `'a`, and they fit an `isize`.
    Ok(unsafe { slice::from_raw_parts(items, count) })
}

/// An array that a call fills.
///
/// # Safety
/// The [contract](crate#contract), during `'a`.
pub(crate) unsafe fn array_out<'a, T>(
    items: *mut MaybeUninit<T>,
    count: usize,
    name: &str,
) -> Result<&'a mut [MaybeUninit<T>]> {
    check_array::<T>(items.is_null(), count, name)?;
    if count == 0 {
        return Ok(&mut []);
    }
    // SAFETY: it is not null, by the contract it points to aligned memory for `count` items that
    // nobody else uses during `'a`, and they fit an `isize`.
    Ok(unsafe { slice::from_raw_parts_mut(items, count) })
}

fn check_array<T>(null: bool, count: usize, name: &str) -> Result<()> {
    if null && count > 0 {
        return Err(Error::argument(format!("{name} is NULL and has {count} items")));
    }
    let bytes = count.checked_mul(size_of::<T>());
    if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
        return Err(Error::argument(format!("{name} cannot have {count} items")));
    }
    Ok(())
}

/// A text of the caller.
///
/// # Safety
/// The [contract](crate#contract), during `'a`.
pub(crate) unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<&'a str> {
    // SAFETY: the caller's promise is the same.
    let text = unsafe { c_str(text, name) }?;
    text.to_str().map_err(|_| Error::argument(format!("{name} is not UTF-8: {text:?}")))
}

/// A path of the caller.
///
/// # Safety
/// The [contract](crate#contract), during `'a`.
pub(crate) unsafe fn path<'a>(path: *const c_char, name: &str) -> Result<&'a Path> {
    // SAFETY: the caller's promise is the same.
    let path = unsafe { c_str(path, name) }?;
    Ok(Path::new(OsStr::from_bytes(path.to_bytes())))
}

/// # Safety
/// The [contract](crate#contract), during `'a`.
unsafe fn c_str<'a>(text: *const c_char, name: &str) -> Result<&'a CStr> {
    if text.is_null() {
        return Err(Error::argument(format!("{name} is NULL")));
    }
    // SAFETY: it is not null, and by the contract it ends with a zero byte and does not change.
    Ok(unsafe { CStr::from_ptr(text) })
}

/// Frees a value. There is none afterwards, so a second call does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_value_free(value: Option<&mut Value>) {
    or_else((), || {
        if let Some(value) = value {
            *value = Value::NONE;
        }
    });
}

/// Frees all values of an array.
///
/// # Safety
/// The [contract](crate#contract), and all values are initialized.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_values_free(values: *mut Value, count: usize) {
    or_else((), || {
        let values = values.cast::<MaybeUninit<Value>>();
        // SAFETY: the caller's promise. `MaybeUninit` has the layout of what it holds.
        let values = unsafe { array_out(values, count, "values") }.unwrap_or_default();
        for value in values {
            // SAFETY: by the contract all values are initialized.
            *unsafe { value.assume_init_mut() } = Value::NONE;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_is_empty_or_no_bound_but_has_no_bytes() {
        // SAFETY: null is allowed.
        unsafe {
            assert_eq!(Slice::NONE.bytes("key").unwrap(), b"");
            assert_eq!(Slice::NONE.bound("start").unwrap(), None);
            assert!(Slice { data: ptr::null(), size: 1 }.bytes("key").is_err());
            assert!(Slice { data: b"".as_ptr(), size: usize::MAX }.bytes("key").is_err());
            assert_eq!(Slice::of(b"ab").bound("start").unwrap(), Some(&b"ab"[..]));
            assert!(array::<Slice>(ptr::null(), 1, "keys").is_err());
            assert!(array::<Slice>(&Slice::NONE, usize::MAX, "keys").is_err());
            assert!(array::<Slice>(ptr::null(), 0, "keys").unwrap().is_empty());
        }
    }

    #[test]
    fn a_value_points_into_its_owner_until_it_is_freed() {
        let mut value = Value::new(Some(millrace::Value::from("abc")));
        assert!(!value.data.is_null() && value.size == 3);
        let empty = Value::new(Some(millrace::Value::from("")));
        assert!(!empty.data.is_null() && empty.size == 0);
        millrace_value_free(Some(&mut value));
        millrace_value_free(Some(&mut value));
        assert!(value.data.is_null() && value.size == 0 && value.owner.is_none());
    }
}

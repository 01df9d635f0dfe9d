//! Arguments that are bytes, and values as views.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView};

use std::ffi::{c_int, c_void};

/// An argument with the buffer protocol, for the time of a call. It is not copied.
pub enum Bytes<'a, 'py> {
    Object(Borrowed<'a, 'py, PyBytes>),
    /// Contiguous.
    Buffer(PyUntypedBuffer),
}

impl<'a, 'py> FromPyObject<'a, 'py> for Bytes<'a, 'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(bytes) = object.cast::<PyBytes>() {
            return Ok(Bytes::Object(bytes));
        }
        let Ok(buffer) = PyUntypedBuffer::get(&object) else {
            let hint = match object.is_instance_of::<pyo3::types::PyString>() {
                true => ": encode it",
                false => "",
            };
            let name = object.get_type().name()?;
            let text = format!("a bytes-like object is required, not '{name}'{hint}");
            return Err(PyTypeError::new_err(text));
        };
        match buffer.is_c_contiguous() {
            true => Ok(Bytes::Buffer(buffer)),
            false => Err(PyBufferError::new_err("the buffer must be contiguous")),
        }
    }
}

impl AsRef<[u8]> for Bytes<'_, '_> {
    #[allow(unsafe_code)]
    fn as_ref(&self) -> &[u8] {
        match self {
            Bytes::Object(bytes) => bytes.as_bytes(),
            Bytes::Buffer(buffer) if buffer.len_bytes() == 0 => &[],
            // SAFETY: the exporter keeps a contiguous buffer of this length at this address until
            // it is released (`PyUntypedBuffer::drop`). Callers hold the GIL and run no Python code
            // while they use the slice, so no Python thread writes to it. That a native thread
            // without the GIL does not either is the rule of the protocol for its consumers.
            Bytes::Buffer(buffer) => unsafe {
                std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), buffer.len_bytes())
            },
        }
    }
}

/// The keys of an iterable, copied.
pub fn keys(iterable: &Bound<'_, PyAny>) -> PyResult<Vec<Box<[u8]>>> {
    let mut keys = Vec::with_capacity(iterable.len().unwrap_or(0).min(1 << 16));
    for key in iterable.try_iter()? {
        let key = key?;
        keys.push(key.extract::<Bytes<'_, '_>>()?.as_ref().into());
    }
    Ok(keys)
}

/// A value that Python reads where it is.
#[pyclass(frozen)]
struct View(millrace::Value);

#[pymethods]
impl View {
    #[allow(unsafe_code)]
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("there is no view to fill"));
        }
        let bytes: &[u8] = &slf.get().0;
        let (start, len) = (bytes.as_ptr().cast_mut().cast::<c_void>(), bytes.len());
        // SAFETY: Python passes a `Py_buffer` to fill. The bytes are immutable (the view is filled
        // as read-only) and stay where they are as long as `slf`, of which the view takes a
        // reference. No slice is longer than `isize::MAX`.
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, len as isize, 1, flags) };
        match filled {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }
}

/// A value as a read-only `memoryview`, without a copy.
pub fn view(py: Python<'_>, value: millrace::Value) -> PyResult<Py<PyAny>> {
    let view = Bound::new(py, View(value))?;
    Ok(PyMemoryView::from(&view)?.into_any().unbind())
}

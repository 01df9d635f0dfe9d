//! Column families.

use std::ffi::{CString, c_char};

use millrace::blocking;

use crate::bytes::{Out, handle_out, text};
use crate::db::{Db, check_db};
use crate::error::{Code, ErrorOut, Result, answer, given, or_else};

/// A column family: `millrace_family`.
#[derive(Debug)]
pub struct Family {
    family: blocking::ColumnFamily,
    name: CString,
    db: u64,
}

impl Family {
    fn new(family: blocking::ColumnFamily, db: &Db) -> Option<Box<Family>> {
        let name = CString::new(family.name()).unwrap_or_default();
        Some(Box::new(Family { family, name, db: db.id }))
    }

    /// The family, if it belongs to this database.
    pub(crate) fn of(&self, db: u64) -> Result<&blocking::ColumnFamily> {
        check_db(db, self.db, "family")?;
        Ok(&self.family)
    }

    /// The family and its database.
    pub(crate) fn parts(&self) -> (&blocking::ColumnFamily, u64) {
        (&self.family, self.db)
    }
}

/// The names of column families: `millrace_names`.
#[derive(Debug)]
pub struct Names(Vec<CString>);

/// See [`millrace::Db::column_family`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_family_open(
    db: Option<&Db>,
    name: *const c_char,
    family: Out<'_, Option<Box<Family>>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let family = handle_out(family, "family")?;
        // SAFETY: the caller's promise.
        let (db, name) = (given(db, "db")?, unsafe { text(name, "name") }?);
        *family = Family::new(db.blocking.column_family(name)?, db);
        Ok(())
    })
}

/// See [`millrace::Db::create_column_family`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_family_create(
    db: Option<&Db>,
    name: *const c_char,
    family: Out<'_, Option<Box<Family>>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let family = handle_out(family, "family")?;
        // SAFETY: the caller's promise.
        let (db, name) = (given(db, "db")?, unsafe { text(name, "name") }?);
        *family = Family::new(db.blocking.create_column_family(name)?, db);
        Ok(())
    })
}

/// See [`millrace::Db::drop_column_family`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_family_drop(
    db: Option<&Db>,
    name: *const c_char,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let (db, name) = (given(db, "db")?, unsafe { text(name, "name") }?);
        Ok(db.blocking.drop_column_family(name)?)
    })
}

/// The name of a column family.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_family_name(family: Option<&Family>) -> *const c_char {
    family.map_or(c"default", |family| &family.name).as_ptr()
}

/// Frees the handle of a column family.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_family_free(family: Option<Box<Family>>) {
    or_else((), || drop(family));
}

/// See [`millrace::Db::column_families`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_family_list(
    db: Option<&Db>,
    names: Out<'_, Option<Box<Names>>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let names = handle_out(names, "names")?;
        let found = given(db, "db")?.blocking.column_families()?;
        let found = found.into_iter().map(|name| CString::new(name).unwrap_or_default());
        *names = Some(Box::new(Names(found.collect())));
        Ok(())
    })
}

/// The number of names.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_names_count(names: Option<&Names>) -> usize {
    names.map_or(0, |names| names.0.len())
}

/// One of the names; null if there is none at this index.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_names_get(names: Option<&Names>, index: usize) -> *const c_char {
    let name = names.and_then(|names| names.0.get(index));
    name.map_or(std::ptr::null(), |name| name.as_ptr())
}

/// Frees names.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_names_free(names: Option<Box<Names>>) {
    drop(names);
}

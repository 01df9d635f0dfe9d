//! Merge operators: how the operands of a key and the value below them become one value.
//!
//! RocksDB names the operator of a column family in two places: a table's properties have its class
//! name, and OPTIONS has the class name or an id, with its options. These operators give, byte for
//! byte, what RocksDB's own give. All of them accept any operands, so a merge cannot fail.

use std::collections::BTreeSet;
use std::str::FromStr;

use reactor::Core;

use crate::error::{Error, Kind, Result};

/// One of RocksDB's built-in merge operators. It is parsed from RocksDB's id or class name, or from
/// the form of OPTIONS: `{id=StringAppendOperator;delimiter=|;}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MergeOperator {
    /// `uint64add`: the sum of little-endian numbers of 8 bytes, modulo 2^64. A value of another
    /// length counts as 0.
    UInt64Add,
    /// `stringappend`: base and operands with a delimiter between them.
    StringAppend(Box<str>),
    /// `stringappendtest`: the same. Its operands are never merged without a base.
    StringAppendTest(Box<str>),
    /// `put`: the newest operand.
    Put,
    /// `max`: the greatest of base and operands in bytewise order.
    Max,
    /// `bytesxor`: the bitwise exclusive or; a longer value keeps its tail.
    BytesXor,
}

impl MergeOperator {
    /// RocksDB's class name, as in the properties of tables.
    pub fn name(&self) -> &'static str {
        match self {
            MergeOperator::UInt64Add => "UInt64AddOperator",
            MergeOperator::StringAppend(_) => "StringAppendOperator",
            MergeOperator::StringAppendTest(_) => "StringAppendTESTOperator",
            MergeOperator::Put => "PutOperator",
            MergeOperator::Max => "MaxOperator",
            MergeOperator::BytesXor => "BytesXOR",
        }
    }

    /// The operator as RocksDB writes it into OPTIONS, before the escapes of that file.
    pub(crate) fn to_option(&self) -> String {
        match self {
            MergeOperator::StringAppend(delimiter) | MergeOperator::StringAppendTest(delimiter)
                if !delimiter.is_empty() =>
            {
                format!("{{id={};delimiter={};}}", self.name(), delimiter)
            }
            _ => self.name().to_owned(),
        }
    }

    /// The operator that OPTIONS of RocksDB 7.8 or newer names. These omit an empty delimiter.
    pub(crate) fn from_option(text: &str) -> Result<MergeOperator> {
        Ok(match text {
            "StringAppendOperator" => MergeOperator::StringAppend("".into()),
            "StringAppendTESTOperator" => MergeOperator::StringAppendTest("".into()),
            _ => text.parse()?,
        })
    }

    /// The value of a key: what its operands make of the value below them. Appends it to `out`.
    /// `operands` come oldest first; there is at least one.
    pub(crate) fn full<'a>(
        &self,
        base: Option<&'a [u8]>,
        operands: impl Iterator<Item = &'a [u8]>,
        out: &mut Vec<u8>,
    ) {
        let mut values = base.into_iter().chain(operands);
        match self {
            MergeOperator::UInt64Add => {
                let number = |value: &[u8]| value.try_into().map_or(0, u64::from_le_bytes);
                let sum = values.map(number).fold(0, u64::wrapping_add);
                out.extend_from_slice(&sum.to_le_bytes());
            }
            MergeOperator::StringAppend(delimiter) | MergeOperator::StringAppendTest(delimiter) => {
                out.extend_from_slice(values.next().unwrap_or_default());
                for value in values {
                    out.extend_from_slice(delimiter.as_bytes());
                    out.extend_from_slice(value);
                }
            }
            MergeOperator::Put => out.extend_from_slice(values.last().unwrap_or_default()),
            MergeOperator::Max => out.extend_from_slice(values.max().unwrap_or_default()),
            MergeOperator::BytesXor => {
                let start = out.len();
                for value in values {
                    let shared = value.len().min(out.len() - start);
                    for (byte, other) in out[start..].iter_mut().zip(value) {
                        *byte ^= other;
                    }
                    out.extend_from_slice(&value[shared..]);
                }
            }
        }
    }

    fn has_no_delimiter(&self) -> bool {
        matches!(self, MergeOperator::StringAppend(d) | MergeOperator::StringAppendTest(d) if d.is_empty())
    }

    /// Whether operands may be merged into one without the value below them: by
    /// [`MergeOperator::full`] without a base.
    pub(crate) fn is_associative(&self) -> bool {
        !matches!(self, MergeOperator::StringAppendTest(_))
    }
}

/// Bytes that the operands of a key and the value below them may have together when they are
/// merged on a core.
pub(crate) fn merge_bytes_max(core: &Core) -> usize {
    (core.pool().limit() / MERGE_SHARE).min(MERGE_BYTES_MAX)
}

/// The part of a core's memory for a merge.
const MERGE_SHARE: usize = 16;
const MERGE_BYTES_MAX: usize = 64 << 20;

/// Operands that were collected, in memory of their own.
#[derive(Debug, Default)]
pub(crate) struct Operands {
    bytes: Vec<u8>,
    /// Where each ends.
    ends: Vec<usize>,
}

impl Operands {
    pub fn push(&mut self, operand: &[u8]) {
        self.bytes.extend_from_slice(operand);
        self.ends.push(self.bytes.len());
    }

    pub fn clear(&mut self) {
        self.bytes.clear();
        self.ends.clear();
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Bytes of all operands.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The operands in the order in which they were pushed.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &[u8]> {
        let start = |at: usize| at.checked_sub(1).map_or(0, |before| self.ends[before]);
        (0..self.ends.len()).map(move |at| &self.bytes[start(at)..self.ends[at]])
    }
}

/// The program that wrote an OPTIONS file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OptionsWriter {
    Millrace,
    RocksDb,
    /// Older than 7.8.
    OlderRocksDb,
}

/// What is known of the merge operator of a column family.
#[derive(Clone, Debug, Default)]
pub(crate) struct FamilyMerge {
    /// The operator, if it is known and built in.
    pub operator: Option<MergeOperator>,
    /// Its class name, if tables or the user say that the family has it. OPTIONS alone do not: ldb
    /// leaves an operator of its own there.
    pub class: Option<String>,
    /// Why it is not known, or not built in.
    pub unknown: Option<String>,
}

impl FamilyMerge {
    /// Finds the operator of a family. `in_options` is what OPTIONS says, and `wrote` who wrote it.
    /// `tables` are the properties of the family's tables: the class name, and whether the table
    /// has operands.
    pub fn find<'a>(
        in_options: Option<&str>,
        wrote: OptionsWriter,
        tables: impl Iterator<Item = (&'a [u8], bool)> + Clone,
    ) -> FamilyMerge {
        let option = in_options.map(|text| match MergeOperator::from_option(text) {
            Ok(operator) if wrote == OptionsWriter::OlderRocksDb && operator.has_no_delimiter() => {
                Err(text.to_owned())
            }
            Ok(operator) => Ok(operator),
            Err(_) => Err(text.to_owned()),
        });
        let names = |with_operands: bool| {
            let tables = tables.clone().filter(move |table| table.1 || !with_operands);
            let names: BTreeSet<String> = tables
                .filter(|table| !table.0.is_empty() && table.0 != b"nullptr")
                .map(|table| String::from_utf8_lossy(table.0).into_owned())
                .collect();
            (!names.is_empty()).then_some(names)
        };
        let Some(names) = names(true).or_else(|| names(false)) else {
            return match option {
                None => FamilyMerge::default(),
                Some(Ok(operator)) if wrote == OptionsWriter::Millrace => FamilyMerge::of(operator),
                Some(Ok(operator)) => {
                    FamilyMerge { operator: Some(operator), ..FamilyMerge::default() }
                }
                Some(Err(text)) => FamilyMerge { unknown: Some(text), ..FamilyMerge::default() },
            };
        };
        let option = option.and_then(|option| option.ok());
        if let Some(operator) = option
            && names.contains(operator.name())
        {
            return FamilyMerge::of(operator);
        }
        let mut names = names.into_iter();
        let (class, others) = (names.next().unwrap_or_default(), names.next());
        if let Some(other) = others {
            let unknown = Some(format!("{class} in some tables and {other} in others"));
            return FamilyMerge { unknown, ..FamilyMerge::default() };
        }
        match MergeOperator::from_option(&class) {
            Ok(operator) if !operator.has_no_delimiter() => FamilyMerge::of(operator),
            Ok(_) => FamilyMerge {
                unknown: Some(format!("{class}, whose delimiter OPTIONS does not say,")),
                class: Some(class),
                operator: None,
            },
            Err(_) => {
                FamilyMerge { unknown: Some(class.clone()), class: Some(class), operator: None }
            }
        }
    }

    /// A family that has this operator for certain.
    pub fn of(operator: MergeOperator) -> FamilyMerge {
        let class = Some(operator.name().to_owned());
        FamilyMerge { operator: Some(operator), class, unknown: None }
    }

    /// The operator of the family, if it has another one than `wanted`.
    pub fn other_than(&self, wanted: &MergeOperator) -> Option<String> {
        match &self.operator {
            Some(operator) if operator == wanted => None,
            Some(operator) => Some(operator.to_option()),
            None => self.unknown.clone(),
        }
    }

    /// The operator for flushes and merges of tables. They keep operands unless it is certain.
    pub fn certain(&self) -> Option<MergeOperator> {
        self.operator.clone().filter(|_| self.class.is_some())
    }

    /// The operator for reading.
    ///
    /// # Errors
    /// It is not known, or not built in.
    pub fn operator(&self, family: &str) -> Result<&MergeOperator> {
        self.operator.as_ref().ok_or_else(|| {
            let which = match &self.unknown {
                Some(name) => format!("{name} is not built in"),
                None => "has an unknown name".to_owned(),
            };
            let text = format!(
                "column family {family}: cannot serve a merge operand: the merge operator {which}"
            );
            Error::new(Kind::Unsupported, text)
        })
    }

    /// Whether operands may be written.
    ///
    /// # Errors
    /// Why not.
    pub fn check_writing(&self, family: &str) -> Result<()> {
        let why = match (&self.operator, &self.class, &self.unknown) {
            (Some(_), Some(_), _) => return Ok(()),
            (_, _, Some(name)) => format!("its merge operator {name} is not built in"),
            (Some(operator), None, _) => {
                format!("OPTIONS says {}, but no table was written with it", operator.name())
            }
            (None, ..) => "it has no merge operator".to_owned(),
        };
        let text = format!("column family {family}: cannot write a merge operand: {why}");
        Err(Error::new(Kind::Unsupported, text))
    }
}

impl FromStr for MergeOperator {
    type Err = Error;

    /// Parses an id or a class name, or `{id=...;delimiter=...;}`. The default delimiter is a
    /// comma.
    fn from_str(text: &str) -> Result<MergeOperator> {
        let mut id = text.trim();
        let mut delimiter = ",";
        if let Some(list) = id.strip_prefix("{id=").and_then(|rest| rest.strip_suffix('}')) {
            let list = list.strip_suffix(';').unwrap_or(list);
            // The delimiter is the last option and may itself be a semicolon.
            (id, delimiter) = list.split_once(";delimiter=").unwrap_or((list, delimiter));
        }
        Ok(match id {
            "uint64add" | "UInt64AddOperator" => MergeOperator::UInt64Add,
            "stringappend" | "StringAppendOperator" => {
                MergeOperator::StringAppend(delimiter.into())
            }
            "stringappendtest" | "StringAppendTESTOperator" => {
                MergeOperator::StringAppendTest(delimiter.into())
            }
            "put" | "put_v1" | "PutOperator" => MergeOperator::Put,
            "max" | "MaxOperator" => MergeOperator::Max,
            "bytesxor" | "BytesXOR" => MergeOperator::BytesXor,
            _ => {
                let text = format!(
                    "the merge operator {text} is not built in; these are: uint64add, \
                     stringappend, stringappendtest, put, max, bytesxor"
                );
                return Err(Error::new(Kind::Unsupported, text));
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full(operator: &str, base: Option<&[u8]>, operands: &[&[u8]]) -> Vec<u8> {
        let operator: MergeOperator = operator.parse().unwrap();
        let mut out = b"before".to_vec();
        operator.full(base, operands.iter().copied(), &mut out);
        assert!(out.starts_with(b"before"));
        out.split_off(6)
    }

    #[test]
    fn each_operator_merges_as_in_rocksdb() {
        let one = 1u64.to_le_bytes();
        let most = u64::MAX.to_le_bytes();
        for (operator, base, operands, expected) in [
            ("uint64add", None, &[&one[..]][..], &one[..]),
            ("uint64add", Some(&most[..]), &[&one, &one], &one),
            ("uint64add", Some(b"7 bytes"), &[b"9 bytes..", &one, b""], &one),
            ("stringappend", None, &[b"a"], b"a"),
            ("stringappend", None, &[b"", b""], b","),
            ("stringappend", Some(b""), &[b"a", b"", b"b"], b",a,,b"),
            ("{id=StringAppendOperator;delimiter=;;}", Some(b"x"), &[b"a"], b"x;a"),
            ("{id=stringappendtest;delimiter=ab;}", None, &[b"1", b"2"], b"1ab2"),
            ("{id=stringappend;delimiter=;}", None, &[b"1", b"2"], b"12"),
            ("put", Some(b"x"), &[b"a", b""], b""),
            ("max", Some(b"b"), &[b"abc", b"b\0", b"a"], b"b\0"),
            ("max", None, &[b""], b""),
            ("bytesxor", Some(b"\x01\x02"), &[b"\x03\x03\x07", b"\x01"], b"\x03\x01\x07"),
            ("bytesxor", None, &[b"\x03"], b"\x03"),
        ] {
            assert_eq!(full(operator, base, operands), expected, "{operator} {operands:?}");
        }
    }

    #[test]
    fn names_are_those_of_rocksdb() {
        for (text, operator) in [
            ("UInt64AddOperator", MergeOperator::UInt64Add),
            ("StringAppendOperator", MergeOperator::StringAppend("".into())),
            ("{id=StringAppendOperator;delimiter=,;}", MergeOperator::StringAppend(",".into())),
            (
                "{id=StringAppendTESTOperator;delimiter==;}",
                MergeOperator::StringAppendTest("=".into()),
            ),
            ("StringAppendTESTOperator", MergeOperator::StringAppendTest("".into())),
            ("PutOperator", MergeOperator::Put),
            ("MaxOperator", MergeOperator::Max),
            ("BytesXOR", MergeOperator::BytesXor),
        ] {
            assert_eq!(MergeOperator::from_option(text).unwrap(), operator);
            assert_eq!(operator.to_option(), text);
        }
        for text in
            ["", "sortlist", "MergeSortOperator", "{id=TtlMergeOperator;user_operator=max;}"]
        {
            let error = text.parse::<MergeOperator>().unwrap_err();
            assert!(error.to_string().contains(text), "{error}");
        }
    }

    #[test]
    fn tables_tell_the_operator_before_the_options_do() {
        let add = Some(MergeOperator::UInt64Add);
        let bar = Some(MergeOperator::StringAppend("|".into()));
        let none = &[(&b"nullptr"[..], false), (b"", false)][..];
        let ldb = &[(&b"UInt64AddOperator"[..], true), (b"StringAppendOperator", false)][..];
        let either = &[(&b"UInt64AddOperator"[..], false), (b"StringAppendOperator", false)][..];
        let append = &[(&b"StringAppendOperator"[..], true)][..];
        let own = &[(&b"my.Operator"[..], true)][..];
        let with_bar = Some("{id=StringAppendOperator;delimiter=|;}");
        for (option, tables, operator, writes) in [
            (None, none, None, false),
            (None, &ldb[..1], add.clone(), true),
            (with_bar, ldb, add.clone(), true),
            (with_bar, none, bar.clone(), false),
            (with_bar, append, bar.clone(), true),
            (with_bar, either, bar, true),
            (Some("UInt64AddOperator"), none, add.clone(), false),
            (Some("UInt64AddOperator"), either, add, true),
            (Some("MaxOperator"), either, None, false),
            (None, append, None, false),
            (with_bar, own, None, false),
            (Some("SortList"), none, None, false),
        ] {
            let found = FamilyMerge::find(option, OptionsWriter::RocksDb, tables.iter().copied());
            assert_eq!(found.operator, operator, "{option:?} {tables:?}");
            assert_eq!(found.check_writing("f").is_ok(), writes, "{option:?} {tables:?}");
            assert_eq!(found.operator("f").is_ok(), operator.is_some());
        }
        let bare =
            |wrote| FamilyMerge::find(Some("StringAppendOperator"), wrote, none.iter().copied());
        let append = Some(MergeOperator::StringAppend("".into()));
        assert_eq!(bare(OptionsWriter::RocksDb).operator, append);
        assert_eq!(bare(OptionsWriter::Millrace).certain(), append);
        // Older versions did not write the delimiter.
        assert_eq!(bare(OptionsWriter::OlderRocksDb).operator, None);
    }
}

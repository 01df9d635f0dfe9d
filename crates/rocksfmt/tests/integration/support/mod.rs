//! Reads whole SST files through the public interface, and runs the tools that write them.

#![allow(dead_code, reason = "each test file uses a part")]
#![expect(clippy::disallowed_methods, reason = "tests read files and start tools themselves")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use rocksfmt::*;

pub const BLOCK_MAX: usize = 64 << 20;

/// An empty directory for this test.
pub fn fresh_dir(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

/// Runs a tool and returns what it prints; a missing or failing tool fails the test by name.
pub fn run(tool: &str, args: &[&str]) -> String {
    let out = match Command::new(tool).args(args).output() {
        Ok(out) => out,
        Err(e) => panic!("this test needs the tool `{tool}` on the PATH: {e}"),
    };
    assert!(
        out.status.success(),
        "`{tool} {}` failed: {}",
        args.join(" "),
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8(out.stdout).unwrap()
}

/// Creates the rocksdict databases in `dir`.
pub fn generate(dir: &Path) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration/support/generate.py");
    run("python3", &["-c", "import rocksdict"]);
    run("python3", &[script, dir.to_str().unwrap()]);
}

/// The SST files of a database directory, oldest first.
pub fn sst_files(db: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(db)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "sst"))
        .collect();
    files.sort();
    files
}

pub fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().map(|c| (c as char).to_digit(16).unwrap() as u8).collect();
    digits.chunks(2).map(|d| d[0] << 4 | d[1]).collect()
}

/// The contents of one SST file.
#[derive(Debug)]
pub struct Table {
    pub bytes: Vec<u8>,
    pub footer: Footer,
    pub meta: Metaindex,
    pub properties: Properties,
    pub comparator: Comparator,
    pub index: (Vec<u8>, IndexLayout),
    pub filter: Option<(Vec<u8>, FilterForm)>,
    pub dictionary: Option<Dictionary>,
    pub tombstones: RangeTombstones,
    /// Blocks seen by compression type.
    pub seen: std::cell::RefCell<BTreeMap<u8, usize>>,
}

#[derive(Clone, Copy, Debug)]
pub enum FilterForm {
    Full(FilterLayout),
    Partitioned(IndexLayout),
}

pub type Entries = Vec<(Vec<u8>, Vec<u8>)>;

impl Table {
    pub fn open(bytes: Vec<u8>) -> Result<Table> {
        let footer =
            Footer::parse(&bytes[bytes.len().saturating_sub(FOOTER_BYTES)..], bytes.len() as u64)?;
        let seen = std::cell::RefCell::new(BTreeMap::new());
        let block = |handle: BlockHandle| read_block(&bytes, &footer, handle, None, &seen);
        let meta = Metaindex::parse(&block(footer.metaindex)?)?;
        let missing = |name: &'static str| Error::corruption(format!("no {name}"));
        let properties =
            Properties::parse(&block(meta.properties.ok_or_else(|| missing("properties"))?)?)?;
        let comparator = match properties.comparator.as_slice() {
            b"" => Comparator::Bytewise,
            name => Comparator::from_name(name)?,
        };
        let index = block(footer.index.or(meta.index).ok_or_else(|| missing("index"))?)?;
        let layout = IndexLayout::parse(&index, properties.index_format)?;
        let filter = match meta.filter {
            None => None,
            Some(FilterHandle::Full(handle)) => {
                let data = block(handle)?;
                let layout = FilterLayout::parse(&data);
                Some((data, FilterForm::Full(layout)))
            }
            Some(FilterHandle::Partitioned(handle)) => {
                let data = block(handle)?;
                let format = IndexFormat { first_keys: false, ..properties.index_format };
                let layout = IndexLayout::parse(&data, format)?;
                Some((data, FilterForm::Partitioned(layout)))
            }
        };
        let dictionary = match meta.compression_dict {
            Some(handle) => Some(Dictionary::new(&block(handle)?)),
            None => None,
        };
        let tombstones = match meta.range_deletions {
            Some(handle) => RangeTombstones::parse(&block(handle)?, comparator, None)?,
            None => RangeTombstones::default(),
        };
        let index = (index, layout);
        Ok(Table {
            footer,
            meta,
            properties,
            comparator,
            index,
            filter,
            dictionary,
            tombstones,
            seen,
            bytes,
        })
    }

    fn data_block(&self, handle: BlockHandle) -> Result<Vec<u8>> {
        read_block(&self.bytes, &self.footer, handle, self.dictionary.as_ref(), &self.seen)
    }

    fn meta_block(&self, handle: BlockHandle) -> Result<Vec<u8>> {
        read_block(&self.bytes, &self.footer, handle, None, &self.seen)
    }

    /// The bottom index blocks in order.
    fn index_blocks(&self) -> Result<Vec<(Vec<u8>, IndexLayout)>> {
        if self.properties.index_type != IndexType::TwoLevel {
            return Ok(vec![self.index.clone()]);
        }
        let (data, layout) = &self.index;
        let mut blocks = Vec::new();
        let mut cursor = IndexCursor::new();
        let mut more = cursor.seek_to_first(data, layout)?;
        while more {
            let block = self.meta_block(cursor.handle())?;
            let layout = IndexLayout::parse(&block, self.properties.index_format)?;
            blocks.push((block, layout));
            more = cursor.next(data, layout_of(&self.index))?;
        }
        Ok(blocks)
    }

    /// Every entry in order; checks the invariants between blocks and index.
    pub fn walk(&self) -> Result<Entries> {
        let mut entries = Entries::new();
        for (index, layout) in self.index_blocks()? {
            let mut ic = IndexCursor::new();
            let mut bc = BlockCursor::new();
            let mut more = ic.seek_to_first(&index, &layout)?;
            while more {
                let block = self.data_block(ic.handle())?;
                let parts = BlockLayout::parse(&block)?;
                let first = entries.len();
                let mut on = bc.seek_to_first(&block, &parts)?;
                while on {
                    InternalKey::parse(bc.key())?;
                    entries.push((bc.key().to_vec(), bc.value(&block).to_vec()));
                    on = bc.next(&block, &parts)?;
                }
                let first_key = index.get(ic.first_key_range()).unwrap_or_default();
                if layout.format().first_keys && entries.get(first).is_none_or(|e| e.0 != first_key)
                {
                    return Err(Error::corruption("first key in the index is not the block's"));
                }
                more = ic.next(&index, &layout)?;
            }
        }
        Ok(entries)
    }

    /// Every entry from the last to the first.
    pub fn walk_back(&self) -> Result<Entries> {
        let mut entries = Entries::new();
        for (index, layout) in self.index_blocks()?.iter().rev() {
            let mut ic = IndexCursor::new();
            let mut bc = BlockCursor::new();
            let mut more = ic.seek_to_last(index, layout)?;
            while more {
                let block = self.data_block(ic.handle())?;
                let parts = BlockLayout::parse(&block)?;
                let mut on = bc.seek_to_last(&block, &parts)?;
                while on {
                    entries.push((bc.key().to_vec(), bc.value(&block).to_vec()));
                    on = bc.prev(&block, &parts)?;
                }
                more = ic.prev(index, layout)?;
            }
        }
        Ok(entries)
    }

    /// The handles of the data blocks, index partitions and filter partitions.
    pub fn all_handles(&self) -> Result<Vec<BlockHandle>> {
        let mut handles = Vec::new();
        let mut tops = self.index_blocks()?;
        if self.properties.index_type == IndexType::TwoLevel {
            tops.push(self.index.clone());
        }
        if let Some((data, FilterForm::Partitioned(layout))) = &self.filter {
            tops.push((data.clone(), *layout));
        }
        for (data, layout) in tops {
            let mut cursor = IndexCursor::new();
            let mut more = cursor.seek_to_first(&data, &layout)?;
            while more {
                handles.push(cursor.handle());
                more = cursor.next(&data, &layout)?;
            }
        }
        Ok(handles)
    }

    /// Whether the filter lets a user key pass.
    pub fn may_contain(&self, user_key: &[u8]) -> Result<bool> {
        let Some((data, form)) =
            self.filter.as_ref().filter(|_| self.properties.whole_key_filtering)
        else {
            return Ok(true);
        };
        let key = FilterKey::new(user_key);
        match form {
            FilterForm::Full(layout) => Ok(layout.may_contain(data, &key)),
            FilterForm::Partitioned(top) => {
                let mut target = Vec::new();
                set_seek_key(&mut target, user_key, SEQUENCE_MAX);
                match index_lookup(data, top, self.comparator, &target, &mut Vec::new())? {
                    None => Ok(false),
                    Some(handle) => {
                        let block = self.meta_block(handle)?;
                        Ok(FilterLayout::parse(&block).may_contain(&block, &key))
                    }
                }
            }
        }
    }

    /// The newest entry of a user key visible at `snapshot`: sequence, type and value.
    pub fn get(&self, user_key: &[u8], snapshot: u64) -> Result<Option<(u64, u8, Vec<u8>)>> {
        let mut target = Vec::new();
        let mut scratch = Vec::new();
        set_seek_key(&mut target, user_key, snapshot);
        let Some(mut handle) =
            index_lookup(&self.index.0, &self.index.1, self.comparator, &target, &mut scratch)?
        else {
            return Ok(None);
        };
        if self.properties.index_type == IndexType::TwoLevel {
            let block = self.meta_block(handle)?;
            let layout = IndexLayout::parse(&block, self.properties.index_format)?;
            match index_lookup(&block, &layout, self.comparator, &target, &mut scratch)? {
                None => return Ok(None),
                Some(lower) => handle = lower,
            }
        }
        let block = self.data_block(handle)?;
        let layout = BlockLayout::parse(&block)?;
        match point_lookup(&block, &layout, self.comparator, &target, &mut scratch)? {
            Lookup::Found { packed, start, end } => {
                let (sequence, kind) = unpack(packed);
                Ok(Some((sequence, kind, block[start as usize..end as usize].to_vec())))
            }
            // In none of these files are the versions of a key in two blocks.
            Lookup::Absent | Lookup::PastEnd => Ok(None),
        }
    }

    /// Reads everything in every way; for damaged files, where any answer except a panic is
    /// acceptable.
    pub fn exercise(bytes: Vec<u8>) -> Result<usize> {
        let table = Table::open(bytes)?;
        let entries = table.walk()?;
        let back = table.walk_back()?;
        for (key, _) in entries.iter().step_by(37) {
            let user = InternalKey::parse(key)?.user_key;
            table.may_contain(user)?;
            table.get(user, SEQUENCE_MAX)?;
        }
        Ok(entries.len().min(back.len()))
    }
}

fn layout_of(index: &(Vec<u8>, IndexLayout)) -> &IndexLayout {
    &index.1
}

fn read_block(
    bytes: &[u8],
    footer: &Footer,
    handle: BlockHandle,
    dictionary: Option<&Dictionary>,
    seen: &std::cell::RefCell<BTreeMap<u8, usize>>,
) -> Result<Vec<u8>> {
    let Some(len) = handle.stored_len(footer.offset) else {
        return Err(Error::corruption(format!("{handle:?} reaches into the footer")));
    };
    let stored = &bytes[handle.offset as usize..][..len];
    let byte = footer.check.verify(stored, handle.offset)?;
    *seen.borrow_mut().entry(byte).or_default() += 1;
    let compression = Compression::from_byte(byte)?;
    let payload = &stored[..len - BLOCK_TRAILER_BYTES];
    let mut out = vec![0; compression.decompressed_len(payload, BLOCK_MAX)?];
    Decompressor::new().decompress(compression, payload, dictionary, &mut out)?;
    Ok(out)
}

/// Reads all tables of a database directory and returns what a scan returns, by the rules of the
/// format. Reads every table forwards, backwards and by point lookups, and queries its filter for
/// its keys.
pub fn scan(db: &Path, global_sequence: u64) -> (BTreeMap<Vec<u8>, Vec<u8>>, Vec<Table>) {
    let mut newest: BTreeMap<Vec<u8>, (u64, u8, Vec<u8>)> = BTreeMap::new();
    let mut tables = Vec::new();
    for path in sst_files(db) {
        let mut table =
            Table::open(std::fs::read(&path).unwrap()).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        let global = table.properties.global_sequence(global_sequence).unwrap();
        if let (Some(_), Some(handle)) = (global, table.meta.range_deletions) {
            let block = table.meta_block(handle).unwrap();
            table.tombstones = RangeTombstones::parse(&block, table.comparator, global).unwrap();
        }
        let entries = table.walk().unwrap_or_else(|e| panic!("{path:?}: {e}"));
        check_table(&table, &entries);
        for (key, value) in entries {
            let key = InternalKey::parse(&key).unwrap();
            let sequence = global.unwrap_or(key.sequence());
            let slot = newest.entry(key.user_key.to_vec()).or_default();
            if slot.0 <= sequence {
                *slot = (sequence, key.packed as u8, value);
            }
        }
        tables.push(table);
    }
    let mut live = BTreeMap::new();
    for (key, (sequence, kind, value)) in newest {
        let deleted =
            tables.iter().map(|t| t.tombstones.max_sequence(&key, SEQUENCE_MAX)).max().unwrap_or(0);
        if sequence < deleted || ValueType::from_byte(kind).unwrap().is_tombstone() {
            continue;
        }
        live.insert(key, value);
    }
    (live, tables)
}

/// Reads a table in every way, and compares with its entries.
pub fn check_table(table: &Table, entries: &Entries) {
    let p = &table.properties;
    assert_eq!(entries.len() as u64 + p.num_range_deletions, p.num_entries);
    assert_eq!(table.tombstones.len() as u64, p.num_range_deletions);
    let mut back = table.walk_back().unwrap();
    back.reverse();
    assert!(&back == entries, "backwards and forwards differ");
    let mut previous: Option<&[u8]> = None;
    for (i, (key, value)) in entries.iter().enumerate() {
        if let Some(p) = previous {
            assert!(table.comparator.cmp_internal(p, key).is_lt(), "keys out of order");
        }
        previous = Some(key);
        let key = InternalKey::parse(key).unwrap();
        assert!(table.may_contain(key.user_key).unwrap(), "filter misses {:?}", key.user_key);
        if i % 3 == 0 || entries.len() < 500 {
            let found = table.get(key.user_key, key.sequence()).unwrap();
            assert_eq!(
                found,
                Some((key.sequence(), key.packed as u8, value.clone())),
                "{:?}",
                key.user_key
            );
            let absent = [key.user_key, b"\0"].concat();
            if table.comparator == Comparator::Bytewise {
                assert_eq!(table.get(&absent, SEQUENCE_MAX).unwrap(), None);
            }
        }
    }
}

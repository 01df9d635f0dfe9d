//! Proofs of the list: loom runs every interleaving, and every stale value that the memory model
//! permits, of the small scenarios below.
//!
//! Run by `scripts/loom.sh`; empty in a normal build. The modules are included by path, as in the
//! reactor's `tests/loom.rs`. [`MUTANTS`] lists for each mutation site the scenario that must find
//! it (see `loomable`). The list has two levels here, so heights are given: 1, or 2 for a node that
//! is also in the upper level.
//!
//! Loom checks the header of each node (a loom cell, so reading a node that the reader does not
//! know to be written is an error), links (loom atomics), and chunks (loom allocations, so a leak
//! or a double free is an error).
#![cfg(loom)]
#![allow(dead_code, reason = "the modules are included whole")]

use std::sync::atomic::{AtomicUsize as Plain, Ordering::Relaxed};

use loom::thread;
use loomable::proof::{find_every_mutant, list_is_complete, prove};
use rocksfmt::{Comparator, SEEK_TYPE, SEQUENCE_MAX, pack};

#[path = "../src/arena.rs"]
mod arena;
#[path = "../src/cursor.rs"]
mod cursor;
#[path = "../src/list.rs"]
mod list;
#[path = "../src/memtable.rs"]
mod memtable;
#[path = "../src/node.rs"]
mod node;
#[path = "../src/writer.rs"]
mod writer;

use arena::Reserve;
use cursor::Cursor;
use memtable::Memtable;
use writer::Writer;

/// Each mutation site, and the scenario that finds it.
const MUTANTS: &[(&str, &str)] = &[
    ("memtable.publish_relaxed", "a_reader_sees_nothing_or_a_whole_node"),
    ("memtable.load_relaxed", "a_reader_sees_nothing_or_a_whole_node"),
    ("memtable.publish_upper_relaxed", "a_node_met_on_the_upper_level_is_whole"),
    ("memtable.upper_first", "linked_nodes_are_found_during_an_insertion"),
    ("memtable.link_before_next", "linked_nodes_are_found_during_an_insertion"),
];

/// A memtable with these keys, each given with its height.
fn memtable(keys: &[(&str, usize)]) -> (Writer, Memtable) {
    let (mut writer, memtable) = Memtable::new(Comparator::Bytewise, 1 << 16, 0);
    for &(key, height) in keys {
        insert(&mut writer, key, height);
    }
    (writer, memtable)
}

/// Inserts an entry whose value is its key, twice: enough to detect an incomplete node.
fn insert(writer: &mut Writer, key: &str, height: usize) {
    writer
        .insert_at_height(
            height,
            &mut Reserve::default(),
            key.as_bytes(),
            pack(1, 1),
            key.repeat(2).as_bytes(),
        )
        .unwrap();
}

fn has(memtable: &Memtable, key: &str) -> bool {
    let found = memtable.get(key.as_bytes(), SEQUENCE_MAX);
    if let Some(entry) = found {
        assert_eq!((entry.user_key(), entry.packed()), (key.as_bytes(), pack(1, 1)));
        assert_eq!(entry.value(), key.repeat(2).as_bytes());
    }
    found.is_some()
}

/// The cursor's key as text; checks that the node is complete.
fn current_key(cursor: &Cursor, memtable: &Memtable) -> String {
    let key = std::str::from_utf8(cursor.user_key(memtable)).unwrap();
    assert_eq!(cursor.value(memtable), key.repeat(2).as_bytes());
    key.to_owned()
}

fn forward(memtable: &Memtable) -> String {
    let (mut cursor, mut keys) = (Cursor::new(), String::new());
    let mut more = cursor.first(memtable);
    while more {
        keys += &current_key(&cursor, memtable);
        more = cursor.next(memtable);
    }
    keys
}

fn backward(memtable: &Memtable) -> String {
    let (mut cursor, mut keys) = (Cursor::new(), String::new());
    let mut more = cursor.last(memtable);
    while more {
        keys.insert_str(0, &current_key(&cursor, memtable));
        more = cursor.prev(memtable);
    }
    keys
}

/// The first node of the list, only at level 0: one link leads to it.
#[test]
fn a_reader_sees_nothing_or_a_whole_node() {
    prove("a_reader_sees_nothing_or_a_whole_node", None, || {
        let (mut writer, table) = memtable(&[]);
        let reader = thread::spawn(move || {
            let before = has(&table, "b");
            assert!(has(&table, "b") || !before, "what was seen stays");
        });
        insert(&mut writer, "b", 1);
        assert!(has(writer.memtable(), "b"));
        reader.join().unwrap();
    });
}

/// On the upper level a reader meets a node before it has read its link on level 0.
#[test]
fn a_node_met_on_the_upper_level_is_whole() {
    prove("a_node_met_on_the_upper_level_is_whole", None, || {
        let (mut writer, table) = memtable(&[]);
        let reader = thread::spawn(move || {
            let mut cursor = Cursor::new();
            if cursor.seek_for_prev(&table, b"c", 0) {
                assert_eq!(current_key(&cursor, &table), "b");
            }
        });
        insert(&mut writer, "b", 2);
        reader.join().unwrap();
    });
}

/// A search for an old node passes the place where another is being linked in, on both levels.
#[test]
fn linked_nodes_are_found_during_an_insertion() {
    prove("linked_nodes_are_found_during_an_insertion", None, || {
        let (mut writer, table) = memtable(&[("a", 1), ("c", 1)]);
        let reader = thread::spawn(move || {
            assert!(has(&table, "c"));
            let seen = has(&table, "b");
            assert!(has(&table, "a") && has(&table, "c"));
            assert!(has(&table, "b") || !seen, "what was seen stays");
        });
        insert(&mut writer, "b", 2);
        reader.join().unwrap();
    });
}

/// Two adjacent nodes: a reader that sees the second sees the first, at either level.
#[test]
fn insertions_become_visible_in_their_order() {
    prove("insertions_become_visible_in_their_order", None, || {
        let (mut writer, table) = memtable(&[("d", 2)]);
        let reader = thread::spawn(move || {
            let second = has(&table, "b");
            assert!(has(&table, "c") || !second);
        });
        insert(&mut writer, "c", 1);
        insert(&mut writer, "b", 2);
        reader.join().unwrap();
    });
}

#[test]
fn a_cursor_goes_forward_during_insertions() {
    prove("a_cursor_goes_forward_during_insertions", None, || {
        let (mut writer, table) = memtable(&[("b", 1), ("d", 2)]);
        let reader = thread::spawn(move || {
            let keys = forward(&table);
            let possible = ["bd", "bcd", "bde", "bcde"];
            assert!(possible.contains(&&*keys), "{keys}");
        });
        insert(&mut writer, "c", 2);
        insert(&mut writer, "e", 1);
        reader.join().unwrap();
        assert_eq!(forward(writer.memtable()), "bcde");
    });
}

/// Each step back is a search, in a list that changes in between.
#[test]
fn a_cursor_goes_backward_during_insertions() {
    prove("a_cursor_goes_backward_during_insertions", None, || {
        let (mut writer, table) = memtable(&[("b", 1), ("d", 2)]);
        let reader = thread::spawn(move || {
            let keys = backward(&table);
            // "e" is in the list before "c" is.
            let possible = ["bd", "bcd", "bde", "bcde"];
            assert!(possible.contains(&&*keys), "{keys}");
        });
        insert(&mut writer, "e", 2);
        insert(&mut writer, "c", 2);
        reader.join().unwrap();
        assert_eq!(backward(writer.memtable()), "bcde");
    });
}

/// A seek to just before the place where a node is being linked in, then both ways from there.
#[test]
fn a_cursor_turns_around_at_an_insertion() {
    prove("a_cursor_turns_around_at_an_insertion", None, || {
        let (mut writer, table) = memtable(&[("a", 2), ("c", 1)]);
        let reader = thread::spawn(move || {
            let mut cursor = Cursor::new();
            assert!(cursor.seek(&table, b"b", pack(SEQUENCE_MAX, SEEK_TYPE)));
            let there = current_key(&cursor, &table);
            assert!(there == "b" || there == "c");
            assert!(cursor.prev(&table));
            let before = current_key(&cursor, &table);
            assert!(before == "a" || (before == "b" && there == "c"));
            assert!(cursor.next(&table));
            let again = current_key(&cursor, &table);
            assert!(again == there || (again == "b" && before == "a") || before == "b");
        });
        insert(&mut writer, "b", 2);
        reader.join().unwrap();
    });
}

/// Writer and reader drop their handles at the same time, one of them frees the memory, and a value
/// is read until then.
#[test]
fn the_last_handle_frees_the_memory() {
    prove("the_last_handle_frees_the_memory", None, || {
        let (mut writer, table) = memtable(&[("a", 1)]);
        let reader = thread::spawn(move || {
            let value = table.get(b"a", SEQUENCE_MAX).unwrap().value_ref();
            let seen = has(&table, "b");
            assert_eq!(table.value(value), b"aa");
            drop(table);
            seen
        });
        insert(&mut writer, "b", 1);
        drop(writer);
        reader.join().unwrap();
    });
}

// ---- mutants ----

#[test]
fn every_mutant_is_found() {
    find_every_mutant(MUTANTS);
}

#[test]
fn the_list_of_mutants_is_complete() {
    let sources = [include_str!("../src/node.rs"), include_str!("../src/writer.rs")];
    list_is_complete(MUTANTS, &sources);
}

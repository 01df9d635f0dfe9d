#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| node::fuzz::disk_spec(data));

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| bdev::fuzz_uri(data));

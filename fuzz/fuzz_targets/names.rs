#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| rocksfmt::fuzz::names(data));

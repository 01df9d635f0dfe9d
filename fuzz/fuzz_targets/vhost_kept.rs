#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vhost::fuzz_message::keeper(data));

#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    railfs_fuzz::rail_request(data);
});

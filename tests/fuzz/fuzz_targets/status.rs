#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    railfs_fuzz::status(data);
});

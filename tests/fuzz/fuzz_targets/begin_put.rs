#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    railfs_fuzz::begin_put(data);
});

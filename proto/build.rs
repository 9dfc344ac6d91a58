//! Compiles the protobuf files without a system `protoc` (protox is a compiler written in Rust).

use prost::Message;

fn main() {
    let files = ["proto/common.proto", "proto/control.proto", "proto/rail.proto", "proto/log.proto"];
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    let set = protox::compile(files, ["proto"]).expect("the protobuf files of this crate compile");
    // What servers answer to clients that ask which services there are.
    let out = std::env::var_os("OUT_DIR").map(std::path::PathBuf::from).expect("cargo sets OUT_DIR");
    std::fs::write(out.join("railfs.v1.bin"), set.encode_to_vec()).expect("OUT_DIR can be written");
    let grpc = std::env::var_os("CARGO_FEATURE_GRPC").is_some();
    tonic_prost_build::configure()
        .build_client(grpc)
        .build_server(grpc)
        .bytes(".railfs")
        .compile_fds(set)
        .expect("code is generated from the protobuf files of this crate");
}

//! The ceiling of the network's side: one loopback TCP stream out of 64 MiB of memory into 64 MiB of memory.
//!
//! The memory is larger than the caches of a CPU: small buffers that stay there flatter a loopback stream.

use crate::Failed;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

const MEMORY: usize = 64 << 20;
const PIECE: usize = 1 << 20;

/// Bytes a second, measured for `time`.
///
/// # Errors
/// A socket or thread.
pub fn stream(time: Duration) -> Result<f64, Failed> {
    let fail = |error: std::io::Error| format!("loopback TCP: {error}");
    let listener = TcpListener::bind("127.0.0.1:0").map_err(fail)?;
    let address = listener.local_addr().map_err(fail)?;
    let mut source: Vec<u8> = Vec::new();
    source.resize_with(MEMORY, || 0x5a);
    let sender = std::thread::spawn(move || -> std::io::Result<()> {
        let mut out = TcpStream::connect(address)?;
        let until = Instant::now() + time;
        while Instant::now() < until {
            for piece in source.chunks(PIECE) {
                out.write_all(piece)?;
            }
        }
        Ok(())
    });
    let (mut from, _) = listener.accept().map_err(fail)?;
    let mut target = vec![0xa5u8; MEMORY];
    let (mut at, mut bytes) = (0, 0u64);
    let began = Instant::now();
    let mut ended = began;
    loop {
        let got = from.read(&mut target[at..(at + PIECE).min(MEMORY)]).map_err(fail)?;
        if got == 0 {
            break;
        }
        bytes += got as u64;
        at = (at + got) % MEMORY;
        ended = Instant::now();
    }
    sender.join().map_err(|_| "loopback TCP: the sender died".to_owned())?.map_err(fail)?;
    Ok(bytes as f64 / (ended - began).as_secs_f64())
}

//! `make bench-rdma`, inside a guest: rails of Soft-RoCE devices, with `ib_write_bw` beside them in the same run.
//!
//! Guarantees: all rows take turns in every round; a read that did not come over the rails is an error; what is printed are
//! medians of the rounds. Two servers have the same objects, one with one rail, the other with two.

use crate::Failed;
use crate::stand::{cpu_seconds, run};
use railfs_engine::client::{Client, Config, Found, Object, Opening, Rdma};
use railfs_proto::name::ObjectName;
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Pieces of 1 MiB that a reader of the engine has under way.
const AHEAD: usize = 8;
/// Sizes of the objects, MiB: they are named by them.
const SIZES: [u64; 3] = [64, 128, 256];

/// One of the two servers.
struct Side {
    rails: usize,
    mount: PathBuf,
    mount_pid: u32,
    server_pid: u32,
    /// By both ways of opening memory.
    clients: Vec<(&'static str, Arc<Client>)>,
}

/// MiB a second, and processor seconds a GB of client and server.
#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    rate: f64,
    client: f64,
    server: f64,
}

/// `arguments`: for each of the two sides control address, mount point, the mount's process, the server's; then the rounds.
///
/// # Errors
/// Whatever did not work.
pub fn bench(arguments: &[&str]) -> Result<bool, Failed> {
    let [one, two, rounds] = match arguments {
        [a, b, c, d, e, f, g, h, rounds] => [&[*a, *b, *c, *d][..], &[*e, *f, *g, *h], &[*rounds]],
        _ => return Err("two sides of four words each, and the rounds".into()),
    };
    let rounds: u32 = rounds[0].parse::<u32>().map_err(|error| format!("{}: {error}", rounds[0]))?;
    let sides = [side(1, one)?, side(2, two)?];
    let mut rows: BTreeMap<String, Vec<Figures>> = BTreeMap::new();
    for round in 1..=rounds {
        eprintln!("bench: round {round} of {rounds}");
        let mut add = |row: String, figures: Figures| {
            eprintln!("bench: {row}: {:.1} MiB/s", figures.rate);
            rows.entry(row).or_default().push(figures);
        };
        add("ib_write_bw, 1 rail".into(), Figures { rate: ib_write_bw()?, ..Figures::default() });
        for side in &sides {
            for (opening, client) in &side.clients {
                let figures = measure(std::process::id(), side.server_pid, 64, || engine(client, "64"))?;
                add(format!("engine, {} rail, 064 MiB, {opening}", side.rails), figures);
            }
        }
        for size in SIZES {
            for side in &sides {
                let file = side.mount.join(size.to_string());
                let figures = measure(side.mount_pid, side.server_pid, size, || read(&file, size))?;
                add(format!("mount, {} rail, {size:03} MiB", side.rails), figures);
            }
        }
        for side in &sides {
            let figures = measure(side.mount_pid, side.server_pid, 128, || four(&side.mount.join("128")))?;
            add(format!("mount, {} rail, four readers", side.rails), figures);
        }
    }
    for side in &sides {
        side.clients.iter().for_each(|(_, client)| client.close());
    }
    print(&rows);
    Ok(true)
}

fn side(rails: usize, words: &[&str]) -> Result<Side, Failed> {
    let number = |word: &str| word.parse().map_err(|error| format!("process {word}: {error}"));
    let clients = [("windows", Opening::Windows), ("whole arena", Opening::OpenArena)].map(|(name, opening)| {
        let config = Config {
            addresses: vec![words[0].to_owned()],
            arena: 32 << 20,
            connect_deadline: Duration::from_secs(60),
            read_deadline: Duration::from_secs(120),
            rdma: Rdma::Required,
            opening,
            ..Config::default()
        };
        let client = Client::connect(config).map_err(|error| format!("{}: {error}", words[0]))?;
        // All its rails, not only the first.
        let end = Instant::now() + Duration::from_secs(60);
        while client.status().rails.iter().filter(|rail| rail.counters.connects > 0).count() < rails {
            if Instant::now() > end {
                return Err(format!("{}: {rails} rails are not up", words[0]));
            }
            std::thread::yield_now();
        }
        Ok((name, client))
    });
    let [windows, open] = clients;
    let (mount_pid, server_pid) = (number(words[2])?, number(words[3])?);
    Ok(Side { rails, mount: words[1].into(), mount_pid, server_pid, clients: vec![windows?, open?] })
}

fn measure(client: u32, server: u32, mib: u64, work: impl FnOnce() -> Result<(), Failed>) -> Result<Figures, Failed> {
    let cpu = || (cpu_seconds(client), cpu_seconds(server));
    let (before, began) = (cpu(), Instant::now());
    work()?;
    let (seconds, after) = (began.elapsed().as_secs_f64(), cpu());
    let gigabytes = (mib * MIB) as f64 / 1e9;
    Ok(Figures {
        rate: mib as f64 / seconds,
        client: (after.0 - before.0) / gigabytes,
        server: (after.1 - before.1) / gigabytes,
    })
}

/// Reads an object once through by the engine's interface. Its arena is smaller: nothing of it is there from before.
fn engine(client: &Arc<Client>, key: &str) -> Result<(), Failed> {
    let name = ObjectName::new("bench", key.as_bytes().to_vec()).map_err(|error| error.to_string())?;
    let Found::Object(object) =
        Client::wait(|done| client.lookup(&name, done)).map_err(|error| format!("{key}: {error}"))?
    else {
        return Err(format!("{key} is not there"));
    };
    let size = object.descriptor.striping.size();
    let mut under_way: VecDeque<Receiver<Result<usize, Failed>>> = VecDeque::new();
    let (mut offset, mut came) = (0, 0);
    while came < size {
        while under_way.len() < AHEAD && offset < size {
            under_way.push_back(piece(client, &object, offset));
            offset += MIB;
        }
        let Some(first) = under_way.pop_front() else { return Err(format!("{key}: {came} of {size} bytes")) };
        came += first.recv().map_err(|error| error.to_string())?? as u64;
    }
    client.release(1);
    Ok(())
}

fn piece(client: &Arc<Client>, object: &Arc<Object>, offset: u64) -> Receiver<Result<usize, Failed>> {
    let (send, receive) = sync_channel(1);
    // At most 1 MiB.
    let length = object.descriptor.striping.size().saturating_sub(offset).min(MIB) as u32;
    let reply = move |result: railfs_engine::error::Result<&[u8]>| {
        let _ = send.send(result.map(<[u8]>::len).map_err(|error| error.to_string()));
    };
    client.read(object, 1, offset, length, Box::new(reply));
    receive
}

fn open(file: &Path) -> Result<File, Failed> {
    let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
    let opened = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(file);
    opened.map_err(|error| format!("{}: {error}", file.display()))
}

/// Reads so many MiB of a mounted file, 1 MiB at a time, one after another, around the kernel's cache.
fn part(file: &Path, from: u64, mib: u64) -> Result<(), Failed> {
    let open = open(file)?;
    // O_DIRECT wants memory on page boundaries.
    let mut memory = vec![0u8; MIB as usize + 4096];
    let start = memory.as_ptr().align_offset(4096);
    let buffer = &mut memory[start..start + MIB as usize];
    for number in from..from + mib {
        open.read_exact_at(buffer, number * MIB).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(())
}

fn read(file: &Path, mib: u64) -> Result<(), Failed> {
    part(file, 0, mib)
}

/// A quarter of the file each.
fn four(file: &Path) -> Result<(), Failed> {
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4).map(|quarter| scope.spawn(move || part(file, quarter * 32, 32))).collect();
        readers.into_iter().try_for_each(|reader| reader.join().map_err(|_| "a reader panicked".to_owned())?)
    })
}

/// MiB a second of 1 MiB WRITEs over the first rail's devices.
fn ib_write_bw() -> Result<f64, Failed> {
    let program = |device: &str| {
        let mut command = Command::new("ib_write_bw");
        command.args(["-d", device, "-x", "1", "-s", "1048576", "-n", "64", "-F"]);
        command
    };
    let mut server = program("rxe0s");
    server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut server = server.spawn().map_err(|error| format!("ib_write_bw: {error}"))?;
    let end = Instant::now() + Duration::from_secs(60);
    let text = loop {
        // It listens after a moment.
        match run(program("rxe0c").arg("10.9.0.1")) {
            Ok(text) => break Ok(text),
            Err(error) if Instant::now() > end => break Err(error),
            Err(_) => std::thread::yield_now(),
        }
    };
    let _ = server.kill();
    let _ = server.wait();
    let text = text?;
    let row = text.lines().find(|line| line.trim_start().starts_with("1048576"));
    let average = row.and_then(|row| row.split_whitespace().nth(3)).and_then(|word| word.parse().ok());
    average.ok_or_else(|| format!("ib_write_bw said something else: {text}"))
}

fn median(samples: &[Figures], of: impl Fn(&Figures) -> f64) -> f64 {
    let mut values: Vec<f64> = samples.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn print(rows: &BTreeMap<String, Vec<Figures>>) {
    let rate = |row: &str| rows.get(row).map_or(0.0, |samples| median(samples, |figures| figures.rate));
    let ceiling = rate("ib_write_bw, 1 rail");
    println!("| | MiB/s | to ib_write_bw | client CPU s/GB | server CPU s/GB |");
    println!("| --- | --- | --- | --- | --- |");
    for (row, samples) in rows {
        let rate = median(samples, |figures| figures.rate);
        let (client, server) = (median(samples, |f| f.client), median(samples, |f| f.server));
        println!("| {row} | {rate:.1} | {:.2} | {client:.1} | {server:.1} |", rate / ceiling);
    }
    println!("\n| two rails to one | ratio of the medians |\n| --- | --- |");
    for row in rows.keys().filter(|row| row.contains("1 rail") && !row.starts_with("ib_")) {
        let two = rate(&row.replace("1 rail", "2 rail"));
        println!("| {} | {:.2} |", row.replace(", 1 rail", ""), two / rate(row));
    }
}

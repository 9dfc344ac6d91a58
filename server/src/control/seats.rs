//! How many control connections there are.
//!
//! Guarantees: no more than a limit, of one listener: where one more comes, another makes room, of the address that has most of
//! them the one that was silent longest, so that whoever comes in thousands ends its own and clients, which say something every
//! second, stay. A connection that has not begun to speak HTTP/2 within a limit ends.

use crate::node::lock;
use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep};

/// Most control connections of one listener.
pub const MAX_CONNECTIONS: usize = 1024;
/// How long a connection may take to begin.
pub const BEGIN: Duration = railfs_proto::limits::CONNECT_DEADLINE;
/// Bytes of the beginning: the preface of HTTP/2.
const PREFACE: usize = 24;
/// That connections make room is said once in so long.
const SAID: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Sitting {
    from: Option<IpAddr>,
    /// When it was heard last, microseconds.
    heard: Arc<AtomicU64>,
    /// Told to end.
    end: oneshot::Sender<()>,
}

#[derive(Debug, Default)]
struct Table {
    sitting: HashMap<u64, Sitting>,
    next: u64,
    said: Option<Instant>,
}

impl Table {
    /// Who makes room: of the address with most, the one that was silent longest.
    fn last_heard(&self) -> Option<u64> {
        let mut of: HashMap<Option<IpAddr>, usize> = HashMap::new();
        self.sitting.values().for_each(|sitting| *of.entry(sitting.from).or_default() += 1);
        let most = of.into_iter().max_by_key(|(_, count)| *count)?.0;
        let its = self.sitting.iter().filter(|(_, sitting)| sitting.from == most);
        its.min_by_key(|(id, sitting)| (sitting.heard.load(Ordering::Relaxed), **id)).map(|(id, _)| *id)
    }
}

/// See the module.
#[derive(Debug)]
pub struct Seats {
    limit: usize,
    begun: Instant,
    table: Mutex<Table>,
}

impl Seats {
    /// For so many.
    pub fn new(limit: usize) -> Arc<Seats> {
        Arc::new(Seats { limit, begun: Instant::now(), table: Mutex::default() })
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// One for a connection that has come. On a runtime with a timer.
    pub fn take(self: &Arc<Self>, from: Option<IpAddr>) -> Seat {
        let heard = Arc::new(AtomicU64::new(self.now()));
        let (end, ended) = oneshot::channel();
        let (id, out, say) = {
            let mut table = lock(&self.table);
            let full = table.sitting.len() >= self.limit;
            let out = if full { table.last_heard().and_then(|id| table.sitting.remove(&id)) } else { None };
            let id = table.next;
            table.next += 1;
            table.sitting.insert(id, Sitting { from, heard: heard.clone(), end });
            let say = out.is_some() && table.said.is_none_or(|said| said.elapsed() >= SAID);
            if say {
                table.said = Some(Instant::now());
            }
            (id, out, say)
        };
        if say {
            tracing::warn!(
                limit = self.limit,
                "too many control connections: of the address with most of them the one that was silent longest makes room"
            );
        }
        if let Some(out) = out {
            // It may have ended by itself.
            let _ = out.end.send(());
        }
        Seat {
            seats: self.clone(),
            id,
            heard,
            ended,
            out: false,
            begin: Some(Box::pin(tokio::time::sleep(BEGIN))),
            got: 0,
        }
    }

    /// Taken.
    pub fn len(&self) -> usize {
        lock(&self.table).sitting.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One connection's.
#[derive(Debug)]
pub struct Seat {
    seats: Arc<Seats>,
    id: u64,
    heard: Arc<AtomicU64>,
    ended: oneshot::Receiver<()>,
    /// It has been told to end.
    out: bool,
    /// Until it has begun.
    begin: Option<Pin<Box<Sleep>>>,
    got: usize,
}

impl Seat {
    /// Whether the connection goes on; to be asked before each read, whose waker it takes too.
    ///
    /// # Errors
    /// It made room, or has not begun in time.
    pub fn poll(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        self.out = self.out || Pin::new(&mut self.ended).poll(context).is_ready();
        if self.out {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "it made room for other connections"));
        }
        if let Some(begin) = &mut self.begin
            && begin.as_mut().poll(context) == Poll::Ready(())
        {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it did not begin in time"));
        }
        Ok(())
    }

    /// So many bytes were read.
    pub fn heard(&mut self, bytes: usize) {
        self.heard.store(self.seats.now(), Ordering::Relaxed);
        self.got = self.got.saturating_add(bytes);
        if self.got >= PREFACE {
            self.begin = None;
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        lock(&self.seats.table).sitting.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;

    async fn step(seat: &mut Seat) -> io::Result<()> {
        // A task that asks a thousand times is made to wait by its runtime.
        tokio::task::unconstrained(poll_fn(|context| Poll::Ready(seat.poll(context)))).await
    }

    #[tokio::test(start_paused = true)]
    async fn i6_control_connections_are_bounded_and_the_most_silent_of_who_has_most_makes_room() {
        let seats = Seats::new(8);
        let (many, few) = (Some(IpAddr::from([10, 0, 0, 1])), Some(IpAddr::from([10, 0, 0, 2])));
        let mut friend = seats.take(few);
        friend.heard(PREFACE);
        let mut flood: Vec<Seat> = Vec::new();
        for _ in 0..1000 {
            tokio::time::advance(Duration::from_millis(1)).await;
            flood.push(seats.take(many));
            assert!(seats.len() <= 8, "{}", seats.len());
        }
        assert!(step(&mut friend).await.is_ok(), "who has few stays, though it was silent for longer");
        let mut ended = 0;
        for seat in &mut flood {
            ended += usize::from(step(seat).await.is_err());
        }
        assert_eq!(ended, 1000 - 7);
        // Among its own, who says something stays.
        tokio::time::advance(Duration::from_millis(1)).await;
        flood[993].heard(1);
        let _one = seats.take(many);
        assert!(step(&mut flood[993]).await.is_ok() && step(&mut flood[994]).await.is_err());
        drop((flood, friend));
        assert_eq!(seats.len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn i9_a_connection_that_does_not_begin_ends() {
        let seats = Seats::new(8);
        let (mut silent, mut slow, mut good) = (seats.take(None), seats.take(None), seats.take(None));
        good.heard(PREFACE);
        slow.heard(PREFACE - 1);
        tokio::time::advance(BEGIN + Duration::from_millis(1)).await;
        assert!(step(&mut silent).await.is_err() && step(&mut slow).await.is_err());
        assert!(step(&mut good).await.is_ok());
    }
}

//! Sessions and rail tickets: a pure table, with the clock passed in.
//!
//! Guarantees: a ticket lets exactly one connection join exactly one session, within [`TICKET_LIFE`]; a session ends when
//! its client says so, or when it has had neither a connection nor a hello for [`SESSION_IDLE`]; both tables are bounded.
//! A session belongs to the identity that opened it: nobody else can go on with it, and what joins it by ticket acts for it.
//! Where the table of sessions is full, the one that has been without a connection longest makes room: clients die
//! without a word.

use crate::access::Identity;
use railfs_engine::clock::Time;
use railfs_engine::rail::Lane;
use railfs_proto::limits::MAX_TICKETS;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// A session without connections and hellos ends after this long.
pub const SESSION_IDLE: Duration = Duration::from_secs(60);
/// A session that was heard of in this time does not make room for others.
pub const SESSION_YOUNG: Duration = Duration::from_secs(5);
/// A ticket that nobody used in this time is void.
pub const TICKET_LIFE: Duration = Duration::from_secs(30);
/// Most sessions of one server.
pub const MAX_SESSIONS: usize = 4096;

/// A one-time permission to join: 16 random bytes.
pub type Ticket = [u8; 16];

/// Why a connection may not join.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TicketError {
    /// Never given out, used before, or pushed out by newer ones.
    #[error("the ticket is not valid (used before, or never given out)")]
    Unknown,
    /// Too old.
    #[error("the ticket is older than {TICKET_LIFE:?}")]
    Expired,
    /// It belongs to another session.
    #[error("the ticket is not one of this session's")]
    OtherSession,
}

#[derive(Debug)]
struct Session<C> {
    /// Who opened it; `None`: a client without a certificate.
    owner: Option<Identity>,
    /// The last hello, or when the last connection ended.
    active: Time,
    tickets: VecDeque<Ticket>,
    connections: Vec<(u64, Lane, C)>,
}

/// The sessions of one incarnation. `C` is what a connection is to the caller.
#[derive(Debug)]
pub struct Sessions<C> {
    sessions: HashMap<u64, Session<C>>,
    tickets: HashMap<Ticket, (u64, Time)>,
    /// Made room for others; [`Sessions::expire`] will say so.
    made_room: Vec<u64>,
}

impl<C> Default for Sessions<C> {
    fn default() -> Self {
        Sessions { sessions: HashMap::new(), tickets: HashMap::new(), made_room: Vec::new() }
    }
}

impl<C: Clone> Sessions<C> {
    /// Opens a session under an id that the caller drew at random. False when the table is full of sessions that are
    /// connected or just began, or the id is taken.
    pub fn open(&mut self, id: u64, owner: Option<Identity>, now: Time) -> bool {
        if id == 0 || self.sessions.contains_key(&id) {
            return false;
        }
        if self.sessions.len() >= MAX_SESSIONS {
            let idle =
                |session: &Session<C>| session.connections.is_empty() && now.since(session.active) > SESSION_YOUNG;
            let longest = self.sessions.iter().filter(|(_, session)| idle(session));
            let Some(longest) = longest.min_by_key(|(_, session)| session.active).map(|(id, _)| *id) else {
                return false;
            };
            self.sessions.remove(&longest);
            self.made_room.push(longest);
        }
        let session = Session { owner, active: now, tickets: VecDeque::new(), connections: Vec::new() };
        self.sessions.insert(id, session);
        true
    }

    /// A hello of a session; false when this client has no such session (any more).
    pub fn renew(&mut self, id: u64, owner: Option<&Identity>, now: Time) -> bool {
        let session = self.sessions.get_mut(&id).filter(|session| session.owner.as_ref() == owner);
        session.map(|session| session.active = now).is_some()
    }

    /// Whether the session exists and is this client's.
    pub fn contains(&self, id: u64, owner: Option<&Identity>) -> bool {
        self.sessions.get(&id).is_some_and(|session| session.owner.as_ref() == owner)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.sessions.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    /// Gives a ticket out. The oldest of the session's is void when it has too many.
    pub fn issue(&mut self, id: u64, ticket: Ticket, now: Time) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if session.tickets.len() >= MAX_TICKETS
            && let Some(oldest) = session.tickets.pop_front()
        {
            self.tickets.remove(&oldest);
        }
        session.tickets.push_back(ticket);
        self.tickets.insert(ticket, (id, now));
    }

    /// Uses a ticket up; for whom the connection acts.
    ///
    /// # Errors
    /// See [`TicketError`]; a ticket of another session stays valid there.
    pub fn redeem(&mut self, id: u64, ticket: &Ticket, now: Time) -> Result<Option<Identity>, TicketError> {
        match self.tickets.get(ticket) {
            None => return Err(TicketError::Unknown),
            Some((session, _)) if *session != id => return Err(TicketError::OtherSession),
            Some(_) => {}
        }
        let issued = self.tickets.remove(ticket).map_or(Time::default(), |(_, issued)| issued);
        // Tickets go with their session.
        let Some(session) = self.sessions.get_mut(&id) else { return Err(TicketError::Unknown) };
        session.tickets.retain(|other| other != ticket);
        if now.since(issued) > TICKET_LIFE { Err(TicketError::Expired) } else { Ok(session.owner.clone()) }
    }

    /// A connection joined. False when its session has ended meanwhile.
    pub fn connected(&mut self, id: u64, connection: u64, lane: Lane, value: C) -> bool {
        let Some(session) = self.sessions.get_mut(&id) else { return false };
        session.connections.push((connection, lane, value));
        true
    }

    /// A connection ended.
    pub fn closed(&mut self, id: u64, connection: u64, now: Time) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.connections.retain(|(other, _, _)| *other != connection);
            session.active = session.active.max(now);
        }
    }

    /// The session's connections for bulk, by number.
    pub fn bulk(&self, id: u64) -> Vec<(u64, C)> {
        let connections = self.sessions.get(&id).map(|session| session.connections.iter());
        let bulk = connections.into_iter().flatten().filter(|(_, lane, _)| *lane == Lane::Bulk);
        bulk.map(|(connection, _, value)| (*connection, value.clone())).collect()
    }

    /// Connections in all sessions.
    pub fn connections(&self) -> usize {
        self.sessions.values().map(|session| session.connections.len()).sum()
    }

    /// The client is done with its session. False when there was none.
    pub fn end(&mut self, id: u64) -> bool {
        let Some(session) = self.sessions.remove(&id) else { return false };
        for ticket in &session.tickets {
            self.tickets.remove(ticket);
        }
        true
    }

    /// Ends sessions that were idle too long, and voids old tickets. Returns the sessions that ended.
    pub fn expire(&mut self, now: Time) -> Vec<u64> {
        let old = |session: &Session<C>| session.connections.is_empty() && now.since(session.active) > SESSION_IDLE;
        let mut ended = std::mem::take(&mut self.made_room);
        ended.extend(self.sessions.iter().filter(|(_, session)| old(session)).map(|(id, _)| *id));
        for id in &ended {
            self.sessions.remove(id);
        }
        let sessions = &mut self.sessions;
        self.tickets.retain(|ticket, (id, issued)| {
            let Some(session) = sessions.get_mut(id) else { return false };
            let valid = now.since(*issued) <= TICKET_LIFE;
            if !valid {
                session.tickets.retain(|other| other != ticket);
            }
            valid
        });
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time::default().after(Duration::from_secs(seconds))
    }

    #[test]
    fn a_ticket_lets_one_connection_join_one_session_once() {
        let mut sessions = Sessions::<()>::default();
        assert!(
            sessions.open(7, None, at(0))
                && sessions.open(8, None, at(0))
                && !sessions.open(7, None, at(0))
                && !sessions.open(0, None, at(0))
        );
        sessions.issue(7, [1; 16], at(0));
        assert_eq!(sessions.redeem(8, &[1; 16], at(1)), Err(TicketError::OtherSession));
        assert_eq!(sessions.redeem(7, &[1; 16], at(1)), Ok(None));
        assert_eq!(sessions.redeem(7, &[1; 16], at(1)), Err(TicketError::Unknown));
        sessions.issue(7, [2; 16], at(1));
        assert_eq!(sessions.redeem(7, &[2; 16], at(32)), Err(TicketError::Expired));
        assert_eq!(sessions.redeem(7, &[3; 16], at(32)), Err(TicketError::Unknown));
    }

    #[test]
    fn a_session_and_what_joins_it_are_of_the_identity_that_opened_it() {
        let is = |name: &str| Some(Identity::new(name).unwrap());
        let (alice, bob) = (is("alice"), is("bob"));
        let mut sessions = Sessions::<()>::default();
        assert!(sessions.open(7, alice.clone(), at(0)) && sessions.open(8, None, at(0)));
        assert!(sessions.renew(7, alice.as_ref(), at(1)) && sessions.contains(7, alice.as_ref()));
        for other in [bob.as_ref(), None] {
            assert!(!sessions.renew(7, other, at(1)) && !sessions.contains(7, other));
        }
        assert!(!sessions.contains(8, alice.as_ref()) && sessions.contains(8, None));
        sessions.issue(7, [1; 16], at(1));
        sessions.issue(8, [2; 16], at(1));
        assert_eq!(sessions.redeem(7, &[1; 16], at(2)), Ok(alice));
        assert_eq!(sessions.redeem(8, &[2; 16], at(2)), Ok(None));
    }

    #[test]
    fn tickets_replayed_stolen_expired_or_guessed_let_nobody_in() {
        let mut sessions = Sessions::<()>::default();
        assert!(sessions.open(7, None, at(0)) && sessions.open(8, None, at(0)));
        sessions.issue(7, [1; 16], at(0));
        // From another session: it stays good where it belongs.
        assert_eq!(sessions.redeem(8, &[1; 16], at(1)), Err(TicketError::OtherSession));
        // Guessed: every other value, also those that differ in one bit.
        for bit in 0..128 {
            let mut guess = [1u8; 16];
            guess[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(sessions.redeem(7, &guess, at(1)), Err(TicketError::Unknown));
        }
        assert_eq!(sessions.redeem(7, &[1; 16], at(1)), Ok(None));
        // Replayed, and stolen after use, by its own session and by another.
        assert_eq!(sessions.redeem(7, &[1; 16], at(1)), Err(TicketError::Unknown));
        assert_eq!(sessions.redeem(8, &[1; 16], at(1)), Err(TicketError::Unknown));
        // Expired, and one that was tried too late is used up.
        sessions.issue(7, [2; 16], at(1));
        assert_eq!(sessions.redeem(7, &[2; 16], at(1 + TICKET_LIFE.as_secs() + 1)), Err(TicketError::Expired));
        assert_eq!(sessions.redeem(7, &[2; 16], at(1)), Err(TicketError::Unknown));
        // Of a session that ended.
        sessions.issue(7, [3; 16], at(40));
        assert!(sessions.end(7));
        assert_eq!(sessions.redeem(7, &[3; 16], at(40)), Err(TicketError::Unknown));
        assert!(sessions.open(7, None, at(41)));
        assert_eq!(sessions.redeem(7, &[3; 16], at(41)), Err(TicketError::Unknown));
    }

    #[test]
    fn a_session_that_was_ended_leaves_nothing() {
        let mut sessions = Sessions::<()>::default();
        assert!(sessions.open(7, None, at(0)) && sessions.open(8, None, at(0)));
        sessions.issue(7, [1; 16], at(0));
        sessions.issue(8, [2; 16], at(0));
        assert!(sessions.connected(7, 1, Lane::Bulk, ()));
        assert!(sessions.end(7) && !sessions.end(7));
        assert_eq!((sessions.len(), sessions.tickets.len()), (1, 1));
        assert_eq!(sessions.redeem(7, &[1; 16], at(1)), Err(TicketError::Unknown));
        sessions.closed(7, 1, at(2));
        assert_eq!(sessions.expire(at(2)), []);
        assert_eq!(sessions.redeem(8, &[2; 16], at(1)), Ok(None));
    }

    #[test]
    fn i6_tickets_of_a_session_are_bounded() {
        let mut sessions = Sessions::<()>::default();
        sessions.open(7, None, at(0));
        for i in 0..10_000u64 {
            let mut ticket = [0; 16];
            ticket[..8].copy_from_slice(&i.to_le_bytes());
            sessions.issue(7, ticket, at(0));
        }
        assert_eq!(sessions.tickets.len(), MAX_TICKETS);
        assert_eq!(sessions.expire(at(31)), []);
        assert!(sessions.tickets.is_empty() && sessions.sessions[&7].tickets.is_empty());
    }

    #[test]
    fn i6_a_full_table_makes_room_by_what_is_idle_longest() {
        let mut sessions = Sessions::<()>::default();
        for id in 1..=MAX_SESSIONS as u64 {
            assert!(sessions.open(id, None, at(id / 1000)));
        }
        assert!(sessions.connected(1, 9, Lane::Bulk, ()));
        assert!(!sessions.open(10_000, None, at(4)), "all of them are young");
        assert!(sessions.open(10_000, None, at(10)));
        assert!(sessions.contains(1, None) && sessions.len() == MAX_SESSIONS);
        let ended = sessions.expire(at(10));
        assert!(ended.len() == 1 && ended[0] < 1000 && ended[0] != 1, "{ended:?}");
    }

    #[test]
    fn a_session_lives_as_long_as_it_is_used() {
        let mut sessions = Sessions::default();
        sessions.open(7, None, at(0));
        assert_eq!(sessions.expire(at(60)), []);
        assert!(sessions.renew(7, None, at(60)) && sessions.connected(7, 1, Lane::Bulk, "a"));
        assert!(sessions.connected(7, 2, Lane::Small, "b"));
        assert_eq!(sessions.bulk(7), [(1, "a")]);
        sessions.closed(7, 2, at(61));
        assert_eq!(sessions.expire(at(1000)), []);
        sessions.closed(7, 1, at(1000));
        assert_eq!(sessions.expire(at(1060)), []);
        assert_eq!(sessions.expire(at(1061)), [7]);
        assert!(
            !sessions.renew(7, None, at(1061)) && !sessions.connected(7, 3, Lane::Bulk, "c") && sessions.is_empty()
        );
    }
}

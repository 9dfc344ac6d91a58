//! The driver's own: what it does when a part of it hangs.

use super::*;
use crate::memory::Arena;
use std::sync::mpsc::{RecvTimeoutError, channel};

#[test]
fn a_pulse_is_answered_only_while_the_timer_and_a_worker_can_do_their_work() {
    const SOON: Duration = Duration::from_secs(20);
    let core = Core::new(Arena::new(8 << 20).unwrap(), 0);
    let driver = Driver::start(core, Clock::start(), 1, Box::new(|| {})).unwrap();
    let (send, answers) = channel();
    let ask = || {
        let send = send.clone();
        driver.pulse(Box::new(move |result| send.send(result.is_ok()).unwrap()));
    };
    ask();
    assert_eq!(answers.recv_timeout(SOON), Ok(true), "at rest");
    let stuck = lock(&driver.core);
    ask();
    assert_eq!(answers.recv_timeout(Duration::from_millis(100)), Err(RecvTimeoutError::Timeout), "the core is stuck");
    drop(stuck);
    assert_eq!(answers.recv_timeout(SOON), Ok(true));
    // The only worker hangs in somebody's reply.
    let (release, held) = channel::<()>();
    let (begun, begins) = channel();
    driver.later(move || {
        begun.send(()).unwrap();
        let _ = held.recv();
    });
    begins.recv_timeout(SOON).unwrap();
    ask();
    assert_eq!(answers.recv_timeout(Duration::from_millis(100)), Err(RecvTimeoutError::Timeout), "no worker is free");
    drop(release);
    assert_eq!(answers.recv_timeout(SOON), Ok(true));
    driver.close();
    ask();
    assert_eq!(answers.recv_timeout(SOON), Ok(false));
}
